"""A mode that a tracer activates: torch's own attention and embedding become our ops, global RNG is refused.

It works on the functions a user calls, above autograd and dispatch, so that a trace never holds the kernel
that torch would pick for the device of a fake tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from functitan.errors import ArgumentError, TraceError
from functitan.ops.attention import attention
from functitan.ops.check import shaped
from functitan.ops.embedding import embedding
from functitan.ops.global_rng import global_rng_error, refuse_global_rng


class OwnOps(TorchFunctionMode):
    """While active, torch's attention and embedding call our ops, and draws from its global RNG are errors.

    The error is a TraceError that says what to write instead.

    >>> q = torch.ones(1, 2, 3, 4)
    >>> with OwnOps():
    ...     torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).shape
    torch.Size([1, 2, 3, 4])
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        ours = _OURS.get(func)
        if ours is not None:
            return ours(*args, **kwargs)
        refuse_global_rng(func, args, kwargs)
        return func(*args, **kwargs)


def _scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Torch's signature on our op: two to four dims, (..., heads, positions, head_dim)."""
    if dropout_p > 0.0:
        raise global_rng_error(
            f"F.scaled_dot_product_attention(dropout_p={dropout_p})",
            "dropout of its output, x * ft.random.bernoulli(key, 1 - p, x.shape) / (1 - p)",
        )
    rank = query.ndim
    if not 2 <= rank <= 4 or key.ndim != rank or value.ndim != rank:
        raise ArgumentError(
            "F.scaled_dot_product_attention is traced as an op of (batch, heads, positions, head_dim); "
            f"found query {shaped(query)}, key {shaped(key)}, value {shaped(value)}. "
            "Flatten leading dims into batch."
        )
    lead = (1,) * (4 - rank)
    q, k, v = (t.reshape(*lead, *t.shape) for t in (query, key, value))
    if q.shape[1] != k.shape[1] and not enable_gqa:
        raise ArgumentError(
            f"F.scaled_dot_product_attention was given {q.shape[1]} query heads and {k.shape[1]} kv heads; "
            "write enable_gqa=True to share kv heads."
        )
    out = attention(q, k, v, causal=is_causal, bias=attn_mask, scale=scale)
    return out.reshape(out.shape[4 - rank :])


def _embedding(
    input: torch.Tensor,
    weight: torch.Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> torch.Tensor:
    """Torch's signature on our op; the row at ``padding_idx`` gets no gradient."""
    if max_norm is not None or scale_grad_by_freq or sparse:
        raise TraceError(
            "F.embedding inside a compiled function has no max_norm (it changes the table in place), "
            "scale_grad_by_freq or sparse gradients; leave them out, and normalise rows first."
        )
    rows = embedding(input, weight)
    if padding_idx is None:
        return rows
    padding = input == (padding_idx if padding_idx >= 0 else weight.shape[0] + padding_idx)
    return torch.where(padding[..., None], rows.detach(), rows)


def _torch_embedding(
    weight: torch.Tensor,
    indices: torch.Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> torch.Tensor:
    """``torch.embedding``: other argument order, and -1 is no padding."""
    padding = None if padding_idx == -1 else padding_idx
    return _embedding(indices, weight, padding, scale_grad_by_freq=scale_grad_by_freq, sparse=sparse)


_OURS: dict[Callable[..., Any], Callable[..., torch.Tensor]] = {
    torch.nn.functional.scaled_dot_product_attention: _scaled_dot_product_attention,
    torch.nn.functional.embedding: _embedding,
    torch.embedding: _torch_embedding,
}
