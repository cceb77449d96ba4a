"""Generation from a Llama 3 with a key-value cache.

The cache is a pytree of fixed sizes that every step returns anew: all steps have the same shapes, so a
compiled step compiles once.

Legend: B batch, S prompt, M cache slots, V vocabulary, L layers, G key-value heads, K head dim, D model.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from functitan import random, tree
from functitan.annotations import constrain, scan, use_params
from functitan.errors import ConfigError
from functitan.nn.attention import causal_attention, decode_attention, merge_heads, qkv_heads
from functitan.nn.models.llama3.config import Llama3Config
from functitan.nn.models.llama3.model import INNER, RESIDUAL, Params, embed, mlp_layer, unembed
from functitan.nn.norm import rms_norm
from functitan.nn.rope import rope_table


@tree.dataclass
class Cache:
    """Keys and values of the tokens seen so far.

    Attributes:
        k_LBGMK, v_LBGMK: keys (rotated) and values; slots from ``length`` on are unwritten.
        length: 0-d int64, the tokens seen.
    """

    k_LBGMK: torch.Tensor
    v_LBGMK: torch.Tensor
    length: torch.Tensor


def prefill(params: Params, prompt_BS: torch.Tensor, config: Llama3Config, slots: int) -> tuple[torch.Tensor, Cache]:
    """Read a prompt.

    Args:
        params, config: as for :func:`functitan.nn.models.llama3.model.forward`.
        prompt_BS: int64 ids, rows of equal length S.
        slots: M, the tokens that the cache has room for, at least S.

    Returns:
        The logits after the last token (B, V), and the cache.
    """
    params = use_params(params)
    length = prompt_BS.shape[1]
    rope = _rope(torch.arange(length, device=prompt_BS.device), config)

    def block(x_BSD: torch.Tensor, layer: Params) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        q, k_BGSK, v_BGSK = _qkv(x_BSD, layer, config, rope)
        x_BSD = _residual(x_BSD, causal_attention(q, k_BGSK, v_BGSK), layer, config)
        # The slots not yet written are zeros behind the prompt's rows.
        room = (0, 0, 0, slots - length)
        return x_BSD, (F.pad(k_BGSK, room), F.pad(v_BGSK, room))

    x_BSD, (k_LBGMK, v_LBGMK) = scan(block, embed(params, prompt_BS, config), params["layers"])
    cache = Cache(k_LBGMK, v_LBGMK, torch.full((), length, dtype=torch.int64, device=prompt_BS.device))
    return unembed(params, x_BSD[:, -1:], config)[:, 0], cache


def decode(params: Params, token_B: torch.Tensor, cache: Cache, config: Llama3Config) -> tuple[torch.Tensor, Cache]:
    """Read one more token per row.

    Args:
        params, config: as for :func:`functitan.nn.models.llama3.model.forward`.
        token_B: int64 ids.
        cache: with at least one slot left.

    Returns:
        The logits after that token (B, V), and the new cache; the given one is unchanged.
    """
    params = use_params(params)
    rope = _rope(cache.length.reshape(1), config)
    slots_M1 = torch.arange(cache.k_LBGMK.shape[3], device=token_B.device).unsqueeze(-1)
    here_M1 = slots_M1 == cache.length

    def block(x_B1D: torch.Tensor, xs: tuple[Params, torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, Any]:
        layer, k_BGMK, v_BGMK = xs
        q, k, v = _qkv(x_B1D, layer, config, rope)
        k_BGMK, v_BGMK = torch.where(here_M1, k, k_BGMK), torch.where(here_M1, v, v_BGMK)
        out = decode_attention(q, k_BGMK, v_BGMK, cache.length + 1)
        return _residual(x_B1D, out, layer, config), (k_BGMK, v_BGMK)

    x_B1D = embed(params, token_B.unsqueeze(-1), config)
    x_B1D, (k_LBGMK, v_LBGMK) = scan(block, x_B1D, (params["layers"], cache.k_LBGMK, cache.v_LBGMK))
    return unembed(params, x_B1D, config)[:, 0], Cache(k_LBGMK, v_LBGMK, cache.length + 1)


def generate(
    params: Params,
    prompt_BS: torch.Tensor,
    config: Llama3Config,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    key: Any = None,
    valid_ids: int | None = None,
) -> torch.Tensor:
    """Continue prompts of equal length.

    Args:
        params, config: as for :func:`functitan.nn.models.llama3.model.forward`.
        prompt_BS: int64 ids, S at least 1.
        max_new_tokens: how many tokens to add.
        temperature: 0 takes the most likely token; above, tokens are drawn from ``softmax(logits /
            temperature)``.
        key: a key of :mod:`functitan.random`, needed above temperature 0.
        valid_ids: only ids below this are chosen; by default the whole vocabulary.

    Returns:
        int64 (B, S + max_new_tokens).

    Raises:
        ConfigError: an empty prompt, a negative temperature, or no key for drawing.
    """
    if prompt_BS.ndim != 2 or prompt_BS.shape[1] < 1:
        raise ConfigError(
            f"generate needs a prompt of shape (batch, length >= 1); it has {tuple(prompt_BS.shape)}. "
            "Begin with the token that separates documents when there is no text to continue."
        )
    if temperature < 0 or (temperature > 0 and key is None):
        raise ConfigError(
            f"generate with temperature={temperature} and key={key}: pass a temperature >= 0, and above 0 "
            "also key=ft.random.key(seed)."
        )
    if max_new_tokens < 1:
        return prompt_BS
    # The last token is chosen and never read, so it needs no slot.
    logits_BV, cache = prefill(params, prompt_BS, config, prompt_BS.shape[1] + max_new_tokens - 1)
    chosen = [_choose(logits_BV[:, :valid_ids], temperature, key, 0)]
    for i in range(1, max_new_tokens):
        logits_BV, cache = decode(params, chosen[-1], cache, config)
        chosen.append(_choose(logits_BV[:, :valid_ids], temperature, key, i))
    return torch.cat([prompt_BS, torch.stack(chosen, dim=1)], dim=1)


def _choose(logits_BV: torch.Tensor, temperature: float, key: Any, index: int) -> torch.Tensor:
    if temperature == 0:
        return logits_BV.argmax(-1)
    return random.categorical(random.fold_in(key, index), logits_BV.float() / temperature)


def _rope(positions_S: torch.Tensor, config: Llama3Config) -> tuple[torch.Tensor, torch.Tensor]:
    return rope_table(positions_S, config.head_dim, config.rope_theta, config.rope_scaling)


def _qkv(
    x_BSD: torch.Tensor, layer: Params, config: Llama3Config, rope: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    h_BSD = constrain(rms_norm(x_BSD, layer["attn_norm"], config.norm_eps), INNER)
    return qkv_heads(h_BSD, layer["wq"], layer["wk"], layer["wv"], rope, config.head_dim)


def _residual(x_BSD: torch.Tensor, out_BHSK: torch.Tensor, layer: Params, config: Llama3Config) -> torch.Tensor:
    x_BSD = x_BSD + constrain(merge_heads(out_BHSK, layer["wo"]), RESIDUAL)
    return x_BSD + mlp_layer(x_BSD, layer, config)
