"""The order in which a graph computes its results: one after the other, so that little is held at a time.

A trace computes what a function writes first, first: an optimizer's new first moments of all leaves, then the second
ones, then all updates. Run like that, a step holds the old and the new of everything at once. Result by result, the
old values of a leaf die before the next leaf's new ones are made.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from functitan.compiler import nodes
from functitan.compiler.body_calls import BODY_CALLS

_WAIT = torch.ops._c10d_functional.wait_tensor.default


def result_by_result(graph: fx.Graph) -> None:
    """Reorder, in place, the calls that stand after a graph's last collective, body or effect, or between two such.

    Those stay where they are: what runs before what is theirs to say, and the same on every rank. Within a stretch
    between them, what a result of the graph needs is computed for the first result, then for the second, and so on;
    what later stretches need comes first, as it stood.
    """
    output = next(n for n in reversed(graph.nodes) if n.op == "output")
    results = [n for n in nodes.args(output)[0] if isinstance(n, fx.Node)]
    stretch: list[fx.Node] = []
    for node in list(graph.nodes):
        if node.op == "call_function" and not _fixed(node):
            stretch.append(node)
        elif node.op != "placeholder":
            _reorder(graph, stretch, node, results)
            stretch = []


def _fixed(node: fx.Node) -> bool:
    """Whether a call keeps its place; so do those that take apart what it gives."""
    if node.target in (operator.getitem, _WAIT):
        return _fixed(nodes.args(node)[0])
    return "collective" in node.meta or "owned" in node.meta or node.target in BODY_CALLS or nodes.has_effect(node)


def _reorder(graph: fx.Graph, stretch: list[fx.Node], before: fx.Node, results: list[fx.Node]) -> None:
    inside = set(stretch)
    mine = [n for n in dict.fromkeys(results) if n in inside]
    if len(mine) < 2:
        return
    needed_later = [n for n in stretch if any(u not in inside and u.op != "output" for u in n.users)]
    done: set[fx.Node] = set()
    for root in [*needed_later, *mine, *stretch]:
        stack = [root]
        while stack:
            node = stack[-1]
            missing = [a for a in node.all_input_nodes if a in inside and a not in done]
            if missing:
                stack.append(missing[0])
                continue
            stack.pop()
            if node not in done:
                done.add(node)
                before.prepend(node)
