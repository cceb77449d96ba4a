"""How shard_map is lowered: operands are brought into in_specs, and the body's local graph is emitted in place.

Forward emits what the outputs need, backward the rest, so that a region's remat policy decides over a body's values as
over its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from spmd_types.types import P as PENDING
from torch import fx

from functitan._spmd import JOIN
from functitan.compiler import markers, nodes, source
from functitan.compiler.emit import Origin
from functitan.compiler.explain import explained
from functitan.compiler.local import LocalBody, LocalGraph, trace_local
from functitan.compiler.local_check import check_types
from functitan.compiler.reshard import Move
from functitan.compiler.split import ancestors
from functitan.compiler.values import Value
from functitan.errors import ShardingError
from functitan.sharding.layout import Layout, replicated
from functitan.sharding.logical import layout_of
from functitan.sharding.op_rules.base import TensorType

if TYPE_CHECKING:
    from functitan.compiler.propagate import Propagator

c10d = torch.ops._c10d_functional
_KINDS: dict[Any, str] = {
    c10d.all_reduce.default: "all_reduce",
    c10d.all_gather_into_tensor.default: "all_gather",
    c10d.reduce_scatter_tensor.default: "reduce_scatter",
    c10d.all_to_all_single.default: "all_to_all",
}


@dataclass(eq=False)
class Emitted:
    """The token of a shard_map call: what its backward continues from."""

    body: LocalBody
    local: LocalGraph
    env: dict[fx.Node, fx.Node]
    inputs: list[Layout]
    outputs: list[Layout]


def local_map(p: Propagator, node: fx.Node) -> list[Any]:
    """Lower the forward node."""
    body = p.ctx.bodies[str(nodes.args(node)[1])]
    line = node.meta.get("line")
    where = f"{source.at(line)}shard_map({body.name})"
    values: list[Value] = [p.env[a] for a in nodes.args(node)[0]]
    layouts, locals_ = [], []
    for i, (v, bound) in enumerate(zip(values, body.inputs, strict=True)):
        what = f"{where}: in_specs of input {i}"
        layout = layout_of(v.type.shape, bound.spec(len(v.type.shape)), p.ctx.mesh, what, bound.of(PENDING))
        for axis, _ in bound.types:
            p.ctx.mesh.require(axis, what)
        layouts.append(layout)
        locals_.append(p.read(v, layout, f"in_specs of shard_map({body.name})"))
    local = _localized(p, body, layouts, line)
    env = dict(zip(local.inputs, locals_, strict=True))
    env |= {place: p.emitter.coordinates[axis] for axis, place in local.coordinates.items()}
    outputs, types = [], []
    for path, (shape, dtype), bound, out in zip(body.paths, body.output_types, body.outputs, local.outs, strict=True):
        what = f"{where}: out_specs of output {path or 'value'}"
        layout = layout_of(shape, bound.spec(len(shape)), p.ctx.mesh, what, bound.of(PENDING))
        have = tuple(nodes.value(out).shape)
        if have != layout.local_shape:
            raise ShardingError(
                f"{what}: the body gives local shape {have}, and {layout} of global shape {shape} has {layout.local_shape}. "
                "The global shape is the body's with every axis of size 1: write sizes in the body by the axis "
                "(ft.axis_size), never as numbers."
            )
        outputs.append(layout)
        types.append(TensorType(shape, dtype))
    effects = [n for n in local.graph.nodes if nodes.has_effect(n)]
    _emit(p, body, local, env, [*local.outs, *effects], line)
    outs: list[Any] = [p.value(t, lay, env[n]) for t, lay, n in zip(types, outputs, local.outs, strict=True)]
    return [*outs, Emitted(body, local, env, layouts, outputs)]


def local_map_backward(p: Propagator, node: fx.Node) -> list[Value]:
    """Lower the backward node."""
    token: Emitted = p.env[nodes.args(node)[0]]
    body, local, env = token.body, token.local, dict(token.env)
    made = [lay for lay, d in zip(token.outputs, body.differentiable, strict=True) if d]
    for place, argument, layout in zip(local.tangents, nodes.args(node)[1], made, strict=True):
        # I and R have cotangents that are equal on all ranks: of P, because each rank adds the same; V has its part.
        read = p.read(p.env[argument], layout.settled(), f"cotangent of shard_map({body.name})")
        env[place] = p.emitter.contiguous(read)
    _emit(p, body, local, env, local.gradients, node.meta.get("line"))
    found = []
    for i, n, (shape, dtype) in zip(body.gradient_of, local.gradients, body.gradient_types, strict=True):
        layout, bound = token.inputs[i], body.inputs[i]
        other = {a for a, _ in bound.types} | set(layout.axes)
        pending = tuple(a for a, n in body.axes(p.ctx.mesh) if n > 1 and a not in other)
        found.append(p.value(TensorType(shape, dtype), Layout(layout.dims, pending), env[n]))
    return found


def _localized(p: Propagator, body: LocalBody, layouts: list[Layout], line: Any) -> LocalGraph:
    key = (body.key, tuple(layouts))
    if key not in p.ctx.local:
        shapes = [lay.local_shape for lay in layouts]
        check_types(body, shapes, p.ctx.mesh, p.ctx.mode, line)
        p.ctx.local[key] = explained(
            f"shard_map({body.name})",
            lambda: trace_local(body, shapes, body.axes(p.ctx.mesh), p.ctx.mode, p.ctx.reduce_dtype),
        )
    return p.ctx.local[key]


def _emit(
    p: Propagator,
    body: LocalBody,
    local: LocalGraph,
    env: dict[fx.Node, fx.Node],
    roots: Sequence[fx.Node],
    line: source.SourceLine | None,
) -> None:
    """Emit what the roots need and is not there yet."""
    needed = ancestors(roots)
    outer = p.emitter.origin
    for node in local.graph.nodes:
        if node not in needed or node in env:
            continue
        own = node.meta.get("line") or line
        p.emitter.origin = Origin(own, outer.backward or bool(node.meta.get("backward")), f"shard_map({body.name})")
        if node.op == "get_attr":
            env[node] = p.emitter.constant(node.meta["constant"])
            continue
        args, kwargs = nodes.mapped(node, env.__getitem__)
        if getattr(node.target, "namespace", "") == "_c10d_functional" and node.target is not c10d.wait_tensor.default:
            env[node] = _collective(p, body, node, args, own)
        else:
            env[node] = p.emitter.call(node.target, *args, **kwargs)  # type: ignore[arg-type]
    p.emitter.origin = outer


def _collective(p: Propagator, body: LocalBody, node: fx.Node, args: Any, line: source.SourceLine | None) -> fx.Node:
    kind, axis = _KINDS.get(node.target), str(args[-1])
    if kind is None:
        raise ShardingError(
            f"{source.at(line)}shard_map({body.name}): the collective {node.target} is not known here. Write "
            "all_reduce, all_gather, reduce_scatter or all_to_all of spmd_types."
        )
    x = p.emitter.contiguous(args[0])
    made = p.emitter.call(node.target, x, *args[1:])  # type: ignore[arg-type]
    before, after = x.meta["val"], made.meta["val"]
    axes = tuple(axis.split(JOIN))
    n = math.prod(p.sizes[a] for a in axes)
    sent = {"all_gather": after.numel() * (n - 1) / n, "all_reduce": 2 * before.numel() * (n - 1) / n}
    elements = sent.get(kind, before.numel() * (n - 1) / n)
    layouts = (replicated(before.shape), replicated(after.shape))  # local shapes: no layout is known inside a body
    made.meta["collective"] = Move(kind, axes, *layouts, 0, -1, math.ceil(elements * before.dtype.itemsize))
    return made


HANDLERS: dict[Any, Callable[[Any, fx.Node], Any]] = {
    markers.ops.local_map.default: local_map,
    markers.ops.local_map_backward.default: local_map_backward,
}
