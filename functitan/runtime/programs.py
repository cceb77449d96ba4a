"""Run one graph per rank, in lockstep at collectives: for programs that differ between ranks.

:class:`functitan.runtime.lockstep.Lockstep` runs one graph for all ranks, so its collectives match by construction.
Here each rank runs its own graph to its next collective and waits. A group whose ranks all wait there is joined once
they agree on operation, shape and dtype; otherwise, or when no group is complete, that is an error at once, where real
processes would hang or mix up their data.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from functitan.compiler import nodes
from functitan.errors import ArgumentError
from functitan.runtime.collectives import COLLECTIVES, CollectiveMismatch, Groups, join
from functitan.sharding.mesh import Mesh

_WAIT = torch.ops._c10d_functional.wait_tensor.default


@dataclass(frozen=True)
class Request:
    """The collective at which a rank waits.

    Attributes:
        node: in the rank's graph.
        operand: what it gives.
        args: the other arguments; the last is the group's name.
        number: how many collectives the rank ran before.
    """

    node: fx.Node
    operand: torch.Tensor
    args: tuple[Any, ...]
    number: int

    @property
    def group(self) -> str:
        return str(self.args[-1])

    @property
    def call(self) -> str:
        """The operation with its arguments, for comparison and messages."""
        name = str(self.node.target).removeprefix("_c10d_functional.").removesuffix(".default")
        options = ", ".join(map(str, self.args[:-1]))
        return f"{name}({options})" if options else name

    def __str__(self) -> str:
        dtype = str(self.operand.dtype).removeprefix("torch.")
        return f'{self.call} over "{self.group}" of {dtype}{list(self.operand.shape)} (node {self.node.name})'


Rank = Generator[Request, torch.Tensor, list[Any]]


def run_programs(graphs: Sequence[fx.Graph], inputs: Sequence[Sequence[torch.Tensor]], mesh: Mesh) -> list[list[Any]]:
    """Run one graph per rank of a simulated mesh.

    Args:
        graphs: per rank, in rank order; collectives are torch's functional ones, with axis names as groups.
        inputs: per rank the inputs of its graph, without rank coordinates.
        mesh: the simulated mesh.

    Returns:
        The outputs of every rank.

    Raises:
        CollectiveMismatch: ranks of a group do not call the same collectives in the same order, with operands of one
            shape and dtype; the message names the rank and what differs.
        ArgumentError: not one graph and one row of inputs per rank.
    """
    if not len(graphs) == len(inputs) == mesh.size:
        raise ArgumentError(
            f"run_programs was given {len(graphs)} graphs and {len(inputs)} rows of inputs for the {mesh.size} ranks "
            "of "
            f"{mesh}; give one of each per rank."
        )
    groups = Groups(mesh)
    places = mesh.coordinates()
    ranks = [_rank(g, row, c) for g, row, c in zip(graphs, inputs, places, strict=True)]
    results: dict[int, list[Any]] = {}
    waiting: dict[int, Request] = {}
    for r in range(mesh.size):
        _advance(r, ranks[r], None, waiting, results)
    while waiting:
        ready = _complete_group(waiting, groups)
        if ready is None:
            raise CollectiveMismatch(_stuck(waiting, results, groups))
        requests = [waiting.pop(r) for r in ready]
        _check(ready, requests)
        joined = join(requests[0].node.target, [q.operand for q in requests], requests[0].args)
        for r, value in zip(ready, joined, strict=True):
            _advance(r, ranks[r], value, waiting, results)
    return [results[r] for r in range(mesh.size)]


def _rank(graph: fx.Graph, inputs: Sequence[torch.Tensor], coordinates: dict[str, int]) -> Rank:
    """One rank's interpreter: stops at each collective, goes on with its result."""
    env: dict[fx.Node, Any] = {}
    given = iter(inputs)
    number = 0
    for node in graph.nodes:
        args, kwargs = nodes.mapped(node, env.__getitem__)
        if node.op == "placeholder":
            axis = node.meta.get("coordinate")
            env[node] = torch.tensor(coordinates[axis]) if axis else next(given)
        elif node.op == "output":
            return list(args[0])
        elif node.target in COLLECTIVES:
            env[node] = yield Request(node, args[0], tuple(args[1:]), number)
            number += 1
        else:
            env[node] = args[0] if node.target is _WAIT else node.target(*args, **kwargs)
    raise ArgumentError("a graph of run_programs has no output.")


def _advance(
    r: int, rank: Rank, value: torch.Tensor | None, waiting: dict[int, Request], results: dict[int, list[Any]]
) -> None:
    """Run a rank to its next collective, or to its end."""
    try:
        waiting[r] = next(rank) if value is None else rank.send(value)
    except StopIteration as end:
        results[r] = end.value


def _complete_group(waiting: dict[int, Request], groups: Groups) -> list[int] | None:
    """The ranks of a group that all wait for it, or None."""
    for r, request in waiting.items():
        members = next(g for g in groups.of(request.group) if r in g)
        if all(m in waiting and waiting[m].group == request.group for m in members):
            return members
    return None


def _check(ranks: Sequence[int], requests: Sequence[Request]) -> None:
    first = requests[0]
    for r, other in zip(ranks, requests, strict=True):
        differs = [
            what
            for what, a, b in (
                ("the operation", first.call, other.call),
                ("the shape", first.operand.shape, other.operand.shape),
                ("the dtype", first.operand.dtype, other.operand.dtype),
            )
            if a != b
        ]
        if differs:
            raise CollectiveMismatch(
                f"ranks {ranks[0]} and {r} differ in {' and '.join(differs)} of a collective:\n"
                f"    rank {ranks[0]}, collective {first.number}: {first}\n"
                f"    rank {r}, collective {other.number}: {other}\n"
                "All ranks of a group call the same collectives in the same order, with one shape and dtype."
            )


def _stuck(waiting: dict[int, Request], results: dict[int, list[Any]], groups: Groups) -> str:
    """No group is complete: who waits for whom."""
    rows = []
    for r in sorted({*waiting, *results}):
        if r in results:
            rows.append(f"    rank {r}: has finished")
            continue
        members = next(g for g in groups.of(waiting[r].group) if r in g)
        others = ", ".join(map(str, members))
        rows.append(f"    rank {r}, collective {waiting[r].number}: {waiting[r]}, with ranks {others}")
    return (
        "no collective can go on, because ranks wait for different ones:\n"
        + "\n".join(rows)
        + "\nAll ranks of a group call the same collectives in the same order."
    )
