"""Attention as one op: softmax(scale * q k^T + mask) v with grouped heads, and its log-sum-exp.

Two ops stand in every graph, ``functitan::attention`` and ``functitan::attention_backward``; what runs inside
them is decided when they run, from the device and dtype of the operands, because traces are made on fake
tensors. Softmax and its gradient follow FlashAttention-2 (Dao 2023); a sink is a logit without a value (Xiao
et al. 2023; gpt-oss).

Legend: B batch, G kv heads, R query heads per kv head, H = G*R, S queries, T keys, K head dim of q and k,
V of v.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any, Literal, overload

import torch

from functitan.errors import ArgumentError, GradientError
from functitan.ops import attention_cpu, attention_cuda, attention_math
from functitan.ops.attention_mask import Mask
from functitan.ops.check import refuse_second_derivative, require_integer, shaped

#: What ``backend=`` takes: "auto" is "sdpa" where the fused kernel of the device can do it, and "math"
#: elsewhere.
BACKENDS = ("auto", "sdpa", "math")

Segments = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


@overload
def attention(
    q_BHSK: torch.Tensor, k_BGTK: torch.Tensor, v_BGTV: torch.Tensor, *, causal: bool = ...,
    segment_ids: Segments | None = ..., bias: torch.Tensor | None = ..., window: int | None = ...,
    sink: torch.Tensor | None = ..., scale: float | None = ..., return_lse: Literal[False] = ...,
    backend: str | None = ...,
) -> torch.Tensor: ...  # fmt: skip


@overload
def attention(
    q_BHSK: torch.Tensor, k_BGTK: torch.Tensor, v_BGTV: torch.Tensor, *, causal: bool = ...,
    segment_ids: Segments | None = ..., bias: torch.Tensor | None = ..., window: int | None = ...,
    sink: torch.Tensor | None = ..., scale: float | None = ..., return_lse: Literal[True],
    backend: str | None = ...,
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip


def attention(
    q_BHSK: torch.Tensor,
    k_BGTK: torch.Tensor,
    v_BGTV: torch.Tensor,
    *,
    causal: bool = False,
    segment_ids: Segments | None = None,
    bias: torch.Tensor | None = None,
    window: int | None = None,
    sink: torch.Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attend from every query to the keys that the mask allows.

    Query head h reads kv head h // R. A key is attended when every given condition allows it. A query that
    may attend to no key gives zeros, and a log-sum-exp of minus infinity (of the sink, if there is one).

    Args:
        q_BHSK, k_BGTK, v_BGTV: floating tensors of one dtype; H is a multiple of G.
        causal: query i sees keys 0..i, counted from the start of both, as ``is_causal`` of torch does.
        segment_ids: integers (B, S) for queries and keys alike, or a pair (B, S), (B, T); a query sees the
            keys that have its number.
        bias: broadcastable to (B, H, S, T); a bool mask (True attends), or a floating term of the logits,
            which gets no gradient.
        window: query i sees keys j > i - window: with ``causal``, the last ``window`` keys including its own.
        sink: (H,), per head a logit that takes part in the softmax and has no value.
        scale: the factor of q k^T; 1 / sqrt(K) by default.
        return_lse: also return the log-sum-exp of the logits, sink included; it is differentiable.
        backend: "auto" (the default), "sdpa" (torch's fused kernel for the device) or "math" (plain torch).

    Returns:
        out (B, H, S, V), in q's dtype and, where V is K, in its order in memory; with ``return_lse`` also lse
        (B, H, S) in float32 (float64 for float64 operands). Gradients are in the memory order of their operands.

    Raises:
        ArgumentError: shapes or dtypes that do not fit, an unknown backend, or one that cannot do what is
            asked.
        GradientError: a gradient of ``bias``, or a second derivative.

    >>> q, k, v = (torch.ones(1, heads, 3, 4) for heads in (4, 2, 2))
    >>> attention(q, k, v, causal=True).shape
    torch.Size([1, 4, 3, 4])
    >>> out, lse = attention(q, k, v, causal=True, scale=0.0, return_lse=True)
    >>> lse[0, 0].exp()
    tensor([1., 2., 3.])
    """
    backend = "auto" if backend is None else backend
    q_segments, kv_segments = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
    _check(q_BHSK, k_BGTK, v_BGTV, q_segments, kv_segments, bias, window, sink, backend)
    if bias is not None:
        # The ops take four dims, so that one sharding rule names them all; a dim of size 1 broadcasts.
        bias = bias.reshape((1,) * (4 - bias.ndim) + tuple(bias.shape))
    if scale is None:
        scale = 1.0 / math.sqrt(q_BHSK.shape[-1])
    out, lse = _attention(
        q_BHSK, k_BGTK, v_BGTV, q_segments, kv_segments, bias, sink, causal, window, float(scale), backend
    )
    return (out, lse) if return_lse else out


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_segments: torch.Tensor | None,
    kv_segments: torch.Tensor | None,
    bias: torch.Tensor | None,
    window: int | None,
    sink: torch.Tensor | None,
    backend: str,
) -> None:
    found = f"found q {shaped(q)}, k {shaped(k)}, v {shaped(v)}"
    if not (q.ndim == k.ndim == v.ndim == 4):
        raise ArgumentError(f"attention needs four dims, (batch, heads, positions, head_dim), for q, k and v; {found}.")
    if not q.is_floating_point() or not (q.dtype == k.dtype == v.dtype):
        raise ArgumentError(f"attention needs q, k and v in one floating dtype; {found}. Cast them with .to(dtype).")
    (B, H, S, K), (_, G, T, _) = q.shape, k.shape
    if k.shape[0] != B or k.shape[-1] != K or v.shape[:3] != k.shape[:3]:
        raise ArgumentError(
            f"attention needs q (B, H, S, K), k (B, G, T, K) and v (B, G, T, V) that agree in B, G, T and K; "
            f"{found}. "
            "Heads come before positions: x.unflatten(-1, (heads, -1)).transpose(1, 2)."
        )
    if G == 0 or H % G:
        raise ArgumentError(f"attention needs the {H} query heads to be a multiple of the {G} kv heads; {found}.")
    if (q_segments is None) != (kv_segments is None):
        raise ArgumentError("segment_ids needs both halves of the pair, (q_segments, kv_segments); one is None.")
    for name, ids, length in (("queries", q_segments, S), ("keys", kv_segments, T)):
        if ids is None:
            continue
        require_integer("attention", f"the segment ids of {name}", ids)
        if tuple(ids.shape) != (B, length):
            raise ArgumentError(
                f"attention needs segment ids ({B}, {length}) for {name}; found {shaped(ids)}. "
                "Pass a pair (q_segments, kv_segments) when the lengths differ."
            )
    if bias is not None:
        fits = bias.ndim <= 4 and all(n in (1, m) for n, m in zip(bias.shape[::-1], (T, S, H, B), strict=False))
        if not fits or not (bias.dtype == torch.bool or bias.is_floating_point()):
            raise ArgumentError(
                f"attention needs a bool or floating bias broadcastable to (B, H, S, T) = "
                f"({B}, {H}, {S}, {T}); found {shaped(bias)}."
            )
    if window is not None and window < 1:
        raise ArgumentError(f"attention needs a window of at least 1 token; found {window}. None means no window.")
    if sink is not None and (tuple(sink.shape) != (H,) or not sink.is_floating_point()):
        raise ArgumentError(f"attention needs one floating sink logit per query head, ({H},); found {shaped(sink)}.")
    if backend not in BACKENDS:
        raise ArgumentError(f'attention has the backends {", ".join(BACKENDS)}; found "{backend}".')


