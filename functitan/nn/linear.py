"""A linear map without a bias.

Legend: I in, O out.
"""

from __future__ import annotations

import torch


def linear(x_I: torch.Tensor, w_IO: torch.Tensor) -> torch.Tensor:
    """``x @ w`` in the dtype of ``x``.

    Weights are (in, out), so that a model reads as its formula. A weight kept in another dtype is cast first:
    under sharded storage the cast then happens before the gather, and fewer bytes are sent.

    Args:
        x_I: activations (..., I).
        w_IO: the weight (I, O).

    Returns:
        (..., O) in the dtype of ``x_I``.

    >>> linear(torch.ones(2, 3), torch.ones(3, 4)).shape
    torch.Size([2, 4])
    """
    return x_I @ w_IO.to(x_I.dtype)
