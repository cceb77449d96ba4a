"""Attention and its gradient in plain torch: the reference of every kernel, for any dtype and mask.

The formulas are those of FlashAttention-2 (Dao 2023, algorithms 1 and 2) without the tiling: the backward
pass recomputes the probabilities from the log-sum-exp, so the two halves are separate ops that share no
hidden state.

Legend: B batch, G kv heads, R query heads per kv head, H = G*R, S queries, T keys, K head dim of q and k,
V of v.
"""

from __future__ import annotations

import math

import torch

from functitan.ops.attention_mask import Mask


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 stays; everything else is computed in float32, as the fused kernels accumulate."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _by_group(x_BHSD: torch.Tensor, groups: int) -> torch.Tensor:
    """(B, H, S, D) to (B, G, R*S, D): the queries of one kv head side by side, so that kv is not repeated."""
    B, H, S, D = x_BHSD.shape
    return x_BHSD.reshape(B, groups, (H // groups) * S, D)


def _logits(q: torch.Tensor, k: torch.Tensor, mask: Mask, scale: float) -> torch.Tensor:
    (B, H, S, _), (_, G, T, _) = q.shape, k.shape
    logits = (_by_group(q * scale, G) @ k.mT).reshape(B, H, S, T)
    term = mask.additive(S, T, q.device, logits.dtype)
    return logits if term is None else logits + term


def _probabilities(logits: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    # A row without keys has lse = -inf; any finite number in its place gives exp(-inf) = 0 instead of NaN.
    return torch.exp(logits - lse.masked_fill(lse == -math.inf, 0.0)[..., None])


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention without a sink: out (B, H, S, V) in q's dtype, and lse (B, H, S) in the compute dtype.

    A row whose keys are all masked has out = 0 and lse = -inf.
    """
    wide = compute_dtype(q.dtype)
    G = k.shape[1]
    logits = _logits(q.to(wide), k.to(wide), mask, scale)
    lse = torch.logsumexp(logits, dim=-1)
    probs = _probabilities(logits, lse)
    out = _by_group(probs, G) @ v.to(wide)
    return out.reshape(*q.shape[:3], v.shape[-1]).to(q.dtype), lse


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
    """Gradients of q, k and v, in their shapes and dtypes.

    ``out`` and ``lse`` are the final ones: with a sink inside, the probabilities exp(logits - lse) are those
    of a softmax over the keys and the sink, and the same formulas hold.
    """
    wide = compute_dtype(q.dtype)
    G = k.shape[1]
    q_, k_, v_, grad, out_ = (t.to(wide) for t in (q, k, v, grad_out, out))
    probs = _probabilities(_logits(q_, k_, mask, scale), lse)
    grad_rows = _by_group(grad, G)
    dv = _by_group(probs, G).mT @ grad_rows
    dprobs = (grad_rows @ v_.mT).reshape(probs.shape)
    # d lse / d logits = probs, so the log-sum-exp's gradient joins the row term of the softmax's.
    row = (grad * out_).sum(-1)
    if grad_lse is not None:
        row = row - grad_lse
    dlogits = _by_group(probs * (dprobs - row[..., None]), G)
    dq = (dlogits @ k_).reshape(q.shape) * scale
    dk = dlogits.mT @ _by_group(q_, G) * scale
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
