"""Attention by torch's fused CPU kernel: no matrix of logits in memory, grouped kv heads without a copy.

The kernel does causality itself; every other condition becomes one additive mask, built once per call at the
cost of (B, S, T) and shared by the heads.

Legend: B batch, G kv heads, H query heads, S queries, T keys, K head dim.
"""

from __future__ import annotations

import math

import torch

from functitan._torch import sdpa_cpu, sdpa_cpu_backward
from functitan.ops.attention_mask import Mask
from functitan.ops.attention_math import compute_dtype

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def why_not(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str | None:
    """The reason why this kernel cannot run on these operands, or None when it can."""
    if q.dtype not in _DTYPES:
        return f"the CPU kernel computes in {', '.join(str(d) for d in _DTYPES)}, and q is {q.dtype}"
    if v.shape[-1] != q.shape[-1]:
        return f"the CPU kernel needs v as wide as q and k; v has head dim {v.shape[-1]}, q has {q.shape[-1]}"
    if 0 in (*q.shape, *k.shape):
        return "the CPU kernel needs at least one query, key and head"
    return None


def _mask_term(q: torch.Tensor, k: torch.Tensor, mask: Mask) -> torch.Tensor | None:
    return mask.without_causal().additive(q.shape[2], k.shape[2], q.device, q.dtype)


def _packed(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``attention_math.forward``."""
    term = _mask_term(q, k, mask)
    out, lse = sdpa_cpu(_packed(q), _packed(k), _packed(v), 0.0, mask.causal, attn_mask=term, scale=scale)
    if term is not None:
        # The kernel gives rows without keys out = 0, as we want, but lse = 0.
        seen = term > -math.inf
        if mask.causal:
            seen = seen & seen.new_ones(seen.shape[-2:]).tril_()
        lse = lse.masked_fill(~seen.any(-1), -math.inf)
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
    """As ``attention_math.backward``, with ``out`` and ``lse`` the final ones.

    The kernel knows no gradient of the log-sum-exp. That gradient is g * scale * sum_j P_ij k_j for q_i,
    which is attention with the keys as values, and scale * sum_i P_ij g q_i for k_j, which is the gradient of
    those values.
    """
    term = _mask_term(q, k, mask)
    # Rows without keys have lse = -inf; the kernel computes exp(logits - lse), which needs a finite number
    # there.
    lse_ = lse if term is None else lse.masked_fill(lse == -math.inf, 0.0)
    q_, k_, v_ = _packed(q), _packed(k), _packed(v)

    def kernel(grad: torch.Tensor, values: torch.Tensor, out: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return sdpa_cpu_backward(
            _packed(grad), q_, k_, values, out, lse_, 0.0, mask.causal, attn_mask=term, scale=scale
        )

    dq, dk, dv = kernel(grad_out, v_, out)
    if grad_lse is not None:
        weight = (scale * grad_lse)[..., None]
        keys, own_lse = sdpa_cpu(q_, k_, k_, 0.0, mask.causal, attn_mask=term, scale=scale)
        # With a sink the final probabilities are smaller than this call's; rows without keys have keys = 0.
        share = torch.exp(own_lse - lse_)[..., None]
        wide = compute_dtype(q.dtype)
        dq = (dq.to(wide) + weight * share * keys).to(q.dtype)
        dk_lse = kernel((weight * q).to(q.dtype), k_, torch.zeros_like(out))[2]
        dk = dk + dk_lse
    return dq, dk, dv
