"""The ops that annotations become in a trace: read and removed by the lowering, never run.

Shapes are global. Each has a fake (shapes only) and, where a value flows through it, a gradient.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from spmd_types.types import PartitionSpec

from functitan.errors import ShardingError, TraceError

if TYPE_CHECKING:
    from functitan.compiler.region import Body

#: Bodies of regions, scans and shard_maps that graphs refer to by key.
BODIES: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()

_LIB = torch.library.Library("functitan", "FRAGMENT")

_NAMES: set[str] = set()


def _define(schema: str) -> None:
    # The tag keeps the tracer from running an op on constants: it has no kernel, and a node is what it is for.
    _LIB.define(schema, tags=(torch.Tag.nondeterministic_seeded,))
    _NAMES.add(schema.partition("(")[0])


_define("constrain(Tensor x, str spec) -> Tensor")
_define("constrain_like(Tensor x, Tensor like) -> Tensor")
_define("use_param(Tensor param, int place, str[] pending) -> Tensor")
_define("param_gradient(Tensor gradient, Tensor param, int place, str[] pending) -> Tensor")
_define("checkpoint_name(Tensor x, str name) -> Tensor")
_define("region(Tensor[] inputs, str body) -> Tensor[]")
_define("region_backward(Tensor token, Tensor[] cotangents, str body) -> Tensor[]")
_define("scan(Tensor[] carry, Tensor[] xs, Tensor[] consts, str body, int length) -> Tensor[]")
_define("scan_backward(Tensor token, Tensor[] cotangents, str body, int length) -> Tensor[]")
_define("local_map(Tensor[] inputs, str body) -> Tensor[]")
_define("local_map_backward(Tensor token, Tensor[] cotangents, str body) -> Tensor[]")

ops = torch.ops.functitan
#: What is the identity on values where nothing compiles.
IDENTITIES = {ops.constrain.default, ops.constrain_like.default, ops.use_param.default, ops.checkpoint_name.default}


def is_marker(op: Any) -> bool:
    """Whether an op is one of these."""
    return getattr(op, "namespace", "") == "functitan" and op._schema.name.split("::")[1] in _NAMES


def _like(x: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


for _name in ("constrain", "constrain_like", "use_param", "param_gradient", "checkpoint_name"):
    torch.library.register_fake(f"functitan::{_name}", _like, lib=_LIB)


def _save_operand(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[0])


def _save_param(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.place, ctx.pending = inputs[1:]


torch.library.register_autograd(
    "functitan::constrain",
    lambda ctx, g: (ops.constrain_like(g, ctx.saved_tensors[0]), None),
    setup_context=_save_operand,
    lib=_LIB,
)
torch.library.register_autograd("functitan::constrain_like", lambda ctx, g: (g, None), lib=_LIB)
torch.library.register_autograd(
    "functitan::use_param",
    lambda ctx, g: (ops.param_gradient(g, ctx.saved_tensors[0], ctx.place, ctx.pending), None, None),
    setup_context=_save_param,
    lib=_LIB,
)
torch.library.register_autograd("functitan::param_gradient", lambda ctx, g: (g, None, None, None), lib=_LIB)
torch.library.register_autograd("functitan::checkpoint_name", lambda ctx, g: (g, None), lib=_LIB)


def encode_spec(spec: Any, pending: Any, ndim: int, what: str = "") -> str:
    """A constrain's spec as text: logical names to be resolved by rules, or mesh axes.

    Raises:
        ShardingError: not one entry per dim.
    """
    mesh = isinstance(spec, PartitionSpec)
    try:
        entries = list(spec)
    except TypeError:
        raise ShardingError(
            f"constrain was given {spec!r}; write a tuple with one logical axis name or None per dim, or a "
            "PartitionSpec."
        ) from None
    wrong = [e for e in entries if not mesh and e is not None and not isinstance(e, str)]
    if wrong:
        raise ShardingError(
            f"constrain was given the entry {wrong[0]!r} in {tuple(entries)!r}; an entry is a logical axis name or "
            "None. For "
            "mesh axes write a PartitionSpec."
        )
    if len(entries) != ndim:
        raise ShardingError(
            f"constrain was given {len(entries)} entries {tuple(entries)!r} for a value of {ndim} dims; write one per "
            "dim, "
            "None for a whole one."
        )
    pend = [pending] if isinstance(pending, str) else list(pending or ())
    return json.dumps({"mesh" if mesh else "axes": entries, "pending": pend, "what": what})


@torch.library.register_fake("functitan::local_map", lib=_LIB)
@torch.library.register_fake("functitan::region", lib=_LIB)
def _region_fake(inputs: Sequence[torch.Tensor], body: str) -> list[torch.Tensor]:
    return [*_outputs(BODIES[body], None), _token()]


@torch.library.register_fake("functitan::local_map_backward", lib=_LIB)
@torch.library.register_fake("functitan::region_backward", lib=_LIB)
def _region_backward_fake(token: Any, cotangents: Sequence[torch.Tensor], body: str) -> list[torch.Tensor]:
    b = BODIES[body]
    return [torch.empty(s, dtype=d) for s, d in b.gradient_types]


@torch.library.register_fake("functitan::scan", lib=_LIB)
def _scan_fake(carry: Any, xs: Any, consts: Any, body: str, length: int) -> list[torch.Tensor]:
    return [*_outputs(BODIES[body], length), _token()]


@torch.library.register_fake("functitan::scan_backward", lib=_LIB)
def _scan_backward_fake(token: Any, cotangents: Any, body: str, length: int) -> list[torch.Tensor]:
    b = BODIES[body]
    outs = []
    for i, (s, d) in zip(b.gradient_of, b.gradient_types, strict=True):
        stacked = b.n_carry <= i < b.n_carry + b.n_xs
        outs.append(torch.empty((length, *s) if stacked else s, dtype=d))
    return outs


def _token() -> torch.Tensor:
    """What ties a backward call to its forward call in the trace."""
    return torch.empty((0,), dtype=torch.int8)


def _outputs(body: Body, length: int | None) -> list[torch.Tensor]:
    types = body.output_types
    if length is None:
        return [torch.empty(s, dtype=d) for s, d in types]
    return [torch.empty(s if i < body.n_carry else (length, *s), dtype=d) for i, (s, d) in enumerate(types)]


class Call(torch.autograd.Function):
    """A region or scan in a trace: one node forward, one node backward."""

    @staticmethod
    def forward(ctx: Any, body: Body, length: int | None, *inputs: torch.Tensor) -> Any:
        if length is None:
            outs = ops.region(list(inputs), body.key)
        else:
            carry, xs, consts = body.grouped(list(inputs))
            outs = ops.scan(carry, xs, consts, body.key, length)
        *outs, token = outs
        ctx.body, ctx.length = body, length
        ctx.save_for_backward(token)
        ctx.mark_non_differentiable(*[o for o, d in zip(outs, body.differentiable, strict=True) if not d])
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> Any:
        body = ctx.body
        if torch.is_grad_enabled():  # autograd keeps the graph of this backward: a derivative of it may follow
            raise TraceError(
                f"a second derivative through the {'region' if ctx.length is None else 'scan'} "
                f"{body.name}: the derivative of a region or scan is a body of its own, which has no derivative. Take "
                "the "
                "second derivative inside the body, or call the function without ft.region."
            )
        (token,) = ctx.saved_tensors
        given = [c for c, d in zip(cotangents, body.differentiable, strict=True) if d]
        if ctx.length is None:
            found = ops.region_backward(token, given, body.key)
        else:
            found = ops.scan_backward(token, given, body.key, ctx.length)
        gradients: list[torch.Tensor | None] = [None] * body.n_inputs
        for i, g in zip(body.gradient_of, found, strict=True):
            gradients[i] = g
        return (None, None, *gradients)


def no_vmap(*_: Any) -> Any:
    """Refuse a batched annotation."""
    raise TraceError(
        "vmap over a function with ft.constrain, ft.region, ft.scan or parameters of a compiled function: these have "
        "no "
        "batched form. Call vmap inside the region on plain tensor code, or write the batch dim out."
    )


for _name in ("constrain", "use_param", "region", "scan", "local_map"):
    torch.library.register_vmap(f"functitan::{_name}", no_vmap, lib=_LIB)
