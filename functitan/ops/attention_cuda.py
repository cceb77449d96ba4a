"""Attention by torch's fused CUDA kernels: flash where it applies, the memory-efficient one with any mask.

Not run on a GPU so far: written after torch's own calls of these kernels, and to be tested where there is
one.

Legend: B batch, G kv heads, R query heads per kv head, H = G*R, S queries, T keys, K head dim.
"""

from __future__ import annotations

import math

import torch

from functitan._torch import (
    sdpa_cuda_efficient,
    sdpa_cuda_efficient_backward,
    sdpa_cuda_flash,
    sdpa_cuda_flash_backward,
)
from functitan.ops.attention_mask import Mask

_FLASH_DTYPES = (torch.bfloat16, torch.float16)
_DTYPES = (*_FLASH_DTYPES, torch.float32)
#: The efficient kernel reads mask rows in vectors, and writes its log-sum-exp in blocks of queries.
_MASK_ALIGNMENT, _LSE_ALIGNMENT = 16, 32


def why_not(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str | None:
    """The reason why no fused kernel can run on these operands, or None when one can."""
    if q.dtype not in _DTYPES:
        return f"the CUDA kernels compute in {', '.join(str(d) for d in _DTYPES)}, and q is {q.dtype}"
    if v.shape[-1] != q.shape[-1]:
        return f"the CUDA kernels need v as wide as q and k; v has head dim {v.shape[-1]}, q has {q.shape[-1]}"
    if q.shape[-1] % 8:
        return f"the CUDA kernels need a head dim divisible by 8; found {q.shape[-1]}"
    if 0 in (*q.shape, *k.shape):
        return "the CUDA kernels need at least one query, key and head"
    return None


def _is_plain(mask: Mask) -> bool:
    return mask.q_segments is None and mask.bias is None and mask.window is None


def _use_flash(q: torch.Tensor, k: torch.Tensor, mask: Mask) -> bool:
    # Flash counts causality from the end of both when the lengths differ; ours counts from the start.
    aligned = not mask.causal or q.shape[2] == k.shape[2]
    return _is_plain(mask) and aligned and q.dtype in _FLASH_DTYPES and q.shape[-1] <= 256


def _per_query_head(x_BGTK: torch.Tensor, heads: int) -> torch.Tensor:
    return x_BGTK.repeat_interleave(heads // x_BGTK.shape[1], dim=1)


def _per_kv_head(grad_BHTK: torch.Tensor, groups: int) -> torch.Tensor:
    return grad_BHTK.unflatten(1, (groups, -1)).sum(2)


def _mask_term(q: torch.Tensor, k: torch.Tensor, mask: Mask) -> torch.Tensor | None:
    """The additive mask, expanded to (B, H, S, T), with aligned rows; None if the kernel needs none."""
    if _is_plain(mask):
        return None
    term = mask.additive(q.shape[2], k.shape[2], q.device, q.dtype)
    assert term is not None
    term = term.expand(*term.shape[:2], q.shape[2], k.shape[2])
    keys = k.shape[2]
    padded = torch.nn.functional.pad(term, (0, -keys % _MASK_ALIGNMENT))
    return padded[..., :keys].expand(*q.shape[:3], keys)


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``attention_math.forward``."""
    k_, v_ = _per_query_head(k, q.shape[1]), _per_query_head(v, q.shape[1])
    if _use_flash(q, k, mask):
        out, lse, *_ = sdpa_cuda_flash(q, k_, v_, 0.0, mask.causal, False, scale=scale)
        return out, lse
    term = _mask_term(q, k, mask)
    causal = mask.causal and term is None
    out, lse, *_ = sdpa_cuda_efficient(q, k_, v_, term, True, 0.0, causal, scale=scale)
    lse = lse[..., : q.shape[2]]
    if term is not None:
        # Rows without keys come back as NaN.
        dead = ~(term > -math.inf).any(-1)
        out, lse = out.masked_fill(dead[..., None], 0.0), lse.masked_fill(dead, -math.inf)
    return out, lse


def backward(
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Mask,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As ``attention_math.backward``; the log-sum-exp's gradient goes as in ``attention_cpu.backward``."""
    groups, queries = k.shape[1], q.shape[2]
    k_, v_ = _per_query_head(k, q.shape[1]), _per_query_head(v, q.shape[1])
    # Both kernels take the state of the dropout generator, which nothing reads without dropout.
    unused = torch.zeros((), dtype=torch.int64, device=q.device)
    flash = _use_flash(q, k, mask)
    term = None if flash else _mask_term(q, k, mask)
    lse_ = lse.masked_fill(lse == -math.inf, 0.0)
    padded_lse = torch.nn.functional.pad(lse_, (0, -queries % _LSE_ALIGNMENT), value=math.inf)

    def kernel(grad: torch.Tensor, values: torch.Tensor, out: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if flash:
            return sdpa_cuda_flash_backward(
                grad.contiguous(), q, k_, values, out, lse_, None, None, queries, k.shape[2],
                0.0, mask.causal, unused, unused, scale=scale,
            )  # fmt: skip
        return sdpa_cuda_efficient_backward(
            grad.contiguous(), q, k_, values, term, out, padded_lse, unused, unused,
            0.0, [True, True, True, False], mask.causal and term is None, scale=scale,
        )[:3]  # fmt: skip

    dq, dk, dv = kernel(grad_out, v_, out)
    if grad_lse is not None:
        weight = (scale * grad_lse)[..., None]
        keys, own_lse = forward(q, k, k, mask, scale)
        dq = (dq + weight * torch.exp(own_lse - lse_)[..., None] * keys).to(q.dtype)
        dk = dk + kernel((weight * q).to(q.dtype), k_, torch.zeros_like(out))[2]
    return dq, _per_kv_head(dk, groups), _per_kv_head(dv, groups)
