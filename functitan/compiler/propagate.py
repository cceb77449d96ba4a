"""Propagation: walk a global graph in order, give every value a layout, and emit its local ops.

Each op's rule says which layouts its operands must have; where one has another, moves are inserted, once per value
and target. Nothing is decided twice: the walk is the lowering.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from functitan import _torch
from functitan.compiler import calls, messages, nodes, reshard
from functitan.compiler.emit import Emitter, Origin
from functitan.compiler.values import Applied, Value
from functitan.errors import ShardingError
from functitan.sharding.layout import Layout, Unsplittable, canonical, replicated, without
from functitan.sharding.logical import Rules
from functitan.sharding.mesh import Mesh
from functitan.sharding.op_rules.base import (
    Call,
    Decompose,
    DimMap,
    Equation,
    Expand,
    Factory,
    Operand,
    Solution,
    TensorType,
    find_rule,
)
from functitan.sharding.op_rules.pointwise import is_pointwise, pointwise
from functitan.sharding.solve import operand_layouts, solve

aten = torch.ops.aten


@dataclass
class Context:
    """What all graphs of one lowering share.

    Attributes:
        mesh, rules: what annotations mean.
        conflicts: "error", or "auto" to settle conflicts by bytes.
        reduce_dtype: the lowest dtype in which gradients of parameters are reduced.
        bodies: traced bodies by key.
        lowered: lowered bodies by traced key and input layouts.
        choices: what was settled without being asked for: (line, sentence).
        seen_names: logical names that were asked for.
    """

    mesh: Mesh
    rules: Rules | None
    mode: _torch.FakeTensorMode
    bodies: dict[str, Any]
    conflicts: str = "error"
    reduce_dtype: torch.dtype = torch.float32
    lowered: dict[Any, Any] = field(default_factory=dict)
    choices: list[tuple[str, str]] = field(default_factory=list)
    seen_names: set[str] = field(default_factory=set)


class Env(dict[fx.Node, Any]):
    """Global node -> Value (a list for several outputs). ``missing`` supplies what is first known where it is read."""

    missing: Any = None

    def __missing__(self, node: fx.Node) -> Any:
        if self.missing is None:
            raise KeyError(node)
        self[node] = self.missing(node)
        return self[node]


class Propagator:
    """Lowers one graph.

    Attributes:
        emitter: builds the local graph.
        env: global node -> Value, or a list of Values for an op with several outputs.
        problems: conflicts that the user must settle.
        refused: what cannot be lowered at all; conflicts beside it may only follow from it.
        settle_at: global nodes whose pending sum is resolved where it is made, with the layout to take.
    """

    def __init__(self, ctx: Context, settle_at: dict[fx.Node, Layout]) -> None:
        self.ctx = ctx
        self.sizes = {n: s for n, s in ctx.mesh.axes if s > 1}
        self.emitter = Emitter(self.sizes, ctx.mode)
        self.env = Env()
        self.problems: list[str] = []
        self.refused: list[str] = []
        self.choices: list[tuple[str, str]] = []
        self.settle_at = settle_at
        self.values: list[Value] = []

    # --- values ------------------------------------------------------------------------------------------------

    def value(self, typ: TensorType, layout: Layout, node: fx.Node, source: fx.Node | None = None) -> Value:
        """A value that a local node holds in a layout."""
        self.emitter.annotate(node, layout, typ)
        made = Value(typ, layout, {(layout, False): node}, source=source)
        self.values.append(made)
        return made

    def read(self, v: Value, layout: Layout, why: str = "") -> fx.Node:
        """The local node that holds ``v`` in a layout, made by the cheapest moves if there is none."""
        layout = Layout(layout.dims, layout.pending)
        origin = self.emitter.origin
        # Backward gathers a stored parameter anew instead of holding the gathered one since forward.
        again = bool(v.layout is not None and v.layout.active and origin.backward)
        if v.layout is not None and v.layout.pending:
            if set(layout.pending) & set(v.layout.pending):
                v.passed = True
            if set(v.layout.pending) - set(layout.pending):
                v.resolved.append(layout)
        for (have, late), node in v.versions.items():
            if (have.dims, have.pending) == (layout.dims, layout.pending) and (late == again or not v.param):
                return node
        gather = bool(v.layout is not None and v.layout.active)
        self.emitter.origin = replace(origin, why=why or origin.why, param=v.param or origin.param, gather=gather)
        if v.make is not None and not (layout.pending and v.layout is None):
            node = v.make(layout)
        else:
            node = self._move(v, layout, again)
        self.emitter.origin = origin
        self.emitter.annotate(node, layout, v.type)
        v.versions[(layout, again)] = node
        return node

    def _move(self, v: Value, layout: Layout, again: bool) -> fx.Node:
        if v.make is not None and v.layout is None:
            start = layout.settled()
            options = {start: self.read(v, start)}
        else:
            options = {have: node for (have, late), node in v.versions.items() if late == again or have == v.layout}
        itemsize = v.type.dtype.itemsize
        best = min(options, key=lambda have: reshard.cost(reshard.plan(have, layout, self.sizes, itemsize)))
        node = options[best]
        for move in reshard.plan(best, layout, self.sizes, itemsize):
            node = self.emitter.move(node, move)
            self.emitter.annotate(node, move.after, v.type)
        return node

    def settled(self, v: Value, why: str = "") -> tuple[Layout, fx.Node]:
        """A value without pending sums, in its own or preferred layout."""
        layout = v.layout or v.preferred or replicated(v.type.shape)
        return layout.settled(), self.read(v, layout.settled(), why)

    # --- the walk ----------------------------------------------------------------------------------------------

    def run(self, graph: fx.Graph) -> None:
        """Lower all calls of a graph whose placeholders are in ``env``."""
        for node in graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            self.at(node)
            if node.op == "get_attr":
                tensor = node.meta["constant"]
                typ = TensorType(tuple(tensor.shape), tensor.dtype)
                self.env[node] = self.value(typ, replicated(typ.shape), self.emitter.constant(tensor), node)
            else:
                self.env[node] = self._settle(node, self._tried(node))

    def _tried(self, node: fx.Node) -> Any:
        """Lower one call; what cannot be lowered is noted, and stood in for, so that all of it is told at once."""
        try:
            return self.call(node)
        except ShardingError as e:
            if node.target in calls.BODIES:
                raise  # no stand-in for what its backward needs, and the message has a body's problems already
            self.refused.append(str(e))
            val = nodes.value(node)
            made = [self._stand_in(t) for t in (val if isinstance(val, list | tuple) else [val])]
            return made if isinstance(val, list | tuple) else made[0]

    def _stand_in(self, val: torch.Tensor) -> Value:
        def make(layout: Layout) -> fx.Node:
            return self.emitter.call(aten.full.default, list(layout.local_shape), 0, dtype=val.dtype)

        return Value(TensorType(tuple(val.shape), val.dtype), None, make=make)

    def at(self, node: fx.Node) -> None:
        """What is emitted next belongs to this global node."""
        self.emitter.origin = Origin(node.meta.get("line"), bool(node.meta.get("backward")), str(node.name))

    def _settle(self, node: fx.Node, result: Any) -> Any:
        """Resolve a pending sum where it is made, when one of several readers needs it resolved."""
        for i, v in enumerate(result if isinstance(result, list) else [result]):
            if isinstance(v, Value) and v.layout is not None:
                for local in v.versions.values():
                    local.meta.setdefault("source", (node.name, i))
        if isinstance(result, Value):
            result.source = node
            if node in self.settle_at and result.layout is not None and result.layout.pending:
                target = self.settle_at[node]
                local = self.read(result, target, f"the sum that {node.name} makes is read by several ops")
                return self.value(result.type, target, local, node)
        return result

    def call(self, node: fx.Node) -> Any:
        """Lower one call."""
        if node.target is operator.getitem:
            return self.env[node.args[0]][node.args[1]]
        handler = calls.HANDLERS.get(node.target)
        if handler is not None:
            return handler(self, node)
        call, operands = self.describe(node)
        return self.apply(node, call, operands)

    def describe(self, node: fx.Node) -> tuple[Call, list[Value]]:
        """A node's call with operands counted, and their values."""
        operands: list[Value] = []

        def count(n: fx.Node) -> Operand:
            operands.append(self.env[n])
            return Operand(len(operands) - 1)

        args = map_arg(node.args, count)
        kwargs = map_arg(node.kwargs, count)
        val = nodes.value(node)
        outs = val if isinstance(val, list | tuple) else [val]
        types = tuple(TensorType(tuple(t.shape), t.dtype) for t in outs if isinstance(t, torch.Tensor))
        zeros = frozenset(i for i, v in enumerate(operands) if v.zero)
        return Call(node.target, tuple(args), dict(kwargs), tuple(v.type for v in operands), types, zeros), operands

    def apply(self, node: fx.Node, call: Call, operands: list[Value]) -> Any:
        """Lower a call by its rule."""
        function = find_rule(call.op)
        if function is None and is_pointwise(call.op):
            function = pointwise
        if function is None:
            raise ShardingError(messages.no_rule(call, node.meta.get("line")))
        try:
            found = function(call)
        except ShardingError as e:
            raise ShardingError(messages.at(node.meta.get("line")) + str(e)) from None
        if isinstance(found, Decompose):
            return self.inline(node, found, operands)
        if isinstance(found, Factory):
            return self._factory(call, operands, found)
        if isinstance(found, DimMap):
            return self._view(node, call, operands[0], found)
        if isinstance(found, Expand):
            return self._expand(call, operands[0], found)
        return self._equation(node, call, operands, found)

    def inline(self, node: fx.Node, decompose: Decompose, operands: list[Value]) -> Any:
        """Lower a call's decomposition in its place."""
        graph, single = calls.traced_decomposition(self, node, decompose)
        env, self.env = self.env, Env()
        places = [n for n in graph.nodes if n.op == "placeholder"]
        self.env.update(zip(places, operands, strict=True))
        self.run(graph)
        output = next(n for n in graph.nodes if n.op == "output")
        results = [None if o is None else self.env[o] for o in output.args[0]]
        self.env = env
        return results[0] if single else results

    # --- rules -------------------------------------------------------------------------------------------------

    def _equation(self, node: fx.Node, call: Call, operands: list[Value], eq: Equation) -> Any:
        if self._on_demand(call, operands, eq):
            made = Value(call.outputs[0], None)
            made.make = lambda layout: self._emit_for(call, operands, eq, layout)
            made.zero = eq.through_storage and operands[0].zero  # a copy or a slice of zeros
            made.preferred = next((v.preferred for v in operands if v.preferred and v.type.shape == made.type.shape), None)
            return made
        layouts = [self._as_read(v, eq) for v in operands]
        solution = solve(eq, call, layouts, self.sizes)
        if solution.conflicts and eq.otherwise is not None:
            return self.inline(node, eq.otherwise, operands)
        if solution.conflicts:
            self.conflict(node, call, operands, layouts, solution)
        return self._emit(call, operands, eq, solution, node)

    def _as_read(self, v: Value, eq: Equation) -> Layout | None:
        """The layout in which an op sees an operand: a stored parameter in use is gathered first."""
        if v.layout is None or not v.layout.active or (eq.through_storage and not self._cuts_storage(v, eq)):
            return v.layout
        return replace(without(v.layout, v.layout.storage, self.sizes), active=False)

    def _cuts_storage(self, v: Value, eq: Equation) -> bool:
        """Whether an op needs a dim whole that is split for storage."""
        assert v.layout is not None
        pairs = zip(eq.inputs[0], v.layout.dims, strict=True)
        return any(label == "_" and any(d in v.layout.storage for d in dim) for label, dim in pairs)

    def _on_demand(self, call: Call, operands: list[Value], eq: Equation) -> bool:
        """Whether the result can be made in any layout: all that it reads can, or is whole for every element."""
        if len(call.outputs) != 1 or eq.emit is not None or not any(v.layout is None for v in operands):
            return False
        if "_" in eq.outputs[0]:  # a dim that the op makes whole
            return False
        kept = {label for label in eq.outputs[0] if isinstance(label, str)}
        for v, labels in zip(operands, eq.inputs, strict=True):
            if any(isinstance(label, tuple) or (label not in kept and label not in ("_", None)) for label in labels):
                return False
            whole = all(label in ("_", None) for label in labels)
            if v.layout is not None and not (whole and not v.layout.axes and not v.layout.pending):
                return False
            if v.layout is None and "_" in labels:
                return False
        return True

    def _emit_for(self, call: Call, operands: list[Value], eq: Equation, layout: Layout) -> fx.Node:
        layouts = operand_layouts(eq, call, layout, self.sizes)
        local = [self.read(v, lay) for v, lay in zip(operands, layouts, strict=True)]
        node = self._local_call(self.emitter, call, eq, local, layouts, [layout])[0]
        node.meta["applied"] = Applied(
            call,
            tuple(layouts),
            (layout,),
            lambda emitter, ops: self._local_call(emitter, call, eq, ops, layouts, [layout]),
            equation=eq,
        )
        return node

    def _emit(self, call: Call, operands: list[Value], eq: Equation, solution: Solution, node: fx.Node) -> Any:
        why = f"{_name(call)} reads it"
        local = [
            None if i in eq.refs else self.read(v, lay, why)
            for i, (v, lay) in enumerate(zip(operands, solution.operands, strict=True))
        ]
        outs, layouts = self._reduced(self.emitter, call, eq, local, solution)
        outs[0].meta["applied"] = Applied(
            call,
            tuple(solution.operands),
            tuple(layouts),
            lambda emitter, ops: self._reduced(emitter, call, eq, ops, solution)[0],
            eq.reduce,
            eq,
        )
        results: list[Value] = []
        for out, layout, typ in zip(outs, layouts, call.outputs, strict=True):
            made = self.value(typ, layout, out)
            if eq.through_storage:
                made.param = operands[0].param
            results.append(made)
        val = nodes.value(node)
        if isinstance(val, torch.Tensor):
            return results[0]
        found = iter(results)  # outputs that were not asked for are None
        return [next(found) if isinstance(t, torch.Tensor) else None for t in val]

    def _reduced(
        self, emitter: Emitter, call: Call, eq: Equation, local: Sequence[Any], solution: Solution
    ) -> tuple[list[fx.Node], list[Layout]]:
        """The local ops of a call; parts of a maximum and the like are joined at once."""
        outs = self._local_call(emitter, call, eq, local, solution.operands, solution.outputs)
        if eq.reduce == "sum":
            return outs, solution.outputs
        joined = [
            emitter.reduce(out, layout.pending, eq.reduce, layout) if layout.pending else out
            for out, layout in zip(outs, solution.outputs, strict=True)
        ]
        return joined, [layout.settled() for layout in solution.outputs]

    def _local_call(
        self, emitter: Emitter, call: Call, eq: Equation, local: Sequence[Any], ins: Sequence[Layout], outs: Sequence[Layout]
    ) -> list[fx.Node]:
        if eq.emit is not None:
            return eq.emit(emitter, call, local, ins, outs)
        args, kwargs = (call.args, call.kwargs) if eq.local is None else eq.local(call, ins, outs)
        fill = lambda a: local[a.index] if isinstance(a, Operand) else a  # noqa: E731
        node = emitter.call(call.op, *_map(fill, args), **_map(fill, dict(kwargs)))
        if len(outs) == 1 and not isinstance(node.meta["val"], list | tuple):
            return [node]
        made = [i for i, t in enumerate(node.meta["val"]) if isinstance(t, torch.Tensor)]
        return [emitter.call(operator.getitem, node, i) for i in made]

    def _factory(self, call: Call, operands: list[Value], found: Factory) -> Value:
        made = Value(call.outputs[0], None)

        def make(layout: Layout) -> fx.Node:
            node = found.emit(self.emitter, call, layout)
            if found.like is None and not operands:
                node.meta["applied"] = Applied(
                    call, (), (layout,), lambda emitter, ops: [found.emit(emitter, call, layout)]
                )
            return node

        made.make = make
        made.zero = found.zero
        if found.like is not None:
            like = operands[found.like]
            made.preferred = like.layout.settled() if like.layout is not None else like.preferred
        return made

    def _view(self, node: fx.Node, call: Call, v: Value, found: DimMap) -> Value:
        typ = call.outputs[0]
        if v.layout is None and found.backward is not None:
            made = Value(typ, None)

            def make(layout: Layout) -> fx.Node:
                assert found.backward is not None
                try:
                    wanted = found.backward(layout.dims, self.sizes)
                except Unsplittable:
                    whole = self.read(made, replicated(typ.shape))
                    return self._apply_moves(whole, replicated(typ.shape), layout, typ)
                target, args = found.local(layout.local_shape)
                return self.emitter.call(target, self.read(v, Layout(wanted)), *args)

            made.make = make
            made.zero = v.zero
            return made
        layout = v.layout or replicated(v.type.shape)
        while True:
            try:
                dims = found.forward(layout.dims, self.sizes)
                break
            except Unsplittable as e:
                gathered = without(layout, [e.axis], self.sizes)
                self.overrule(node, messages.uncut(call, v, layout, e.axis, gathered, node.meta.get("line")))
                layout = gathered
        out = replace(layout, dims=tuple(canonical(d) for d in dims))
        target, args = found.local(out.local_shape)
        local = self.emitter.call(target, self.read(v, layout, f"{_name(call)} cuts the dim"), *args)
        local.meta["applied"] = Applied(
            call,
            (Layout(layout.dims, layout.pending),),
            (Layout(out.dims, out.pending),),
            lambda emitter, ops: [emitter.call(target, ops[0], *args)],
        )
        made = self.value(typ, out, local)
        made.param = v.param
        if layout.active and found.backward is not None:
            made.make = lambda wanted: self._view_of_gathered(v, made, found, wanted)
        return made

    def _view_of_gathered(self, v: Value, view: Value, found: DimMap, layout: Layout) -> fx.Node:
        """Read a view of a stored parameter: the parameter is gathered once, however it is viewed."""
        assert found.backward is not None
        try:
            wanted = Layout(found.backward(layout.dims, self.sizes), layout.pending)
        except Unsplittable:
            return self._move(view, layout, self.emitter.origin.backward)
        target, args = found.local(layout.local_shape)
        return self.emitter.call(target, self.read(v, wanted), *args)

    def _apply_moves(self, x: fx.Node, src: Layout, dst: Layout, typ: TensorType) -> fx.Node:
        for move in reshard.plan(src, dst, self.sizes, typ.dtype.itemsize):
            x = self.emitter.move(x, move)
        return x

    def _expand(self, call: Call, v: Value, found: Expand) -> Value:
        typ = call.outputs[0]
        own = v.layout if v.layout is None or not v.layout.active else without(v.layout, v.layout.storage, self.sizes)

        def operand_layout(layout: Layout) -> Layout:
            dims = [canonical([n]) for n in v.type.shape]
            for out, src in enumerate(found.source):
                if src is not None:
                    dims[src] = layout.dims[out]
            return Layout(tuple(dims), layout.pending)

        def make(layout: Layout) -> fx.Node:
            local = self.read(v, operand_layout(layout))
            return self.emitter.call(aten.expand.default, local, list(layout.local_shape))

        made = Value(typ, None, make=make, zero=v.zero)
        if own is not None:
            dims = tuple(
                canonical([n]) if s is None else own.dims[s] for n, s in zip(typ.shape, found.source, strict=True)
            )
            made.layout = Layout(dims, own.pending)
            self.values.append(made)
        return made

    # --- what cannot stay as it is -----------------------------------------------------------------------------

    def conflict(
        self, node: fx.Node, call: Call, operands: list[Value], layouts: list[Layout | None], solution: Solution
    ) -> None:
        """An op's operands cannot all keep their layouts: an error in forward, a noted choice elsewhere."""
        text = messages.conflict(call, operands, layouts, solution, self.sizes, node.meta.get("line"))
        self.overrule(node, text)

    def overrule(self, node: fx.Node, text: str) -> None:
        """Note a choice; where the user can act on it and was promised to be asked, it is a problem."""
        if self.ctx.conflicts == "error" and not node.meta.get("backward"):
            self.problems.append(text)
        else:
            self.choices.append((str(node.meta.get("line") or ""), text))


def _name(call: Call) -> str:
    return str(call.op).removesuffix(".default")


def _map(f: Any, tree: Any) -> Any:
    if isinstance(tree, dict):
        return {k: _map(f, v) for k, v in tree.items()}
    if isinstance(tree, tuple | list):
        return type(tree)(_map(f, v) for v in tree) if type(tree) in (tuple, list) else [_map(f, v) for v in tree]
    return f(tree)
