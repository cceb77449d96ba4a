"""Reading values during lowering: the local node that holds a value in a layout, made when it is first needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from functitan import _torch
from functitan.compiler import reshard
from functitan.compiler.emit import Emitter, Origin
from functitan.compiler.values import Value
from functitan.sharding.layout import Layout, replicated
from functitan.sharding.logical import Rules
from functitan.sharding.mesh import Mesh
from functitan.sharding.op_rules.base import TensorType

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
        local: localized shard_map bodies by traced key and input layouts.
        decomposed: traced decompositions by node and key.
        regathers: by the name of a region, whether backward gathers its stored parameters again, instead of holding them
            since forward.
        choices: what was settled without being asked for: (line, sentence).
        decided: what was decided at splits: the pass or setting, and a sentence.
        seen_names: logical names that were asked for.
    """

    mesh: Mesh
    rules: Rules | None
    mode: _torch.FakeTensorMode
    bodies: dict[str, Any]
    conflicts: str = "error"
    reduce_dtype: torch.dtype = torch.float32
    regathers: Callable[[str], bool] = lambda name: True
    lowered: dict[Any, Any] = field(default_factory=dict)
    local: dict[Any, Any] = field(default_factory=dict)
    decomposed: dict[Any, Any] = field(default_factory=dict)
    choices: list[tuple[str, str]] = field(default_factory=list)
    decided: list[tuple[str, str]] = field(default_factory=list)
    seen_names: set[str] = field(default_factory=set)


class Env(dict[fx.Node, Any]):
    """Global node -> Value (a list for several outputs). ``missing`` supplies what is first known where it is read."""

    missing: Any = None

    def __missing__(self, node: fx.Node) -> Any:
        if self.missing is None:
            raise KeyError(node)
        self[node] = self.missing(node)
        return self[node]


class Reader:
    """Holds the values of one graph that is being lowered.

    Attributes:
        emitter: builds the local graph.
        env: global node -> Value, or a list of Values for an op with several outputs.
        regather: whether backward gathers stored parameters again.
        problems: conflicts that the user must settle.
        refused: what cannot be lowered at all; conflicts beside it may only follow from it.
        choices: what was settled without being asked for: (line, sentence).
        settle_at: global nodes whose pending sum is resolved where it is made, with the layout to take.
        values: all values, for the decision where pending sums are resolved.
    """

    def __init__(self, ctx: Context, settle_at: dict[fx.Node, Layout], regather: bool) -> None:
        self.ctx = ctx
        self.regather = regather
        self.sizes = {n: s for n, s in ctx.mesh.axes if s > 1}
        self.emitter = Emitter(self.sizes, ctx.mode)
        self.env = Env()
        self.problems: list[str] = []
        self.refused: list[str] = []
        self.choices: list[tuple[str, str]] = []
        self.settle_at = settle_at
        self.values: list[Value] = []

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
        # Backward gathers a stored parameter anew instead of holding the gathered one since forward, unless told to.
        again = bool(v.layout is not None and v.layout.active and origin.backward and self.regather)
        if v.layout is not None and v.layout.pending:
            v.passed |= set(layout.pending) & set(v.layout.pending)
            if set(v.layout.pending) - set(layout.pending):
                v.resolved.append(layout)
        for (have, late), node in v.versions.items():
            if (have.dims, have.pending) == (layout.dims, layout.pending) and (late == again or not v.param):
                return node
        gather = bool(v.layout is not None and v.layout.active)
        self.emitter.origin = replace(origin, why=why or origin.why, param=v.param or origin.param, gather=gather)
        if v.zero and v.layout is None and layout.pending:
            node = self._zeros(v.type, layout)  # each addend of a zero is zero
        elif v.make is not None and not (layout.pending and (v.layout is None or v.settled_only)):
            node = v.make(layout)
        else:
            node = self._move(v, layout, again)
        self.emitter.origin = origin
        self.emitter.annotate(node, layout, v.type)
        v.versions[(layout, again)] = node
        return node

    def _move(self, v: Value, layout: Layout, again: bool) -> fx.Node:
        if v.make is not None and (v.layout is None or v.settled_only):
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

    def moved(self, x: fx.Node, src: Layout, dst: Layout, typ: TensorType) -> fx.Node:
        """A local node brought from one layout into another."""
        for move in reshard.plan(src, dst, self.sizes, typ.dtype.itemsize):
            x = self.emitter.move(x, move)
        return x

    def stand_in(self, val: torch.Tensor) -> Value:
        """A value of zeros in place of one that cannot be had."""
        return self.zeros(TensorType(tuple(val.shape), val.dtype))

    def zeros(self, typ: TensorType, preferred: Layout | None = None) -> Value:
        """Zeros that are made where they are read, in any layout."""
        return Value(typ, None, make=lambda layout: self._zeros(typ, layout), preferred=preferred, zero=True)

    def _zeros(self, typ: TensorType, layout: Layout) -> fx.Node:
        return self.emitter.call(aten.full.default, list(layout.local_shape), 0, dtype=typ.dtype)

    def at(self, node: fx.Node) -> None:
        """What is emitted next belongs to this global node."""
        self.emitter.origin = Origin(node.meta.get("line"), bool(node.meta.get("backward")), str(node.name))
