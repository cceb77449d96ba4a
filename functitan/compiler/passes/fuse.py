"""Rewriting a lowered graph so that several calls become one."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree

aten = torch.ops.aten
_WAIT = torch.ops._c10d_functional.wait_tensor.default

#: Makes one call of several: (writer, members, their operands in the new graph) -> for each member the node that
#: stands for its awaited result.
Join = Callable[["Writer", Sequence[fx.Node], Sequence[fx.Node]], Sequence[fx.Node]]


class Writer:
    """Appends calls to a graph, with their fake values.

    Attributes:
        graph: the graph.
        meta: what every call gets, such as its origin.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.meta: dict[str, Any] = {}

    def call(self, target: Callable[..., Any], *args: Any, **meta: Any) -> fx.Node:
        """A call; operands that are nodes have fake values."""
        node = self.graph.call_function(target, args)
        values = _pytree.tree_map(lambda a: a.meta["val"] if isinstance(a, fx.Node) else a, args)
        node.meta = {**self.meta, **meta, "val": target(*values)}
        return node


def wait_of(collective: fx.Node) -> fx.Node | None:
    """The node that waits for a collective, if that is its only reader."""
    users = list(collective.users)
    return users[0] if len(users) == 1 and users[0].target is _WAIT else None


def levels(graph: fx.Graph, chosen: Callable[[fx.Node], bool]) -> dict[fx.Node, int]:
    """For every node, on the longest chain that leads to it, how many chosen nodes there are before it.

    Chosen nodes of one level do not depend on each other, and groups of equal levels never on each other in a circle.
    """
    found: dict[fx.Node, int] = {}
    for node in graph.nodes:
        found[node] = max((found[a] + chosen(a) for a in node.all_input_nodes), default=0)
    return found


def fuse(graph: fx.Graph, groups: Sequence[Sequence[fx.Node]], join: Join) -> fx.Graph:
    """A copy of a graph in which each group of collectives is one.

    A group's call stands where its last operand is known; all else keeps its order as far as that allows.

    Args:
        graph: the graph; it stays as it is.
        groups: collectives, each with a wait as its only reader; none may depend on another of its group, and groups
            not on each other in a circle.
        join: makes the one.
    """
    unit: dict[fx.Node, int] = {node: i for i, node in enumerate(graph.nodes)}
    members: dict[int, Sequence[fx.Node]] = {}
    for group in groups:
        first = unit[group[0]]
        members[first] = group
        for node in group:
            wait = wait_of(node)
            assert wait is not None
            unit[node] = unit[wait] = first
    order = list(graph.nodes)
    needs: dict[int, set[int]] = {}
    for node in order:
        needs.setdefault(unit[node], set()).update(unit[a] for a in node.all_input_nodes if unit[a] != unit[node])
    readers: dict[int, list[int]] = {}
    for u, before in needs.items():
        for b in before:
            readers.setdefault(b, []).append(u)
    missing = {u: len(before) for u, before in needs.items()}
    ready = [u for u, n in missing.items() if n == 0]
    heapq.heapify(ready)
    made = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    while ready:
        u = heapq.heappop(ready)
        if u in members:
            writer = Writer(made)
            group = members[u]
            operands = [env[n.args[0]] for n in group]  # type: ignore[index]
            for node, result in zip(group, join(writer, group, operands), strict=True):
                env[wait_of(node)] = result  # type: ignore[index]
        elif order[u].op != "output":
            env[order[u]] = made.node_copy(order[u], env.__getitem__)
        for r in readers.get(u, ()):
            missing[r] -= 1
            if missing[r] == 0:
                heapq.heappush(ready, r)
    output = order[-1]
    made.output([env[n] for n in output.args[0]])  # type: ignore[index, union-attr]
    return made
