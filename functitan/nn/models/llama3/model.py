"""Llama 3: a pre-norm decoder with grouped-query attention, rotary positions and SwiGLU (arXiv:2407.21783).

Legend: B batch, S sequence, D model, V vocabulary, L layers, H query heads, G key-value heads, K head dim, F
hidden.
"""

from __future__ import annotations

from typing import Any

import torch

from functitan.annotations import Param, constrain, scan, use_params
from functitan.nn import init
from functitan.nn.attention import causal_attention, max_logits, merge_heads, qkv_heads
from functitan.nn.embedding import embedding
from functitan.nn.linear import linear
from functitan.nn.loss import cross_entropy
from functitan.nn.mlp import swiglu
from functitan.nn.models.llama3.config import Llama3Config
from functitan.nn.norm import rms_norm
from functitan.nn.rope import rope_table

Params = dict[str, Any]

# The residual stream may be split along the sequence ("seq"); attention and the matmuls want a sequence of
# their own splitting ("inner_seq"), so the two have separate names and a recipe decides.
RESIDUAL = ("batch", "seq", "embed")
INNER = ("batch", "inner_seq", "embed")
TOKENS = ("batch", "inner_seq")


def declare(config: Llama3Config) -> Params:
    """The parameters as a tree of :class:`functitan.Param`; layers are stacked on a leading "layers" dim.

    >>> from functitan.nn.models.llama3.config import FLAVORS
    >>> declare(FLAVORS["debugmodel"])["layers"]["wq"].shape
    (6, 256, 256)
    """
    D, L, F, V = config.dim, config.layers, config.mlp_dim, config.vocab
    HK, GK = config.heads * config.head_dim, config.kv_heads * config.head_dim
    weight, output = init.truncated_normal(), init.depth_scaled(init.truncated_normal())

    def stacked(rows: int, cols: int, axes: tuple[str, str], fill: init.Initializer = weight) -> Param:
        return Param((L, rows, cols), ("layers", *axes), fan_in=1, fan_out=2, init=fill)

    params: Params = {
        "tok_embeddings": Param((V, D), ("vocab", "embed"), init=init.normal(1.0)),
        "layers": {
            "attn_norm": Param((L, D), ("layers", "embed"), init=init.ones()),
            "wq": stacked(D, HK, ("embed", "heads")),
            "wk": stacked(D, GK, ("embed", "kv_heads")),
            "wv": stacked(D, GK, ("embed", "kv_heads")),
            "wo": stacked(HK, D, ("heads", "embed"), output),
            "mlp_norm": Param((L, D), ("layers", "embed"), init=init.ones()),
            "gate": stacked(D, F, ("embed", "mlp")),
            "up": stacked(D, F, ("embed", "mlp")),
            "down": stacked(F, D, ("mlp", "embed"), output),
        },
        "norm": Param((D,), ("embed",), init=init.ones()),
    }
    if not config.tied:
        params["head"] = Param((D, V), ("embed", "vocab"), fan_in=0, fan_out=1, init=init.fan_in_scaled(0))
    return params


