"""Causal self-attention with grouped key-value heads.

Legend: B batch, S sequence, D model, H query heads, G key-value heads, K head dim, P rotary pairs.
"""

from __future__ import annotations

import torch

from functitan.annotations import checkpoint_name
from functitan.nn.linear import linear
from functitan.nn.rope import RopeLayout, apply_rope
from functitan.ops import attention_logits
from functitan.ops.attention import attention


def qkv_heads(
    x_BSD: torch.Tensor,
    wq_DHK: torch.Tensor,
    wk_DGK: torch.Tensor,
    wv_DGK: torch.Tensor,
    rope: tuple[torch.Tensor, torch.Tensor],
    head_dim: int,
    layout: RopeLayout = "interleaved",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values by head, with rotated queries and keys.

    Args:
        x_BSD: activations (B, S, D).
        wq_DHK: (D, H*K); wk_DGK, wv_DGK: (D, G*K), heads major.
        rope: cosine and sine from :func:`functitan.nn.rope.rope_table`.
        head_dim: K.
        layout: how the rotation pairs elements.

    Returns:
        q (B, H, S, K), k and v (B, G, S, K).
    """
    q_BSHK = linear(x_BSD, wq_DHK).unflatten(-1, (-1, head_dim))
    k_BSGK = linear(x_BSD, wk_DGK).unflatten(-1, (-1, head_dim))
    v_BSGK = linear(x_BSD, wv_DGK).unflatten(-1, (-1, head_dim))
    q_BSHK, k_BSGK = apply_rope(q_BSHK, *rope, layout), apply_rope(k_BSGK, *rope, layout)
    heads = (q_BSHK.transpose(1, 2), k_BSGK.transpose(1, 2), v_BSGK.transpose(1, 2))
    q_BHSK, k_BGSK, v_BGSK = (checkpoint_name(t, n) for t, n in zip(heads, ("q", "k", "v"), strict=True))
    return q_BHSK, k_BGSK, v_BGSK


def merge_heads(out_BHSK: torch.Tensor, wo_HKD: torch.Tensor) -> torch.Tensor:
    """Join the heads and map them back to the model dim.

    Args:
        out_BHSK: the attention output (B, H, S, K).
        wo_HKD: (H*K, D), heads major.

    Returns:
        (B, S, D).
    """
    return linear(out_BHSK.transpose(1, 2).flatten(-2), wo_HKD)


def causal_attention(
    q_BHSK: torch.Tensor,
    k_BGSK: torch.Tensor,
    v_BGSK: torch.Tensor,
    segment_ids_BS: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of every position to itself and earlier ones of its document.

    Query head h reads key-value head ``h // (H // G)``.

    Args:
        q_BHSK: queries; k_BGSK, v_BGSK: keys and values of the same sequence.
        segment_ids_BS: one integer per token; tokens see only tokens of equal id. None for one document.

    Returns:
        (B, H, S, K) in the dtype of ``q_BHSK``.
    """
    out_BHSK = attention(q_BHSK, k_BGSK, v_BGSK, causal=True, segment_ids=segment_ids_BS)
    return checkpoint_name(out_BHSK, "attention_out")


def max_logits(q_BHSK: torch.Tensor, k_BGSK: torch.Tensor, segment_ids_BS: torch.Tensor | None = None) -> torch.Tensor:
    """The largest logit of each row and head that :func:`causal_attention` takes a softmax of; no gradient passes.

    The largest over the batch, ``.amax(0)``, is what :func:`functitan.optim.qk_clip` reads. Take it after the layers'
    scan, so that the ranks' maxima are joined once for all layers.

    Returns:
        (B, H), float32 at least.
    """
    return attention_logits.max_logits(q_BHSK, k_BGSK, causal=True, segment_ids=segment_ids_BS)


def decode_attention(
    q_BH1K: torch.Tensor, k_BGMK: torch.Tensor, v_BGMK: torch.Tensor, length: torch.Tensor
) -> torch.Tensor:
    """Attention of one new token to the first ``length`` entries of a cache of M.

    Args:
        q_BH1K: the query of the new token.
        k_BGMK, v_BGMK: the cache; entries from ``length`` on are unwritten.
        length: 0-d int64, the written entries, the new token's own included.

    Returns:
        (B, H, 1, K).
    """
    batch, slots = q_BH1K.shape[0], k_BGMK.shape[2]
    written_M = (torch.arange(slots, device=length.device) < length).to(torch.int64)
    # Unwritten entries are another document: the mask is data, so that every step has the same shapes.
    query_B1 = torch.ones((batch, 1), dtype=torch.int64, device=length.device)
    return attention(q_BH1K, k_BGMK, v_BGMK, causal=False, segment_ids=(query_B1, written_M.expand(batch, slots)))
