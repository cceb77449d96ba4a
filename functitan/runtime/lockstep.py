"""Interpret a lowered graph for all ranks of a simulated mesh, op by op in lockstep.

A value is a list with one tensor per rank. Exact and without processes: the default of tests and examples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from functitan.compiler import nodes
from functitan.compiler import program as targets
from functitan.compiler.owned import Exchange
from functitan.compiler.program import LoweredBody
from functitan.runtime import collectives
from functitan.runtime.scan import Run, Stages, TensorOps, scan_backward, scan_forward
from functitan.sharding.mesh import Mesh

_WAIT = torch.ops._c10d_functional.wait_tensor.default
Ranked = list[Any]


class Lockstep:
    """Runs a program's graphs on per-rank values.

    Args:
        mesh: the simulated mesh.
        bodies: the lowered bodies that graphs call.
        observe: called with graph name, node and per-rank values after every call, for checks.
    """

    def __init__(
        self,
        mesh: Mesh,
        bodies: dict[str, LoweredBody],
        observe: Callable[[str, fx.Node, Ranked], None] | None = None,
    ) -> None:
        self._bodies = bodies
        self._groups = collectives.Groups(mesh)
        self._observe = observe
        self.ranks = mesh.size
        self._coordinates = [{a: torch.tensor(v) for a, v in c.items()} for c in mesh.coordinates()]
        self._last: dict[int, dict[fx.Node, list[fx.Node]]] = {}

    def graph(self, name: str, graph: fx.Graph, inputs: Iterable[Ranked]) -> list[Ranked]:
        """Run one graph; inputs exclude the rank coordinates."""
        env: dict[fx.Node, Ranked] = {}
        given = iter(inputs)
        free = self._last_uses(graph)
        for node in graph.nodes:
            if node.op == "placeholder":
                axis = node.meta.get("coordinate")
                env[node] = [c[axis] for c in self._coordinates] if axis else next(given)
            elif node.op == "output":
                return [env[n] for n in nodes.args(node)[0]]  # type: ignore[union-attr]
            else:
                env[node] = self._call(name, node, env)
                if self._observe is not None:
                    self._observe(name, node, env[node])
            for dead in free.get(node, ()):
                env.pop(dead, None)
        raise AssertionError("a graph without an output")

    def _last_uses(self, graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
        known = self._last.get(id(graph))
        if known is None:
            known, seen = {}, set()
            for node in reversed(graph.nodes):
                for used in node.all_input_nodes:
                    if used not in seen:
                        seen.add(used)
                        known.setdefault(node, []).append(used)
            self._last[id(graph)] = known
        return known

    def _call(self, name: str, node: fx.Node, env: dict[fx.Node, Ranked]) -> Ranked:
        target = node.target
        if target in targets.BODY_CALLS:
            return self._body(node, env)
        if target in collectives.COLLECTIVES:
            x, *rest = node.args
            return collectives.run(target, env[x], tuple(rest), self._groups)  # type: ignore[index]
        if isinstance(target, Exchange):
            x, *coordinates = nodes.args(node)
            return collectives.exchange(target, env[x], [env[c] for c in coordinates], self._groups)
        if target is _WAIT:
            return env[nodes.args(node)[0]]  # type: ignore[index]
        out = []
        for r in range(self.ranks):
            args, kwargs = nodes.mapped(node, lambda n: env[n][r])  # noqa: B023
            out.append(target(*args, **kwargs))  # type: ignore[operator]
        return out

    def _body(self, node: fx.Node, env: dict[fx.Node, Ranked]) -> Ranked:
        """Run a body; the results of all ranks become one list per rank, as ops with several outputs give."""
        body: LoweredBody = self._bodies[str(nodes.args(node)[0])]
        groups = [[env[n] for n in a] for a in nodes.args(node) if isinstance(a, list | tuple)]
        forward = Stages(
            self._runs(body.name, body.forward), self._maybe_runs(f"{body.name}.starts", body.forward_starts)
        )
        if node.target is targets.call_body:
            outs = forward.main(groups[0])
        elif node.target is targets.scan_body:
            outs = scan_forward(body, int(nodes.args(node)[1]), groups[0], forward, _RANKED)  # type: ignore[arg-type]
        else:
            assert body.backward is not None
            backward = Stages(
                self._runs(f"{body.name}.backward", body.backward),
                self._maybe_runs(f"{body.name}.starts.backward", body.backward_starts),
                tuple(map(self._runs, body.finish_names, body.backward_finish)),
            )
            kept, saved, cotangents = groups
            if node.target is targets.call_body_backward:
                outs = backward.main([*kept, *saved, *cotangents])
            else:
                outs = scan_backward(body, int(nodes.args(node)[1]), kept, saved, cotangents, backward, _RANKED)  # type: ignore[arg-type]
        return [list(row) for row in zip(*outs, strict=True)] if outs else [[] for _ in range(self.ranks)]

    def _runs(self, name: str, graph: fx.Graph) -> Run:
        return lambda inputs: self.graph(name, graph, inputs)

    def _maybe_runs(self, name: str, graph: fx.Graph | None) -> Run | None:
        return None if graph is None else self._runs(name, graph)


class _RankedOps:
    """What a scan does with per-rank values."""

    def rows(self, x: Ranked) -> Sequence[Ranked]:
        return [list(row) for row in zip(*map(_ONE.rows, x), strict=True)]

    def listed(self, rows: Sequence[Ranked]) -> Ranked:
        return [list(column) for column in zip(*rows, strict=True)]

    def stack(self, row: Ranked, length: int) -> Ranked:
        return [_ONE.stack(v, length) for v in row]

    def write(self, places: Sequence[Ranked], rows: Sequence[Ranked]) -> None:
        for place, row in zip(places, rows, strict=True):
            _ONE.write(place, row)

    def add(self, a: Ranked, b: Ranked) -> Ranked:
        return [x + y for x, y in zip(a, b, strict=True)]


_ONE = TensorOps()
_RANKED = _RankedOps()
