"""Applying sharding rules: from a call and the layouts of its operands to local ops and the layouts of its results."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from functitan.compiler import messages, nodes
from functitan.compiler.emit import Emitter
from functitan.compiler.reading import Reader
from functitan.compiler.values import Applied, Value
from functitan.sharding.layout import Layout, Unsplittable, canonical, replicated, without
from functitan.sharding.op_rules.base import (
    Call,
    Decompose,
    DimMap,
    Equation,
    Expand,
    Factory,
    Operand,
    Rule,
    Solution,
)
from functitan.sharding.solve import operand_layouts, solve

aten = torch.ops.aten


class Applier(Reader, ABC):
    """Applies rules. What a rule cannot have as it is is told to ``conflict`` and ``overrule``."""

    @abstractmethod
    def inline(self, node: fx.Node, decompose: Decompose, operands: list[Value]) -> Any:
        """Lower a call's decomposition in its place; the walk does it."""

    def apply_rule(self, rule: Rule, node: fx.Node, call: Call, operands: list[Value]) -> Any:
        """Lower a call by a rule."""
        if isinstance(rule, Decompose):
            return self.inline(node, rule, operands)
        if isinstance(rule, Factory):
            return self._factory(call, operands, rule)
        if isinstance(rule, DimMap):
            return self._view(node, call, operands[0], rule)
        if isinstance(rule, Expand):
            return self._expand(call, operands[0], rule)
        return self._equation(node, call, operands, rule)

    # --- equations ---------------------------------------------------------------------------------------------

    def _equation(self, node: fx.Node, call: Call, operands: list[Value], eq: Equation) -> Any:
        if self._on_demand(call, operands, eq):
            made = Value(call.outputs[0], None)
            made.make = lambda layout: self._emit_for(call, operands, eq, layout)
            made.zero = eq.through_storage and operands[0].zero  # a copy or a slice of zeros
            alike = (v.preferred for v in operands if v.preferred and v.type.shape == made.type.shape)
            made.preferred = next(alike, None)
            return made
        layouts = [self._as_read(v, eq) for v in operands]
        solution = solve(eq, call, layouts, self.sizes)
        if solution.conflicts and eq.otherwise is not None:
            return self.inline(node, eq.otherwise, operands)
        if solution.conflicts:
            self.conflict(node, call, operands, layouts, solution)
        elif free := self._free_dims(call, operands, eq, solution):
            made = Value(call.outputs[0], solution.outputs[0], free=free, settled_only=True)
            made.make = lambda layout: self._emit_for(call, operands, eq, layout)
            self.values.append(made)
            return made
        return self._emit(call, operands, eq, solution, node)

    def _free_dims(self, call: Call, operands: list[Value], eq: Equation, solution: Solution) -> frozenset[int]:
        """The dims of the result that no operand fixes: made by each reader as it wants them, never whole and sliced."""
        out = solution.outputs[0]
        if len(call.outputs) != 1 or eq.emit is not None or eq.refs or out.pending or out.active:
            return frozenset()
        kept = {label for label in eq.outputs[0] if isinstance(label, str)}
        fixed: set[str] = {"_"}
        for v, labels in zip(operands, eq.inputs, strict=True):
            if any(isinstance(label, tuple) or (label is not None and label not in kept) for label in labels):
                return frozenset()
            if v.layout is not None:
                fixed |= {label for d, label in enumerate(labels) if isinstance(label, str) and d not in v.free}
        if "_" in kept or any(isinstance(label, tuple) for label in eq.outputs[0]):
            return frozenset()
        return frozenset(d for d, label in enumerate(eq.outputs[0]) if label is not None and label not in fixed)

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
        self,
        emitter: Emitter,
        call: Call,
        eq: Equation,
        local: Sequence[Any],
        ins: Sequence[Layout],
        outs: Sequence[Layout],
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

    # --- factories and views -----------------------------------------------------------------------------------

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
                    return self.moved(whole, replicated(typ.shape), layout, typ)
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
            made.free = frozenset(
                d for d, s in enumerate(found.source) if typ.shape[d] != 1 and (s is None or s in v.free)
            )
            self.values.append(made)
        return made

    # --- what cannot stay as it is -----------------------------------------------------------------------------

    def conflict(
        self, node: fx.Node, call: Call, operands: list[Value], layouts: list[Layout | None], solution: Solution
    ) -> None:
        """An op's operands cannot all keep their layouts: an error in forward, a noted choice elsewhere."""
        line, settled = node.meta.get("line"), not self._asks(node)
        self.overrule(node, messages.conflict(call, operands, layouts, solution, self.sizes, line, settled=settled))

    def _asks(self, node: fx.Node) -> bool:
        """Whether the user is asked: in forward, where they can act, unless they said not to."""
        return self.ctx.conflicts == "error" and not node.meta.get("backward")

    def overrule(self, node: fx.Node, text: str) -> None:
        """Note a choice; where the user can act on it and was promised to be asked, it is a problem."""
        if self._asks(node):
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
