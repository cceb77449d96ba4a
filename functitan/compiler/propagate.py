"""Propagation: walk a global graph in order, give every value a layout, and emit its local ops.

Each op's rule says which layouts its operands must have; where one has another, moves are inserted, once per value
and target. Nothing is decided twice: the walk is the lowering.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from functitan.compiler import calls, local_calls, messages, nodes, owned_calls
from functitan.compiler.applying import Applier
from functitan.compiler.reading import Context, Env
from functitan.compiler.values import Value
from functitan.errors import ShardingError
from functitan.sharding.layout import replicated
from functitan.sharding.op_rules.base import Call, Decompose, Operand, TensorType, find_rule
from functitan.sharding.op_rules.pointwise import is_pointwise, pointwise

__all__ = ["Context", "Propagator"]

_HANDLERS: tuple[dict[Any, Any], ...] = (calls.HANDLERS, local_calls.HANDLERS, owned_calls.HANDLERS)


class Propagator(Applier):
    """Lowers one graph."""

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
            if node.target in calls.BODIES or node.target in local_calls.HANDLERS:
                raise  # no stand-in for what its backward needs, and the message has a body's problems already
            self.refused.append(str(e))
            val = nodes.value(node)
            made = [self.stand_in(t) for t in (val if isinstance(val, list | tuple) else [val])]
            return made if isinstance(val, list | tuple) else made[0]

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
            return self.env[nodes.args(node)[0]][nodes.args(node)[1]]
        handler = next((h[node.target] for h in _HANDLERS if node.target in h), None)
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

        args, kwargs = nodes.mapped(node, count)
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
        return self.apply_rule(found, node, call, operands)

    def inline(self, node: fx.Node, decompose: Decompose, operands: list[Value]) -> Any:
        """Lower a call's decomposition in its place."""
        graph, single = calls.traced_decomposition(self, node, decompose)
        env, self.env = self.env, Env()
        places = [n for n in graph.nodes if n.op == "placeholder"]
        self.env.update(zip(places, operands, strict=True))
        self.run(graph)
        output = next(n for n in graph.nodes if n.op == "output")
        results = [None if o is None else self.env[o] for o in nodes.args(output)[0]]
        self.env = env
        return results[0] if single else results
