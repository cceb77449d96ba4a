"""How annotations are lowered: constrain, parameters, regions and scans."""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from spmd_types.types import PartitionSpec
from torch import fx

from functitan import _torch, tree
from functitan.compiler import markers, messages, nodes, trace
from functitan.compiler.program import LoweredBody, call_body, call_body_backward, scan_body, scan_body_backward
from functitan.compiler.values import Opaque, Value
from functitan.errors import ShardingError
from functitan.sharding.layout import Layout, by_slices, replicated, without
from functitan.sharding.logical import layout_of
from functitan.sharding.op_rules.base import Decompose, TensorType

if TYPE_CHECKING:
    from functitan.compiler.propagate import Propagator

ops = markers.ops
aten = torch.ops.aten


def constrain(p: Propagator, node: fx.Node) -> Value:
    v = p.env[nodes.args(node)[0]]
    asked = json.loads(str(nodes.args(node)[1]))
    line = node.meta.get("line")
    where = asked["what"] or f"constrain of {messages.shown(v, None)}" + (f" at {line}" if line else "")
    if "axes" in asked:
        if p.ctx.rules is None:
            raise ShardingError(messages.no_rules(asked["axes"], line))
        p.ctx.seen_names |= {n for n in asked["axes"] if n}
        spec = p.ctx.rules.spec(asked["axes"], where)
    else:
        spec = PartitionSpec(*(tuple(e) if isinstance(e, list) else e for e in asked["mesh"]))
    layout = layout_of(v.type.shape, spec, p.ctx.mesh, where, asked["pending"])
    have = v.layout.pending if v.layout is not None else ()
    layout = replace(layout, pending=tuple(a for a in layout.pending if a in have))
    text = asked.get("axes", asked.get("mesh"))
    local = p.read(v, layout, asked["what"] or f"constrain({', '.join(str(t) for t in text)})")
    return p.value(v.type, layout, local)


def constrain_like(p: Propagator, node: fx.Node) -> Value:
    v, like = (p.env[a] for a in nodes.args(node))
    found = (like.layout or like.preferred or replicated(like.type.shape)).dual()
    # A dim of size 1 has nothing to split, whatever the other's is.
    layout = Layout(tuple(() if n == 1 else dim for n, dim in zip(v.type.shape, found.dims, strict=True)))
    local = p.read(v, layout, "gradient of constrain" if node.meta.get("backward") else "constrain_like")
    return p.value(v.type, layout, local)


def use_param(p: Propagator, node: fx.Node) -> Value:
    v = p.env[nodes.args(node)[0]]
    asked = frozenset(nodes.args(node)[2])
    if v.layout is None or not (v.layout.storage or asked):
        return v
    layout = replace(v.layout, active=bool(v.layout.storage), unreduced=asked)
    made = Value(v.type, layout, {(layout, False): p.read(v, v.layout)}, param=v.param)
    p.values.append(made)
    return made


def param_gradient(p: Propagator, node: fx.Node) -> Value:
    """Lay a gradient out as its parameter, reduced in ``reduce_dtype`` at least, except over axes kept pending."""
    v, param = (p.env[a] for a in nodes.args(node)[:2])
    asked = tuple(nodes.args(node)[3])
    for axis in asked:
        p.ctx.mesh.require(axis, f"pending={asked!r} of a derivative")
    p.emitter.origin = replace(p.emitter.origin, backward=True)
    layout = gradient_layout(p, v, param.layout or replicated(v.type.shape), asked)
    local = reduced_gradient(p, v, layout, param.param)
    local.meta["gradient"] = param.param  # for reports
    return p.value(v.type, layout, local)


def gradient_layout(p: Propagator, v: Value, param: Layout, unreduced: Collection[str]) -> Layout:
    """A gradient lies as its parameter, but for the axes over which it is, and may stay, a pending sum."""
    kept = tuple(a for a in (v.layout.pending if v.layout is not None else ()) if a in unreduced)
    return Layout(without(param, kept, p.sizes).dims, kept, param.storage - set(kept))