def _kernel(backend: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> ModuleType:
    """The module whose ``forward`` and ``backward`` run these operands."""
    if backend == "math":
        return attention_math
    fused = {"cpu": attention_cpu, "cuda": attention_cuda}.get(q.device.type)
    if fused is None:
        reason = f"there is none for {q.device.type} tensors"
    elif scale <= 0.0:
        # They mask with minus infinity first and scale after that (tried): NaN for 0, plus infinity below.
        reason = f"the fused kernels need a positive scale; found {scale}"
    else:
        reason = fused.why_not(q, k, v)
    if fused is not None and reason is None:
        return fused
    if backend == "sdpa":
        raise ArgumentError(
            f'attention was asked for backend="sdpa", a fused kernel, but {reason}. '
            'Write backend="math", or leave backend out to take the kernel where it can run.'
        )
    return attention_math


def _like(q: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """An empty output, in memory in the order of q: what splits heads and joins them again then copies nothing."""
    return torch.empty_like(q) if v.shape[-1] == q.shape[-1] else q.new_empty((*q.shape[:3], v.shape[-1]))


def _ordered(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A result in the memory order that its fake has; kernels choose their own."""
    return x if x.stride() == like.stride() else like.copy_(x)


@torch.library.custom_op("functitan::attention", mutates_args=())
def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_segments: torch.Tensor | None,
    kv_segments: torch.Tensor | None,
    bias: torch.Tensor | None,
    sink: torch.Tensor | None,
    causal: bool,
    window: int | None,
    scale: float,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    mask = Mask(q_segments, kv_segments, bias, causal, window)
    out, lse = _kernel(backend, q, k, v, scale).forward(q, k, v, mask, scale)
    if sink is not None:
        # The sink joins the normaliser: everything shrinks by exp(lse - lse with sink).
        own = lse
        lse = torch.logaddexp(own, sink.to(own.dtype)[:, None])
        out = (out * torch.exp(own - lse)[..., None]).to(q.dtype)
    return _ordered(out, _like(q, v)), lse.contiguous()


@_attention.register_fake
def _(q, k, v, q_segments, kv_segments, bias, sink, causal, window, scale, backend):  # type: ignore[no-untyped-def]
    _kernel(backend, q, k, v, scale)
    return _like(q, v), q.new_empty(q.shape[:3], dtype=attention_math.compute_dtype(q.dtype))


@torch.library.custom_op("functitan::attention_backward", mutates_args=())
def _attention_backward(
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_segments: torch.Tensor | None,
    kv_segments: torch.Tensor | None,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    window: int | None,
    scale: float,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    mask = Mask(q_segments, kv_segments, bias, causal, window)
    kernel = _kernel(backend, q, k, v, scale)
    dq, dk, dv = kernel.backward(grad_out, grad_lse, q, k, v, mask, out, lse, scale)
    return tuple(_ordered(d, torch.empty_like(x)) for d, x in ((dq, q), (dk, k), (dv, v)))  # type: ignore[return-value]


@_attention_backward.register_fake
def _(  # type: ignore[no-untyped-def]
    grad_out, grad_lse, q, k, v, q_segments, kv_segments, bias, out, lse, causal, window, scale, backend
):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, q_segments, kv_segments, bias, sink, *ctx.options = inputs
    if bias is not None and bias.requires_grad:
        raise GradientError(
            f"attention gives no gradient to its bias, and this bias {shaped(bias)} requires one. Write "
            "ft.stop_gradient(bias) when it is a constant; for a learned bias write the sum out: "
            "torch.softmax(q @ k.mT * scale + bias, -1) @ v."
        )
    ctx.save_for_backward(q, k, v, q_segments, kv_segments, bias, sink, *output)
    # An output that was not used gives None, so that the common case passes no gradient of zeros for lse.
    ctx.set_materialize_grads(False)


def _gradient(ctx: Any, grad_out: torch.Tensor | None, grad_lse: torch.Tensor | None) -> tuple[Any, ...]:
    q, k, v, q_segments, kv_segments, bias, sink, out, lse = ctx.saved_tensors
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    dq, dk, dv = _attention_backward(grad_out, grad_lse, q, k, v, q_segments, kv_segments, bias, out, lse, *ctx.options)
    dsink = None
    if sink is not None and ctx.needs_input_grad[6]:
        # The sink's share of the softmax, exp(sink - lse), has the value 0 and so the row term alone.
        share = torch.exp(sink.to(lse.dtype)[:, None] - lse)
        row = -(grad_out.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
        row = row if grad_lse is None else row + grad_lse
        dsink = (share * row).sum((0, 2)).to(sink.dtype)
    return dq, dk, dv, None, None, None, dsink, None, None, None, None


_attention.register_autograd(_gradient, setup_context=_setup)
_attention_backward.register_autograd(lambda ctx, *grads: refuse_second_derivative("functitan::attention"))
