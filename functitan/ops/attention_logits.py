"""The largest attention logit of each head, before the softmax: one op, without the logits in memory at once.

The fused kernels of :mod:`functitan.ops.attention` do not give it, so the products of queries and keys are made again:
half of what attention computes.

Legend: B batch, G kv heads, R query heads per kv head, H = G*R, S queries, T keys, K head dim.
"""

from __future__ import annotations

import math

import torch

from functitan.errors import ArgumentError
from functitan.ops.attention import Segments
from functitan.ops.attention_mask import Mask
from functitan.ops.attention_math import compute_dtype
from functitan.ops.check import shaped

#: Logits made at once, in elements.
_AT_ONCE = 2**24


def max_logits(
    q_BHSK: torch.Tensor,
    k_BGTK: torch.Tensor,
    *,
    causal: bool = False,
    segment_ids: Segments | None = None,
    bias: torch.Tensor | None = None,
    window: int | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """Per batch entry and head the largest ``scale * q k^T`` among the keys that are attended.

    It is a measurement: no gradient passes. A floating ``bias`` is not added, since no weight of q or k scales it; its
    entries of minus infinity mask.

    Args:
        q_BHSK, k_BGTK, causal, segment_ids, bias, window, scale: as for :func:`functitan.ops.attention.attention`.

    Returns:
        (B, H) in float32 (float64 for float64 operands); minus infinity where no query may attend to any key.

    Raises:
        ArgumentError: shapes or dtypes that do not fit.

    >>> q = torch.tensor([1.0, 3.0]).reshape(1, 1, 2, 1)
    >>> max_logits(q, q.flip(2), causal=True, scale=1.0)
    tensor([[9.]])
    """
    if q_BHSK.ndim != 4 or k_BGTK.ndim != 4 or q_BHSK.dtype != k_BGTK.dtype or not q_BHSK.is_floating_point():
        raise ArgumentError(
            f"max_logits needs q (B, H, S, K) and k (B, G, T, K) in one floating dtype; found q {shaped(q_BHSK)}, "
            f"k {shaped(k_BGTK)}."
        )
    (B, H, _, K), G = q_BHSK.shape, k_BGTK.shape[1]
    if k_BGTK.shape[0] != B or k_BGTK.shape[-1] != K or G == 0 or H % G:
        raise ArgumentError(
            f"max_logits needs q (B, H, S, K) and k (B, G, T, K) that agree in B and K, with H a multiple of G; found "
            f"q {shaped(q_BHSK)}, k {shaped(k_BGTK)}."
        )
    if bias is not None:
        bias = bias.reshape((1,) * (4 - bias.ndim) + tuple(bias.shape))
    ids = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
    scale = 1.0 / math.sqrt(K) if scale is None else float(scale)
    return _max_logits(q_BHSK.detach(), k_BGTK.detach(), *ids, bias, causal, window, scale)


@torch.library.custom_op("functitan::attention_max_logits", mutates_args=())
def _max_logits(
    q: torch.Tensor,
    k: torch.Tensor,
    q_segments: torch.Tensor | None,
    kv_segments: torch.Tensor | None,
    bias: torch.Tensor | None,
    causal: bool,
    window: int | None,
    scale: float,
) -> torch.Tensor:
    (B, H, S, K), (_, G, T, _) = q.shape, k.shape
    if bias is not None and bias.dtype != torch.bool:
        bias = bias != -math.inf
    allowed = Mask(q_segments, kv_segments, bias, causal, window).allowed(S, T, q.device)
    wide = compute_dtype(q.dtype)
    q, k = q.to(wide) * scale, k.to(wide)
    found = q.new_full((B, H), -math.inf)
    rows = max(1, _AT_ONCE // max(1, B * H * T))
    for start in range(0, S, rows):
        part = q[:, :, start : start + rows]
        logits = (part.reshape(B, G, -1, K) @ k.mT).reshape(B, H, -1, T)
        if allowed is not None:
            own = allowed if allowed.shape[-2] == 1 else allowed[..., start : start + rows, :]
            logits = logits.masked_fill(~own, -math.inf)
        found = torch.maximum(found, logits.amax((-2, -1)))
    return found


@_max_logits.register_fake
def _(q, k, q_segments, kv_segments, bias, causal, window, scale):  # type: ignore[no-untyped-def]
    return q.new_empty(q.shape[:2], dtype=compute_dtype(q.dtype))
