"""Which rank orthogonalises which matrix: a static plan, the same on every rank, and what it says of loads and bytes.

A matrix whose parts several ranks hold gets an *owner* among them; :mod:`functitan.sharding.planner` chooses it. A plan
depends on global shapes, layouts and the mesh alone, and is no part of any state: a run may go on under another one.

Ranks of a group are numbered by the axes that hold copies of a part, then by those that split a matrix. The other axes
of the work tell groups apart, each with matrices and owners of its own, such as the groups of ranks that hold one of
several experts.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any


@dataclass(frozen=True)
class Leaf:
    """The matrices of one leaf as a group of ranks holds them.

    Attributes:
        path: of the leaf.
        count: how many matrices the group holds: the whole leaf's, or what axes on leading dims left of it.
        shape: rows and columns of a whole matrix.
        rows, cols: the axes that split them, major to minor.
        copies: axes of the work along which all ranks hold the same part.
        flops: operations per matrix.
    """

    path: str
    count: int
    shape: tuple[int, int]
    rows: tuple[str, ...]
    cols: tuple[str, ...]
    copies: tuple[str, ...]
    flops: int

    def among(self, axes: Sequence[str]) -> tuple[str, ...]:
        """The axes of a group's ranks, any of which may own a matrix: of ``axes``, in their order."""
        mine = {*self.copies, *self.rows, *self.cols}
        return tuple(a for a in axes if a in mine)


@dataclass(frozen=True)
class Run:
    """Matrices ``start`` to ``stop`` of a leaf."""

    leaf: int
    start: int
    stop: int


@dataclass(frozen=True)
class Bucket:
    """Matrices that are exchanged together.

    Attributes:
        stage: buckets of one stage are on their way at the same time, one for each kind of group.
        apart: the axes that tell groups apart, in mesh order.
        copies, split: the axes of a group, in mesh order.
        runs: the matrices that every group has in the bucket.
        owners: per group the owner of each matrix, in the order of the runs; ranks of the group.
        elements: per group and rank of the group, the elements of a rank's part of all matrices that it owns. A rank
            sends ``elements[g][r]`` to the owner r, and gets as many from r when the work is done.
        flops: per group and rank of the group, operations.
    """

    stage: int
    apart: tuple[str, ...]
    copies: tuple[str, ...]
    split: tuple[str, ...]
    runs: tuple[Run, ...]
    owners: tuple[tuple[int, ...], ...]
    elements: tuple[tuple[int, ...], ...]
    flops: tuple[tuple[int, ...], ...]

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes of a group."""
        return (*self.copies, *self.split)

    @property
    def ranks(self) -> int:
        """How many ranks a group has."""
        return len(self.elements[0])

    @property
    def sent(self) -> int:
        """The elements of a rank's parts of all matrices of its group."""
        return sum(self.elements[0])


