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
from functitan.compiler import decompose_loss

aten = torch.ops.aten

#: Ops whose decomposition in torch is in terms of ops that have rules.
_FROM_TORCH = [
    aten.addmm,
    aten.addmv,
    aten.baddbmm,
    aten.addr,
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
    aten.native_batch_norm,
    aten.native_batch_norm_backward,
    aten._native_batch_norm_legit,
    aten.log_sigmoid_forward,
    aten.log_sigmoid_backward,
    aten.rot90,
    aten._unsafe_masked_index,
    aten._unsafe_masked_index_put_accumulate,
    aten.diag_embed,
    aten.binary_cross_entropy_with_logits,
    aten.upsample_nearest1d,
    aten.upsample_nearest2d,
    aten.pixel_shuffle,
    aten.pixel_unshuffle,
    aten.channel_shuffle,
    aten.renorm,
    aten.block_diag,
    aten.norm,
]


@functools.cache
def decompositions() -> dict[Any, Callable[..., Any]]:
    """The decomposition table of the trace: overload -> function."""
    table = _torch.get_decompositions(_FROM_TORCH)
    table[aten.mean.default] = lambda x, *, dtype=None: _mean(x, None, False, dtype)
    table[aten.mean.dim] = lambda x, dim=None, keepdim=False, *, dtype=None: _mean(x, dim, keepdim, dtype)
    table[aten.var.correction] = lambda x, dim=None, *, correction=None, keepdim=False: _var_mean(
        x, dim, correction, keepdim
    )[0]
    table[aten.var_mean.correction] = lambda x, dim=None, *, correction=None, keepdim=False: _var_mean(
        x, dim, correction, keepdim
    )
    table[aten.std.correction] = lambda x, dim=None, *, correction=None, keepdim=False: torch.sqrt(
        _var_mean(x, dim, correction, keepdim)[0]
    )
    table[aten.std_mean.correction] = _std_mean
    table[aten.as_strided.default] = _as_strided
    table[aten._trilinear.default] = _trilinear
    table[aten.put.default] = lambda x, index, source, accumulate=False: (
        x.reshape(-1).index_put([index.reshape(-1)], source.reshape(-1), accumulate).reshape(x.shape)
    )
    table[aten.addbmm.default] = _addbmm
    table[aten.aminmax.default] = lambda x, *, dim=None, keepdim=False: tuple(
        f(x, [] if dim is None else [dim], keepdim) for f in (torch.amin, torch.amax)
    )
    table[aten.nansum.default] = lambda x, dim=None, keepdim=False, *, dtype=None: torch.sum(
        torch.where(torch.isnan(x), 0, x), list(dim) if dim else list(range(x.ndim)), keepdim, dtype=dtype
    )
    table[aten.repeat.default] = _repeat
    table[aten.linspace.default] = _linspace
    table[aten.take.default] = lambda x, index: x.reshape(-1).gather(0, index.reshape(-1)).reshape(index.shape)
    table[aten.fill.Scalar] = torch.full_like
    table[aten.fill.Tensor] = lambda x, value: value.to(x.dtype).expand(x.shape)
    table[aten.zero.default] = torch.zeros_like
    table[aten.copy.default] = lambda x, source, non_blocking=False: source.to(x.dtype).expand(x.shape)
    table[aten.convolution.default] = _convolution
    table[aten.nll_loss_forward.default] = decompose_loss.nll
    table[aten.nll_loss2d_forward.default] = decompose_loss.nll
    table[aten.nll_loss_backward.default] = decompose_loss.nll_backward
    table[aten.nll_loss2d_backward.default] = decompose_loss.nll_backward
    return table


def _mean(x: torch.Tensor, dim: Sequence[int] | None, keepdim: bool, dtype: torch.dtype | None) -> torch.Tensor:
    """A mean as a sum divided by the global number of elements."""
    dims = list(dim) if dim else list(range(x.ndim))
    count = math.prod(x.shape[d] for d in dims)
    return torch.sum(x, dims, keepdim, dtype=dtype) / count


def _var_mean(
    x: torch.Tensor, dim: Sequence[int] | None, correction: float | None, keepdim: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The variance about the global mean, divided by the global count."""
    dims = list(dim) if dim else list(range(x.ndim))
    n = math.prod(x.shape[d] for d in dims)
    mean = torch.sum(x, dims, True) / n
    gap = torch.abs(x - mean) if x.is_complex() else x - mean
    var = torch.sum(gap * gap, dims, keepdim) / max(n - (1 if correction is None else correction), 0)
    return var, mean if keepdim else mean.reshape(var.shape)


def _std_mean(
    x: torch.Tensor, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    var, mean = _var_mean(x, dim, correction, keepdim)
    return torch.sqrt(var), mean


def _trilinear(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    expand_a: Sequence[int],
    expand_b: Sequence[int],
    expand_c: Sequence[int],
    over: Sequence[int],
    unroll_dim: int = 1,
) -> torch.Tensor:
    """A product of three, each broadcast along some dims, summed over others."""
    out = None
    for x, dims in ((a, expand_a), (b, expand_b), (c, expand_c)):
        for d in sorted(dims):
            x = x.unsqueeze(d)
        out = x if out is None else out * x
    assert out is not None
    return out.sum(list(over)) if over else out


def _as_strided(x: torch.Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: Any = None) -> Any:
    """Strides that only say "contiguous" are a reshape; any others are about memory, which a global value has not."""
    step, plain = 1, []
    for n in reversed(size):
        plain.append(step)
        step *= n
    same = all(n == 1 or a == b for n, a, b in zip(size, stride, reversed(plain), strict=True))
    if same and not storage_offset and step == x.numel() and x.is_contiguous():
        return x.reshape(size)
    return NotImplemented


def _addbmm(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: Any = 1, alpha: Any = 1) -> torch.Tensor:
    return c * beta + torch.bmm(a, b).sum(0) * alpha


def _repeat(x: torch.Tensor, repeats: Sequence[int]) -> torch.Tensor:
    """A broadcast along new dims, joined with the old ones."""
    shape = [1] * (len(repeats) - x.ndim) + list(x.shape)
    pairs = list(zip(repeats, shape, strict=True))
    wide = x.reshape([s for n in shape for s in (1, n)]).expand([s for pair in pairs for s in pair])
    return wide.reshape([r * n for r, n in pairs])


def _linspace(start: Any, end: Any, steps: int, **options: Any) -> torch.Tensor:
    """Counted from the nearer end, as torch does it, so that both ends are exact."""
    options.pop("pin_memory", None)
    dtype = options.get("dtype") or torch.get_default_dtype()
    options["dtype"] = dtype
    if steps < 2:
        return torch.full((steps,), start, **options)
    index = torch.arange(steps, device=options.get("device")).to(dtype)
    step = (end - start) / (steps - 1)
    return torch.where(index < steps // 2, start + step * index, end - step * (steps - 1 - index)).to(dtype)


def _convolution(x: Any, w: Any, bias: Any, *rest: Any) -> Any:
    """The bias apart: a convolution over split input channels is a sum over ranks, the bias is added once."""
    if bias is None:
        return NotImplemented
    out = torch.ops.aten.convolution.default(x, w, None, *rest)
    return out + bias.reshape([-1] + [1] * (out.ndim - 2))
