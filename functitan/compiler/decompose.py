"""Which ops are written in terms of others before they are sharded.

An op is decomposed when its parts shard better than it does (a mean is a sum divided by the *global* size, a norm is
sums and pointwise ops), or to keep the number of rules small. Pointwise ops stay whole.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from functitan import _torch

aten = torch.ops.aten

#: Ops whose decomposition in torch is in terms of ops that have rules.
_FROM_TORCH = [
    aten.addmm,
    aten.addmv,
    aten.addbmm,
    aten.baddbmm,
    aten.addr,
    aten.std,
    aten.var,
    aten.var_mean,
    aten.std_mean,
    aten.native_layer_norm,
    aten.native_layer_norm_backward,
    aten.native_group_norm,
    aten.native_group_norm_backward,
    aten._fused_rms_norm,
    aten._fused_rms_norm_backward,
    aten.linalg_vector_norm,
    aten.logsumexp,
    aten.mse_loss,
    aten.mse_loss_backward,
    aten.smooth_l1_loss,
    aten.smooth_l1_loss_backward,
    aten.huber_loss,
    aten.huber_loss_backward,
    aten.binary_cross_entropy,
    aten.binary_cross_entropy_backward,
    aten.soft_margin_loss,
    aten.soft_margin_loss_backward,
    aten.tril,
    aten.triu,
    aten.eye,
    aten.trace,
    aten.dot,
    aten.vdot,
    aten.mv,
    aten.glu,
    aten.glu_backward,
]


@functools.cache
def decompositions() -> dict[Any, Callable[..., Any]]:
    """The decomposition table of the trace: overload -> function."""
    table = _torch.get_decompositions(_FROM_TORCH)
    table[aten.mean.default] = lambda x, *, dtype=None: _mean(x, None, False, dtype)
    table[aten.mean.dim] = lambda x, dim=None, keepdim=False, *, dtype=None: _mean(x, dim, keepdim, dtype)
    return table


def _mean(x: torch.Tensor, dim: Sequence[int] | None, keepdim: bool, dtype: torch.dtype | None) -> torch.Tensor:
    """A mean as a sum divided by the global number of elements."""
    dims = list(dim) if dim else list(range(x.ndim))
    count = math.prod(x.shape[d] for d in dims)
    return torch.sum(x, dims, keepdim, dtype=dtype) / count
