"""The gated feed-forward layer.

Legend: B batch, S sequence, D model, F hidden.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from functitan.annotations import checkpoint_name
from functitan.nn.linear import linear


def swiglu(x_BSD: torch.Tensor, gate_DF: torch.Tensor, up_DF: torch.Tensor, down_FD: torch.Tensor) -> torch.Tensor:
    """``(silu(x @ gate) * (x @ up)) @ down`` (Shazeer 2020, arXiv:2002.05202).

    Args:
        x_BSD: activations (..., D), float.
        gate_DF, up_DF: the two input maps (D, F).
        down_FD: the output map (F, D).

    Returns:
        (..., D) in the dtype of ``x_BSD``.

    >>> swiglu(torch.ones(1, 1, 2), torch.ones(2, 3), torch.ones(2, 3), torch.ones(3, 2)).shape
    torch.Size([1, 1, 2])
    """
    gate_BSF = checkpoint_name(linear(x_BSD, gate_DF), "mlp_gate")
    up_BSF = checkpoint_name(linear(x_BSD, up_DF), "mlp_up")
    return linear(F.silu(gate_BSF) * up_BSF, down_FD)