def attention_layer(
    x_BSD: torch.Tensor,
    layer: Params,
    config: Llama3Config,
    rope: tuple[torch.Tensor, torch.Tensor],
    segment_ids_BS: torch.Tensor | None = None,
    with_max_logits: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What attention adds to the residual stream, (B, S, D), and if asked for the largest logits, (B, H)."""
    h_BSD = constrain(rms_norm(x_BSD, layer["attn_norm"], config.norm_eps), INNER)
    q_BHSK, k_BGSK, v_BGSK = qkv_heads(h_BSD, layer["wq"], layer["wk"], layer["wv"], rope, config.head_dim)
    out_BHSK = causal_attention(q_BHSK, k_BGSK, v_BGSK, segment_ids_BS)
    # Settled before the residual add: one reduction straight into the residual's layout.
    out_BSD = constrain(merge_heads(out_BHSK, layer["wo"]), RESIDUAL)
    return out_BSD, max_logits(q_BHSK, k_BGSK, segment_ids_BS) if with_max_logits else None


def mlp_layer(x_BSD: torch.Tensor, layer: Params, config: Llama3Config) -> torch.Tensor:
    """What the feed-forward layer adds to the residual stream, (B, S, D)."""
    h_BSD = constrain(rms_norm(x_BSD, layer["mlp_norm"], config.norm_eps), INNER)
    return constrain(swiglu(h_BSD, layer["gate"], layer["up"], layer["down"]), RESIDUAL)


def embed(params: Params, tokens_BS: torch.Tensor, config: Llama3Config) -> torch.Tensor:
    """Token embeddings in the compute dtype, (B, S, D)."""
    tokens_BS = constrain(tokens_BS, TOKENS)
    return constrain(embedding(tokens_BS, params["tok_embeddings"], config.compute_dtype), RESIDUAL)


def unembed(params: Params, x_BSD: torch.Tensor, config: Llama3Config) -> torch.Tensor:
    """Final norm and head: logits (B, S, V) in the compute dtype."""
    h_BSD = constrain(rms_norm(x_BSD, params["norm"], config.norm_eps), INNER)
    return linear(h_BSD, params["tok_embeddings"].T if config.tied else params["head"])


def forward(
    params: Params,
    tokens_BS: torch.Tensor,
    config: Llama3Config,
    *,
    segment_ids_BS: torch.Tensor | None = None,
    positions_BS: torch.Tensor | None = None,
    remat: Any = None,
) -> torch.Tensor:
    """The logits of every position.

    Args:
        params: a tree as :func:`declare` gives.
        tokens_BS: int64 ids in [0, V).
        config: the sizes.
        segment_ids_BS: one integer per token; attention stays within equal ids. None for one document per
            row.
        positions_BS: the position of each token, by default 0 to S-1. Rotary attention depends on differences
            only, so packed documents need no positions of their own.
        remat: the policy of the layers, see :func:`functitan.annotations.scan`.

    Returns:
        (B, S, V) in ``config.compute_dtype``.
    """
    return _forward(params, tokens_BS, config, segment_ids_BS, positions_BS, remat, with_max_logits=False)[0]


def _forward(
    params: Params,
    tokens_BS: torch.Tensor,
    config: Llama3Config,
    segment_ids_BS: torch.Tensor | None,
    positions_BS: torch.Tensor | None,
    remat: Any,
    with_max_logits: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The logits, and if asked for the largest attention logits (L, H) of the batch."""
    params = use_params(params)
    x_BSD = embed(params, tokens_BS, config)
    positions = torch.arange(tokens_BS.shape[1], device=tokens_BS.device) if positions_BS is None else positions_BS
    # Made once; the layers read them by closure.
    rope = rope_table(positions, config.head_dim, config.rope_theta, config.rope_scaling)
    if segment_ids_BS is not None:
        segment_ids_BS = constrain(segment_ids_BS, TOKENS)

    def block(x_BSD: torch.Tensor, layer: Params) -> tuple[torch.Tensor, torch.Tensor | None]:
        out_BSD, max_BH = attention_layer(x_BSD, layer, config, rope, segment_ids_BS, with_max_logits)
        x_BSD = x_BSD + out_BSD
        return x_BSD + mlp_layer(x_BSD, layer, config), max_BH

    x_BSD, max_LBH = scan(block, x_BSD, params["layers"], remat=remat)
    # Over the batch only here: the ranks join their maxima once for all layers.
    return unembed(params, x_BSD, config), None if max_LBH is None else max_LBH.amax(1)


def loss(
    params: Params, batch: dict[str, torch.Tensor], config: Llama3Config, *, remat: Any = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Summed cross entropy of a batch and the number of labels that counted; the mean is one division away.

    Args:
        params, config, remat: as for :func:`forward`.
        batch: "tokens" and "labels" (B, S) int64; optional "segment_ids" and "positions" (B, S).

    Returns:
        The sum, 0-d float32, and the count, 0-d int64.
    """
    return _loss(params, batch, config, remat, with_max_logits=False)[:2]


def loss_and_max_logits(
    params: Params, batch: dict[str, torch.Tensor], config: Llama3Config, *, remat: Any = None
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """:func:`loss`, and what :func:`functitan.optim.qk_clip` reads.

    Returns:
        The sum and count of :func:`loss`, and ``{"layers": (L, H)}``: of each layer and query head the largest attention
        logit in the whole batch, before the softmax. No gradient passes through it.
    """
    total, count, max_LH = _loss(params, batch, config, remat, with_max_logits=True)
    assert max_LH is not None
    return total, count, {"layers": max_LH}


def _loss(
    params: Params, batch: dict[str, torch.Tensor], config: Llama3Config, remat: Any, with_max_logits: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    logits_BSV, max_LH = _forward(
        params,
        batch["tokens"],
        config,
        batch.get("segment_ids"),
        batch.get("positions"),
        remat,
        with_max_logits,
    )
    total, count = cross_entropy(logits_BSV, constrain(batch["labels"], TOKENS))
    return total, count, max_LH
