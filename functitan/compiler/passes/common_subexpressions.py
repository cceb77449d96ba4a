"""Compute a value once: two equal calls on equal operands in one graph become the first of them.

Ops are pure: random ones take keys. What recomputation is for is never undone:

- A body's forward and backward are graphs of their own. What backward computes again stays computed again: a value that
  forward has is not saved for it, and a saved value, an input of the backward graph, replaces nothing.
- In a graph that holds forward and backward, calls are compared only within one stretch of either.
- Two equal collectives become one only if the first one's result is still read where the second is made: nothing that
  was gathered is held longer than it was without this.
"""

from __future__ import annotations

import operator
from collections import Counter
from typing import Any

import torch
from torch import fx

from functitan.compiler import nodes
from functitan.compiler.passes.rewrite import each_graph
from functitan.compiler.passes.settings import Passes
from functitan.compiler.program import Program
from functitan.compiler.text import target_name

aten = torch.ops.aten
_WAIT = torch.ops._c10d_functional.wait_tensor.default
_FILLS = {aten.full.default, aten.zeros.default, aten.ones.default, aten.empty.memory_format}
#: Ops that a sentence names; the rest are counted.
_NAMED = 4


def common_subexpressions(program: Program, settings: Passes) -> tuple[Program, list[str]]:
    """The program with equal calls made once, graph by graph; see this module."""
    return each_graph(program, _merge)


def _merge(where: str, graph: fx.Graph) -> list[str]:
    known: dict[Any, fx.Node] = {}
    place = {node: i for i, node in enumerate(graph.nodes)}
    merged: Counter[str] = Counter()
    changes = []
    stretch, late = 0, False
    for node in list(graph.nodes):
        if not _is_pure(node):
            continue
        origin = node.meta.get("origin")
        if origin is not None and origin.backward != late:
            stretch, late = stretch + 1, origin.backward
        key = (stretch, node.target, str(node.args), str(node.kwargs), node.meta.get("layout"), _checked(node))
        first = known.setdefault(key, node)
        if first is node:
            continue
        move = node.meta.get("collective")
        if move is not None and _last_read(first, place) < place[node]:
            known[key] = node  # the first is gone by now; a third may still use the second
            continue
        if move is not None:
            what = origin.param or str(origin.line or "") if origin is not None else ""
            changes.append(f"{where}: one {move.kind} over {'+'.join(move.axes)} of {what or 'a value'} for two")
        merged[target_name(node.target)] += 1
        if "gradient" in node.meta:
            first.meta.setdefault("gradient", node.meta["gradient"])
        node.replace_all_uses_with(first)
        graph.erase_node(node)
    if merged:
        named = ", ".join(f"{n} {op}" for op, n in merged.most_common(_NAMED))
        rest = len(merged) - _NAMED
        more = f" and {rest} other ops" if rest > 0 else ""
        changes.append(f"{where}: {sum(merged.values())} calls had equals before them: {named}{more}")
    return changes


def _is_pure(node: fx.Node) -> bool:
    if node.op != "call_function" or nodes.has_effect(node) or _fills(node):
        return False
    return isinstance(node.target, torch._ops.OpOverload) or node.target is operator.getitem


def _fills(node: fx.Node) -> bool:
    """Whether a call fills memory with one value: to do that again is cheaper than to hold it."""
    return node.target in _FILLS and node.meta["val"].numel() > 1


def _checked(node: fx.Node) -> Any:
    """What verification checks at this call: calls with different questions stay apart."""
    applied = node.meta.get("applied")
    return None if applied is None else applied.key


def _last_read(node: fx.Node, place: dict[fx.Node, int]) -> int:
    """The place where a collective's result, or a view of it, is read last."""
    last, stack = -1, list(node.users)
    while stack:
        user = stack.pop()
        last = max(last, place[user])
        if user.target is _WAIT or _is_view(user):
            stack.extend(user.users)
    return last


def _is_view(node: fx.Node) -> bool:
    val = node.meta.get("val")
    if not isinstance(val, torch.Tensor):
        return False
    own = val.untyped_storage()._cdata
    return any(
        isinstance(v := n.meta.get("val"), torch.Tensor) and v.untyped_storage()._cdata == own
        for n in node.all_input_nodes
    )
