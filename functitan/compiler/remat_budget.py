"""What forward saves under a memory budget: a minimal cut of the joint graph, bytes saved against work repeated.

A forward value that backward needs is either saved, at the cost of its bytes, or computed again, at the cost of its
operations and of what it needs in turn. For a price per operation, the cheapest choice is a minimal cut of a flow graph
(Chen et al., arXiv:1604.06174, weigh memory against recomputation; the cut is that of torch's min-cut partitioner):
every value is an edge from "in" to "out" whose capacity are its bytes, an edge from the source to "in" is the price of
its computation, and what backward computes is the sink. With a rising price more is saved and less repeated, so the
choices for all prices are a chain. Between two neighbours of it, ops are forbidden to repeat one after the other, most
work per byte first: again a chain. The budget takes the last choice that fits.

torch's own partitioner is not used: its memory budget falls back between settings of heuristics, so that a larger
budget need not save more, it forbids to repeat every op that it does not know, and it takes whole modules with names
of its own for their inputs. Sizes here are those of one rank, products count by the formulas of the cost report.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import networkx as nx
import torch
from torch import fx

from functitan.columns import human_bytes, human_count
from functitan.compiler.flops import flops, is_pointwise

#: What its output is so many times smaller than what it reads is a reduction: cheap to save, never cheap to repeat.
_REDUCTION = 4


@dataclass(frozen=True)
class Choice:
    """What forward saves.

    Attributes:
        saved: the computed values, and carried inputs.
        nbytes: their bytes on one rank, for one call of the body.
        again: what backward computes again.
        repeated: operations of it.
    """

    saved: frozenset[fx.Node]
    nbytes: int
    again: frozenset[fx.Node]
    repeated: int


@dataclass(frozen=True)
class Problem:
    """A joint graph to be cut.

    Attributes:
        order: its nodes.
        early: those of the forward pass.
        late: those that only backward computes.
        roots: what backward gives.
        carried: inputs that cost their bytes when they are saved; other inputs are there anyway.
        may_save: which computed values can be saved at all.
        gathers: which nodes gather parameters, and so are repeated for nothing.
    """

    order: Sequence[fx.Node]
    early: Collection[fx.Node]
    late: Collection[fx.Node]
    roots: Collection[fx.Node]
    carried: Collection[fx.Node]
    may_save: Callable[[fx.Node], bool]
    gathers: Callable[[fx.Node], bool]

    def cost(self, node: fx.Node) -> int | None:
        """Operations to compute a node again; None if that is not allowed: an input, or a collective of values."""
        if node.op == "placeholder":
            return None
        if self.gathers(node) or node.target is operator.getitem or not node.all_input_nodes:
            return 0
        if "collective" in node.meta:
            return None
        products = flops(node)
        if products:
            return products
        read = sum(_elements(n) for n in node.all_input_nodes)
        if is_pointwise(node) or read < _REDUCTION * _elements(node):
            return 0  # fused into what reads it
        return read


def within(problem: Problem, fraction: float | None, nbytes: int | None) -> tuple[Choice, int]:
    """The choice that saves most within a budget, and the budget in bytes.

    Args:
        problem: what is cut.
        fraction: of the way from the carried inputs alone (0) to what is saved when no product or reduction is
            repeated (1).
        nbytes: the budget itself, for one call of the body on one rank.

    Returns:
        The choice; over the budget when even the least is, as collectives of values are not repeated.
    """
    most = _solve(problem, None)
    total = sum(problem.cost(n) or 0 for n in problem.order)
    least = _solve(problem, Fraction(1, 1 + total))  # bytes first, then operations
    base = sum(map(_nbytes, problem.carried))
    budget = nbytes if nbytes is not None else base + int((fraction or 0.0) * max(most.nbytes - base, 0))
    if most.nbytes <= budget:
        return most, budget
    low, high = least, most
    if low.nbytes > budget or low.repeated <= high.repeated:
        return low, budget
    while True:
        price = Fraction(high.nbytes - low.nbytes, low.repeated - high.repeated)
        between = _solve(problem, price)
        if between.nbytes + price * between.repeated >= low.nbytes + price * low.repeated:
            # A little less, so that of the two the lower one is the cheapest; prices of other pairs differ by more.
            return _between(problem, low, high, price - Fraction(1, 2 * (1 + total) ** 2), budget), budget
        if between.nbytes <= budget:
            low = between
        else:
            high = between


def _between(problem: Problem, low: Choice, high: Choice, price: Fraction, budget: int) -> Choice:
    """The last choice that fits of a chain between two, at a price at which they cost the same but for a trifle.

    What is repeated shrinks with what is forbidden (cuts of growing capacities are nested), and no choice costs less
    than the one before, so that bytes grow.
    """
    where = {n: i for i, n in enumerate(problem.order)}
    worth = lambda n: (-(problem.cost(n) or 0) / max(_nbytes(n), 1), where[n])  # noqa: E731
    forbidden = sorted((n for n in low.again - high.again if problem.cost(n)), key=worth)
    best, fits, too_many = low, 0, len(forbidden)
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        found = _solve(problem, price, forbidden[:middle])
        if found.nbytes <= budget:
            best, fits = found, middle
        else:
            too_many = middle
    return best


def said_of(choice: Choice, budget: int) -> str:
    """A choice in words."""
    over = "" if choice.nbytes <= budget else "; no less without repeating collectives"
    return (
        f"saves {human_bytes(choice.nbytes)} of a budget of {human_bytes(budget)}{over}, repeats "
        f"{human_count(choice.repeated)} operations"
    )


def _solve(problem: Problem, price: Fraction | None, forbidden: Collection[fx.Node] = ()) -> Choice:
    """The cheapest choice at a price in bytes per operation; None for one that nothing pays.

    Args:
        problem: what is cut.
        price: bytes for an operation.
        forbidden: what is not repeated at any price.
    """
    scale = 1 if price is None else price.denominator
    graph = nx.DiGraph()
    graph.add_nodes_from(("source", "sink"))
    forward = [n for n in problem.order if n in problem.early or n.op == "placeholder"]
    for node in forward:
        cost = problem.cost(node)
        if cost is None or (cost and price is None) or node in forbidden:
            graph.add_edge("source", (node, "in"))  # no capacity: endless
        elif cost and price is not None:
            graph.add_edge("source", (node, "in"), capacity=cost * price.numerator)
        if node.op == "placeholder" and node not in problem.carried:
            graph.add_edge((node, "in"), (node, "out"), capacity=0)
        elif node.op == "placeholder" or problem.may_save(node):
            graph.add_edge((node, "in"), (node, "out"), capacity=_nbytes(node) * scale)
        else:
            graph.add_edge((node, "in"), (node, "out"))
        if node in problem.roots:
            graph.add_edge((node, "out"), "sink")
        for user in node.users:
            if user in problem.late:
                graph.add_edge((node, "out"), "sink")
            elif user in problem.early:
                graph.add_edge((node, "out"), (user, "in"))
    _, (kept, _) = nx.minimum_cut(graph, "source", "sink")
    saved = [n for n in forward if (n, "in") in kept and (n, "out") not in kept]
    counted = frozenset(n for n in saved if n.op != "placeholder" or n in problem.carried)
    again = frozenset(n for n in forward if (n, "in") not in kept)
    return Choice(counted, sum(map(_nbytes, counted)), again, sum(problem.cost(n) or 0 for n in again))


def _elements(node: fx.Node) -> int:
    val: Any = node.meta.get("val")
    values = val if isinstance(val, list | tuple) else [val]
    return sum(v.numel() for v in values if isinstance(v, torch.Tensor))


def _nbytes(node: fx.Node) -> int:
    val: Any = node.meta.get("val")
    return val.numel() * val.dtype.itemsize if isinstance(val, torch.Tensor) else 0