@dataclass(frozen=True)
class Plan:
    """Who works on what.

    Attributes:
        sizes: the axes that the work is spread over, with their sizes, in mesh order.
        leaves: by path.
        buckets: in the order in which they are exchanged, stage by stage.
        here: the leaves that move nowhere: a rank holds their matrices whole and no other does.
        loads: operations per rank over all axes of the work.
        itemsize: bytes of an element on the wire.
    """

    sizes: tuple[tuple[str, int], ...]
    leaves: tuple[Leaf, ...]
    buckets: tuple[Bucket, ...]
    here: tuple[int, ...]
    loads: tuple[int, ...]
    itemsize: int

    @property
    def ranks(self) -> int:
        """How many ranks share the work."""
        return math.prod(n for _, n in self.sizes)

    @property
    def heaviest(self) -> int:
        """The first rank with the highest load."""
        return self.loads.index(max(self.loads))

    @property
    def balance(self) -> float:
        """The highest load over the mean."""
        return max(self.loads) * self.ranks / max(sum(self.loads), 1)

    @cached_property
    def bound(self) -> float:
        """What ``balance`` cannot be below, however matrices are placed.

        Take the n equal groups of ranks into which some axes divide a larger group (single ranks included), each with
        the same work W that cannot leave it, and the matrices of the larger group, of costs c sorted down. One of the
        n has the most costly, and by the pigeonhole principle one has two of the n + 1 most costly. So the ranks of
        one have at least (W + max(c_1, c_n + c_(n+1))) / size on the mean, as all ranks have the mean of everything.
        """
        sizes = dict(self.sizes)
        costs: dict[tuple[str, ...], list[int]] = {}
        for leaf in self.leaves:
            costs.setdefault(leaf.among(tuple(sizes)), []).extend([leaf.flops] * leaf.count)
        ways = lambda axes: math.prod(sizes[a] for a in axes)  # noqa: E731
        work = {axes: sum(found) for axes, found in costs.items()}
        least = 0.0
        for axes in {(), *costs, tuple(sizes)}:
            inside = sum(w * ways(axes) // ways(other) for other, w in work.items() if set(other) <= set(axes))
            more = 0
            for other, found in costs.items():
                if set(axes) < set(other):
                    n = ways(other) // ways(axes)
                    first = sorted(found, reverse=True)[: n + 1]
                    more = max(more, first[0], sum(first[n - 1 :]) if len(first) > n else 0)
            least = max(least, (inside + more) / ways(axes))
        return least * self.ranks / max(sum(self.loads), 1)

    @cached_property
    def hash(self) -> str:
        """A short name of the plan: equal plans have equal ones."""
        said = [self.sizes, self.itemsize, self.here, self.loads]
        said += [[leaf.path, leaf.count, leaf.shape, leaf.rows, leaf.cols, leaf.copies] for leaf in self.leaves]
        said += [[b.stage, [(r.leaf, r.start, r.stop) for r in b.runs], b.owners] for b in self.buckets]
        return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:16]

    def stages(self) -> list[list[int]]:
        """The numbers of the buckets of each stage."""
        numbers = range(len(self.buckets))
        return [list(rows) for _, rows in itertools.groupby(numbers, lambda j: self.buckets[j].stage)]

    def places(self, bucket: Bucket) -> list[tuple[int, int]]:
        """Of every rank in mesh order: its group, and its number there."""
        sizes = dict(self.sizes)
        return [(number(at, bucket.apart, sizes), number(at, bucket.axes, sizes)) for at in coordinates_of(self.sizes)]

    def received(self, way: str) -> list[int]:
        """Bytes that each rank gets from others in all exchanges, "in" or "out"."""
        sizes, totals = dict(self.sizes), [0] * self.ranks
        for b in self.buckets:
            pieces = math.prod(sizes[a] for a in b.split)
            for rank, (group, own) in enumerate(self.places(b)):
                mine = b.elements[group][own]
                totals[rank] += mine * (pieces - 1) if way == "in" else b.sent - mine
        return [total * self.itemsize for total in totals]

    def matrices(self) -> list[int]:
        """How many matrices each rank works on."""
        totals = [sum(self.leaves[i].count for i in self.here)] * self.ranks
        for b in self.buckets:
            counts = [[0] * b.ranks for _ in b.owners]
            for row, owners in zip(counts, b.owners, strict=True):
                for r in owners:
                    row[r] += 1
            for rank, (group, own) in enumerate(self.places(b)):
                totals[rank] += counts[group][own]
        return totals

    def to_json(self) -> dict[str, Any]:
        """In a form that JSON can hold; lists are by rank."""
        return {
            "hash": self.hash,
            "axes": dict(self.sizes),
            "leaves": [leaf.path for leaf in self.leaves],
            "buckets": len(self.buckets),
            "matrices": self.matrices(),
            "flops": list(self.loads),
            "balance": self.balance,
            "bound": self.bound,
            "received_in": self.received("in"),
            "received_out": self.received("out"),
        }


def coordinates_of(sizes: Sequence[tuple[str, int]]) -> Iterator[dict[str, int]]:
    """The coordinates of every rank, in mesh order."""
    for values in itertools.product(*(range(n) for _, n in sizes)):
        yield dict(zip((a for a, _ in sizes), values, strict=True))


def number(coordinates: Mapping[str, int], axes: Sequence[str], sizes: Mapping[str, int]) -> int:
    """A rank's number among those that differ along ``axes``.

    >>> number({"a": 1, "b": 2}, ("a", "b"), {"a": 2, "b": 3})
    5
    """
    found = 0
    for a in axes:
        found = found * sizes[a] + coordinates[a]
    return found