def reduced_gradient(p: Propagator, v: Value, layout: Layout, param: str) -> fx.Node:
    """A gradient in its layout; a pending sum is added up in ``reduce_dtype`` at least."""
    v.param = v.param or param
    wide = torch.promote_types(v.type.dtype, p.ctx.reduce_dtype)
    adds = v.layout is not None and set(v.layout.pending) - set(layout.pending)
    if v.layout is None or not adds or wide == v.type.dtype:
        return p.read(v, layout, f"gradient of {v.param or param}")
    own = p.emitter.call(aten._to_copy.default, p.read(v, v.layout), dtype=wide)
    raised = p.value(TensorType(v.type.shape, wide), v.layout, own)
    raised.param = v.param
    return p.emitter.call(aten._to_copy.default, p.read(raised, layout, f"gradient of {v.param}"), dtype=v.type.dtype)


def checkpoint_name(p: Propagator, node: fx.Node) -> Value:
    v = p.env[nodes.args(node)[0]]
    layout, local = (v.layout, p.read(v, v.layout)) if v.layout is not None else p.settled(v)
    named = p.emitter.call(aten.alias.default, local)
    named.meta["checkpoint_name"] = nodes.args(node)[1]
    return p.value(v.type, layout, named)


# --- regions and scans -----------------------------------------------------------------------------------------


def _entry(p: Propagator, v: Value, why: str) -> tuple[Layout, fx.Node]:
    """An input of a body: pending sums are resolved, stored parameters stay stored."""
    if v.layout is not None and v.layout.active:
        return v.layout, p.read(v, v.layout)
    return p.settled(v, why)


def region(p: Propagator, node: fx.Node) -> list[Any]:
    body = p.ctx.bodies[str(nodes.args(node)[1])]
    values = [p.env[a] for a in nodes.args(node)[0]]
    entered = [_entry(p, v, f"enters {body.name}") for v in values]
    layouts = [layout for layout, _ in entered]
    lowered = lower_body(p, body, layouts, [v.param for v in values])
    return _call(p, lowered, [n for _, n in entered], None)


def scan(p: Propagator, node: fx.Node) -> list[Any]:
    body = p.ctx.bodies[str(nodes.args(node)[3])]
    length = int(nodes.args(node)[4])
    values = [p.env[a] for group in nodes.args(node)[:3] for a in group]
    first, last = body.n_carry, body.n_carry + body.n_xs
    line = node.meta.get("line")
    layouts: list[Layout] = []
    for i, v in enumerate(values):
        layout = v.layout or v.preferred or replicated(v.type.shape)
        layout = layout if layout.active else layout.settled()
        if first <= i < last:
            if any(isinstance(d, str) for d in layout.dims[0]):
                raise ShardingError(messages.scanned_dim(body.name, v, layout, line))
            layout = replace(layout, dims=layout.dims[1:])
        layouts.append(layout)
    params = [v.param for v in values]
    # A carry that begins as zeros takes the layout that the first step gives it, pending sums included.
    free = frozenset(i for i, v in enumerate(values[:first]) if v.layout is None and v.zero)
    lowered = lower_body(p, body, layouts, params, free)
    carried = list(lowered.out_layouts[:first])
    if free or carried != [layout.settled() for layout in layouts[:first]]:
        # Another carry may enter more split than it comes (a slice is free), never the other way round.
        layouts[:first] = [
            out if v.layout is None or by_slices(own, out, p.sizes) else own
            for own, out, v in zip(layouts[:first], carried, values[:first], strict=True)
        ]
        lowered = lower_body(p, body, layouts, params)
        if [lay.pending for lay in layouts[:first]] != [lay.pending for lay in lowered.out_layouts[:first]]:
            layouts[:first] = [lay.settled() for lay in layouts[:first]]  # a later step reads the sum itself
            lowered = lower_body(p, body, layouts, params)
        for i, (own, out) in enumerate(zip(layouts[:first], lowered.out_layouts[:first], strict=True)):
            if own.dims != out.dims:
                raise ShardingError(messages.carry_layout(body.name, _carry_path(body, i), own, out, line))
    entered = []
    for i, (v, layout) in enumerate(zip(values, layouts, strict=True)):
        if first <= i < last:
            whole = (v.type.shape[0],) if v.type.shape[0] != 1 else ()
            layout = replace(layout, dims=(whole, *layout.dims))
        if v.layout is not None and v.layout.active:
            entered.append(p.read(v, v.layout))
        else:
            entered.append(p.read(v, layout, f"enters {body.name}"))
    return _call(p, lowered, entered, length)


