"""Prefetch for regions: what a region starts ahead and finishes late stands in the graph that calls it.

A scan's loop runs a body's stages so many steps apart; a region is called once, so its stages become calls of its
caller: gathers stand before the calls of regions before it, what follows the reductions of its gradients after those
that come next. A scan is not crossed: gathered parameters would be held through all of its steps.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from functitan.compiler import nodes
from functitan.compiler.body_calls import BODY_CALLS, call_body, call_body_backward
from functitan.compiler.program import LoweredBody

_REGIONS = (call_body, call_body_backward)


def inline_stages(graph: fx.Graph, staged: Mapping[str, LoweredBody], ahead: int) -> fx.Graph:
    """A copy of a graph with the stages of the regions that it calls around their calls.

    Args:
        graph: stays as it is.
        staged: regions whose graphs are cut, by name; the copy calls their main graphs alone.
        ahead: before so many calls of regions a region's collectives are started.
    """
    made = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    where: dict[fx.Node, float] = {}
    gradients: dict[fx.Node, list[fx.Node]] = {}
    calls = [(i, n.target) for i, n in enumerate(graph.nodes) if n.target in BODY_CALLS]
    coordinates: dict[str, fx.Node] = {}
    for i, node in enumerate(graph.nodes):
        if node.op == "output":
            made.output([env[n] for n in nodes.args(node)[0]])
            break
        body = staged.get(str(nodes.args(node)[0])) if node.target in _REGIONS else None
        source = nodes.args(node)[0] if node.target is operator.getitem else None
        if source in gradients:
            env[node] = gradients[source][int(nodes.args(node)[1])]
            env[node].meta |= {k: v for k, v in node.meta.items() if k != "val"}
            continue
        env[node] = made.node_copy(node, env.__getitem__)
        where[env[node]] = i
        if "coordinate" in node.meta:
            coordinates[node.meta["coordinate"]] = env[node]
        if body is None:
            continue
        call, late = env[node], node.target is call_body_backward
        starts = body.backward_starts if late else body.forward_starts
        if starts is not None:
            with made.inserting_before(call):
                given = [env[n] for n in nodes.args(node)[1]]
                started = _inline(made, starts, given, coordinates, where, _before(calls, i, ahead) - 0.5)
            *head, last = nodes.args(call)
            call.args = (*head, [*last, *started])
        if late and body.backward_finish:
            assert body.backward is not None
            main = nodes.args(_output(body.backward))[0]
            call.meta["val"] = [n.meta["val"] for n in main]
            values = [made.call_function(operator.getitem, (call, k)) for k in range(len(main))]
            for value, n in zip(values, main, strict=True):
                value.meta = {"val": n.meta["val"], "origin": n.meta["origin"]}
                where[value] = i
            for k, finish in enumerate(body.backward_finish):
                values = _inline(made, finish, values, coordinates, where, _after(calls, i, k + 1) + 0.5)
            gradients[node] = values
    return _in_order(made, where)


def _inline(
    made: fx.Graph,
    graph: fx.Graph,
    given: Sequence[fx.Node],
    coordinates: Mapping[str, fx.Node],
    where: dict[fx.Node, float],
    place: float,
) -> list[fx.Node]:
    """Copy a stage's calls; its results."""
    inputs = iter(given)
    env: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            env[node] = coordinates[node.meta["coordinate"]] if "coordinate" in node.meta else next(inputs)
        elif node.op != "output":
            env[node] = made.node_copy(node, env.__getitem__)
            where[env[node]] = place
    return [env[n] for n in nodes.args(_output(graph))[0]]


def _output(graph: fx.Graph) -> fx.Node:
    return next(n for n in reversed(graph.nodes) if n.op == "output")


def _before(calls: Sequence[tuple[int, Any]], at: int, count: int) -> int:
    """The position of the call so many calls of regions before the one at a position.

    Neither a scan nor the turn from forward to backward is crossed.
    """
    k = [i for i, _ in calls].index(at)
    while count and k and calls[k - 1][1] is calls[k][1]:
        k, count = k - 1, count - 1
    return calls[k][0]


def _after(calls: Sequence[tuple[int, Any]], at: int, count: int) -> int:
    """The same for calls that come after."""
    k = [i for i, _ in calls].index(at)
    while count and k + 1 < len(calls) and calls[k + 1][1] is calls[k][1]:
        k, count = k + 1, count - 1
    return calls[k][0]


def _in_order(graph: fx.Graph, where: Mapping[fx.Node, float]) -> fx.Graph:
    """A copy whose calls stand as near to their places as what they need allows."""
    order = list(graph.nodes)
    place = {n: where.get(n, float("inf")) for n in order}
    for node in reversed(order):  # what is needed early has to be early
        for a in node.all_input_nodes:
            place[a] = min(place[a], place[node])
    rank = {n: (place[n] if n.op != "placeholder" else -1.0, i) for i, n in enumerate(order)}
    missing = {n: len(n.all_input_nodes) for n in order}
    ready = [rank[n] for n in order if not missing[n]]
    heapq.heapify(ready)
    made = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    while ready:
        _, i = heapq.heappop(ready)
        node = order[i]
        if node.op == "output":
            continue
        env[node] = made.node_copy(node, env.__getitem__)
        for user in node.users:
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(ready, rank[user])
    made.output([env[n] for n in nodes.args(order[-1])[0]])
    return made
