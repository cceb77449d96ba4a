"""The graph around compiled pieces: every value reaches its reader in the memory order that it was compiled for.

A piece is compiled for the order of its operands' fake values. What pieces return is in that order, and so is what a
body is called with or carries from step to step, since its fake values are contiguous. So the order of most values is
known here, once; the others (arguments of the user, collectives, results of bodies) are looked at when they are read.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx

from functitan.compiler import nodes
from functitan.runtime.pieces import Piece, renames


class OuterGraph:
    """Builds the graph, item by item.

    Args:
        known: the inputs that come in the order of their fake values.
        carried: how many leading results become inputs of the next call.

    Attributes:
        graph: what there is so far.
    """

    def __init__(self, known: Iterable[fx.Node], carried: int = 0) -> None:
        self.graph = fx.Graph()
        self._made: dict[fx.Node, fx.Node] = {}
        self._known = set(known)
        self._carried = carried

    def add_piece(self, piece: Piece, code: Callable[..., Any]) -> None:
        """Append a call of a compiled piece."""
        operands = tuple(self._ordered(n, n.meta["val"].stride()) for n in piece.inputs)
        call = self.graph.call_function(code, operands)
        for i, node in enumerate(piece.outs):
            self._made[node] = self.graph.call_function(operator.getitem, (call, i))
        self._known.update(piece.outs)

    def add(self, node: fx.Node) -> None:
        """Append what stays between pieces."""
        if renames(node):
            (source,) = node.all_input_nodes
            self._made[node] = self._made[source]
            if source in self._known:
                self._known.add(node)
            return
        contiguous: set[fx.Node] = set()
        if node.op == "output":
            contiguous.update(nodes.args(node)[0][: self._carried])
        elif "body" in node.meta and node.target is not operator.getitem:
            groups = [a for a in nodes.args(node) if isinstance(a, list | tuple)]
            # What forward saved reaches backward as it is.
            contiguous.update(*(groups if len(groups) == 1 else (groups[0], groups[2])))
        ready = {n: self._contiguous(n) for n in contiguous}
        self._made[node] = self.graph.node_copy(node, lambda n: ready.get(n, self._made[n]))

    def _contiguous(self, node: fx.Node) -> fx.Node:
        return self._ordered(node, torch.empty(node.meta["val"].shape, device="meta").stride())

    def _ordered(self, node: fx.Node, stride: tuple[int, ...]) -> fx.Node:
        """A value in a memory order, looked at when the graph runs unless it is known to be in it."""
        if node in self._known and node.meta["val"].stride() == stride:
            return self._made[node]
        return self.graph.call_function(strided, (self._made[node], stride))


def strided(x: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """A tensor in a memory order: itself, or a copy."""
    if x.stride() == stride or x.numel() <= 1:
        return x
    return torch.empty_strided(x.shape, stride, dtype=x.dtype, device=x.device).copy_(x)
