"""RMS norm, composed of primitives.

Legend: D the normalised dim.
"""

from __future__ import annotations

import torch


def rms_norm(x_D: torch.Tensor, scale_D: torch.Tensor, eps: float) -> torch.Tensor:
    """``x / sqrt(mean(x^2) + eps) * scale`` over the last dim (Zhang and Sennrich 2019, arXiv:1910.07467).

    The mean is written as a sum divided by the size, because ``x`` is a global tensor: over a sharded dim the
    sum becomes a pending sum, and the size stays the whole one.

    Args:
        x_D: activations (..., D). Lower precisions are computed in float32.
        scale_D: the learned scale (D,).
        eps: added to the mean square.

    Returns:
        (..., D) in the dtype of ``x_D``.

    >>> rms_norm(torch.tensor([3.0, 4.0]), torch.ones(2), eps=0.0)
    tensor([0.8485, 1.1314])
    """
    wide_D = x_D.to(torch.promote_types(x_D.dtype, torch.float32))
    mean_square = (wide_D * wide_D).sum(-1, keepdim=True) / x_D.shape[-1]
    return (wide_D * torch.rsqrt(mean_square + eps)).to(x_D.dtype) * scale_D.to(x_D.dtype)