def _carry_path(body: Any, i: int) -> str:
    """How messages name a carry: by its path in the pair that the body returns, or its number."""
    paths = tree.paths(tree.unflatten(body.out_tree, [0] * len(body.output_types)))
    return paths[i].partition("/")[2] or str(i)


def _call(p: Propagator, lowered: LoweredBody, inputs: list[fx.Node], length: int | None) -> list[Any]:
    """Emit the forward call of a lowered body: its outputs, then what backward needs."""
    emitter = p.emitter
    n = len(lowered.out_layouts)
    fakes = []
    layouts = []
    types = []
    for i, (layout, typ) in enumerate(zip(lowered.out_layouts, lowered.out_types, strict=True)):
        if length is not None and i >= lowered.n_carry:
            layout = replace(layout, dims=((length,) if length != 1 else (), *layout.dims))
            typ = TensorType((length, *typ.shape), typ.dtype)
        layouts.append(layout)
        types.append(typ)
        fakes.append(emitter.fake(layout.local_shape, typ.dtype))
    kept = []
    for val in lowered.saved_values:
        kept.append(val if length is None else _stacked(emitter, val, length))
    args: tuple[Any, ...] = (lowered.name, list(inputs))
    target: Callable[..., Any] = call_body
    if length is not None:
        args, target = (lowered.name, length, list(inputs)), scan_body
    call = emitter.opaque(target, args, [*fakes, *kept])
    call.meta["body"] = lowered.name
    outs: list[Any] = []
    for i, (layout, typ) in enumerate(zip(layouts, types, strict=True)):
        got = emitter.call(operator.getitem, call, i)
        outs.append(p.value(typ, layout, got))
    saved = [emitter.call(operator.getitem, call, n + j) for j in range(len(kept))]
    outs.append(Opaque(lowered, saved, inputs))
    return outs


def _stacked(emitter: Any, val: Any, length: int) -> Any:
    if isinstance(val, torch.Tensor):
        return emitter.fake((length, *val.shape), val.dtype)
    return val


def region_backward(p: Propagator, node: fx.Node) -> list[Value]:
    return _backward(p, node, None)


def scan_backward(p: Propagator, node: fx.Node) -> list[Value]:
    return _backward(p, node, int(nodes.args(node)[3]))


def _backward(p: Propagator, node: fx.Node, length: int | None) -> list[Value]:
    token = p.env[nodes.args(node)[0]]
    lowered: LoweredBody = token.lowered
    cotangents = []
    for i, (v, layout) in enumerate(zip([p.env[a] for a in nodes.args(node)[1]], lowered.tangent_layouts, strict=True)):
        if length is not None and lowered.tangent_of[i] >= lowered.n_carry:
            layout = replace(layout, dims=((length,) if length != 1 else (), *layout.dims))
        cotangents.append(p.read(v, layout, f"cotangent of {lowered.label}"))
    kept = [token.inputs[i] for i in lowered.saved_inputs]
    layouts, types = [], []
    for i, (layout, typ) in zip(
        lowered.gradient_of, zip(lowered.gradient_layouts, lowered.gradient_types, strict=True), strict=True
    ):
        if length is not None and lowered.n_carry <= i < lowered.n_carry + lowered.n_xs:
            layout = replace(layout, dims=((length,) if length != 1 else (), *layout.dims))
            typ = TensorType((length, *typ.shape), typ.dtype)
        layouts.append(layout)
        types.append(typ)
    fakes = [p.emitter.fake(lay.local_shape, t.dtype) for lay, t in zip(layouts, types, strict=True)]
    args: tuple[Any, ...] = (lowered.name, kept, list(token.saved), cotangents)
    target: Callable[..., Any] = call_body_backward
    if length is not None:
        args, target = (lowered.name, length, kept, list(token.saved), cotangents), scan_body_backward
    call = p.emitter.opaque(target, args, fakes)
    call.meta["body"] = lowered.name
    return [
        p.value(t, lay, p.emitter.call(operator.getitem, call, i))
        for i, (lay, t) in enumerate(zip(layouts, types, strict=True))
    ]


def lower_body(
    p: Propagator, body: Any, layouts: list[Layout], params: list[str], zeros: frozenset[int] = frozenset()
) -> LoweredBody:
    """The lowered body for these input layouts, made once; ``zeros`` are inputs that are zeros of any layout."""
    from functitan.compiler.lower import lower_joint

    key = (body.key, tuple(layouts), zeros)
    if key not in p.ctx.lowered:
        p.ctx.lowered[key] = lower_joint(p.ctx, body, layouts, params, zeros)
    return p.ctx.lowered[key]


def traced_decomposition(p: Propagator, node: fx.Node, decompose: Decompose) -> tuple[fx.Graph, bool]:
    """Trace a decomposition on global fakes of a node's operands; its nodes take the node's line.

    Once for a node: rounds of a walk settle pending sums by node, those inside included.
    """
    key = (node, decompose.key)
    if key not in p.ctx.decomposed:
        p.ctx.decomposed[key] = _trace_decomposition(p, node, decompose)
    return p.ctx.decomposed[key]


def _trace_decomposition(p: Propagator, node: fx.Node, decompose: Decompose) -> tuple[fx.Graph, bool]:
    found: list[fx.Node] = []
    nodes.mapped(node, found.append)
    fakes = [torch.empty(v.type.shape, dtype=v.type.dtype, device="meta") for v in (p.env[n] for n in found)]
    single = isinstance(nodes.value(node), torch.Tensor)

    def run(*flat: torch.Tensor) -> list[Any]:
        given = dict(zip(found, flat, strict=True))
        args, kwargs = nodes.mapped(node, lambda n: given[n])
        out = decompose.function(*args, **kwargs)
        return [out] if single else list(out)

    with p.ctx.mode:
        inputs = [torch.empty(f.shape, dtype=f.dtype) for f in fakes]
        module = _torch.make_fx(run, decomposition_table=trace.decompositions(), _allow_non_fake_inputs=True)(*inputs)
    nodes.lift_constants(module)
    nodes.drop_dead(module.graph)
    for inner in module.graph.nodes:
        inner.meta["line"], inner.meta["backward"] = node.meta.get("line"), node.meta.get("backward")
    return module.graph, single


#: Calls of bodies.
BODIES = {ops.region.default, ops.scan.default, ops.region_backward.default, ops.scan_backward.default}

HANDLERS: dict[Any, Callable[[Any, fx.Node], Any]] = {
    ops.constrain.default: constrain,
    ops.constrain_like.default: constrain_like,
    ops.use_param.default: use_param,
    ops.param_gradient.default: param_gradient,
    ops.checkpoint_name.default: checkpoint_name,
    ops.region.default: region,
    ops.scan.default: scan,
    ops.region_backward.default: region_backward,
    ops.scan_backward.default: scan_backward,
}
