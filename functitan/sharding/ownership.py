"""Which rank orthogonalises which matrix: a static plan, the same on every rank.

A matrix whose parts several ranks hold gets an *owner* among them: longest processing time first (Graham 1969, *Bounds
on Multiprocessing Timing Anomalies*), by operations, then bytes, then path. The plan depends on global shapes, layouts
and the mesh alone, and is no part of any state: a run may go on under another one.

Ranks of a group are numbered by the axes that hold copies of a part, then by those that split a matrix.
"""

from __future__ import annotations

import hashlib
import heapq
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
        copies, split: the axes of the group, in mesh order.
        runs: its matrices.
        owners: the owner of each matrix, in the order of the runs; ranks of the group.
        elements: per rank of the group, the elements of its part of all matrices that the rank owns. A rank sends
            ``elements[r]`` to the owner r, and gets as many from r when the work is done.
        flops: operations per rank of the group.
    """

    copies: tuple[str, ...]
    split: tuple[str, ...]
    runs: tuple[Run, ...]
    owners: tuple[int, ...]
    elements: tuple[int, ...]
    flops: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """Who works on what.

    Attributes:
        sizes: the axes that the work is spread over, with their sizes, in mesh order.
        leaves: by path.
        buckets: in the order in which they are exchanged.
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

        With costs c sorted down, a rank has at least the mean, at least one of the most costly, and by the pigeonhole
        principle one has two of the R + 1 most costly: max(F / R, c_1, c_R + c_(R+1)).
        """
        everywhere = sum(self.leaves[i].flops * self.leaves[i].count for i in self.here)
        least = sum(self.loads) / max(self.ranks, 1)
        for (copies, split), members in self._groups().items():
            ranks = math.prod(dict(self.sizes)[a] for a in (*copies, *split))
            costs = sorted((c for i in members for c in [self.leaves[i].flops] * self.leaves[i].count), reverse=True)
            pair = costs[ranks - 1] + costs[ranks] if len(costs) > ranks else 0
            least = max(least, everywhere + costs[0], everywhere + pair)
        return least * self.ranks / max(sum(self.loads), 1)

    @cached_property
    def hash(self) -> str:
        """A short name of the plan: equal plans have equal ones."""
        said = [self.sizes, self.itemsize, self.here, self.loads]
        said += [[leaf.path, leaf.count, leaf.shape, leaf.rows, leaf.cols, leaf.copies] for leaf in self.leaves]
        said += [[[(r.leaf, r.start, r.stop) for r in b.runs], b.owners] for b in self.buckets]
        return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:16]

    def rank(self, coordinates: Mapping[str, int], axes: Sequence[str]) -> int:
        """A rank's number in its group over ``axes``."""
        number = 0
        for a in axes:
            number = number * dict(self.sizes)[a] + coordinates[a]
        return number

    def received(self, way: str) -> list[int]:
        """Bytes that each rank gets from others in all exchanges, "in" or "out"."""
        sizes = dict(self.sizes)
        totals = []
        for coordinates in _places(self.sizes):
            total = 0
            for b in self.buckets:
                own = b.elements[self.rank(coordinates, (*b.copies, *b.split))]
                pieces = math.prod(sizes[a] for a in b.split)
                total += own * (pieces - 1) if way == "in" else sum(b.elements) - own
            totals.append(total * self.itemsize)
        return totals

    def matrices(self) -> list[int]:
        """How many matrices each rank works on."""
        rest = sum(self.leaves[i].count for i in self.here)
        counted = []
        for b in self.buckets:
            counts = [0] * len(b.elements)
            for r in b.owners:
                counts[r] += 1
            counted.append(counts)
        return [
            rest + sum(c[self.rank(at, (*b.copies, *b.split))] for b, c in zip(self.buckets, counted, strict=True))
            for at in _places(self.sizes)
        ]

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

    def _groups(self) -> dict[tuple[tuple[str, ...], tuple[str, ...]], list[int]]:
        return _groups(self.leaves, dict(self.sizes))


def plan(leaves: Sequence[Leaf], sizes: Mapping[str, int], *, itemsize: int, bucket_bytes: int) -> Plan:
    """Give every matrix its owner.

    Args:
        leaves: in any order.
        sizes: the axes that the work is spread over, in mesh order.
        itemsize: bytes of an element on the wire.
        bucket_bytes: about what a rank sends in one exchange, and no less than what gives each rank a matrix.

    >>> split = [Leaf("up", 3, (4, 6), ("fsdp",), (), (), 2560), Leaf("q", 1, (4, 4), ("fsdp",), (), (), 1920)]
    >>> found = plan(split, {"fsdp": 2}, itemsize=2, bucket_bytes=1 << 20)
    >>> [b.owners for b in found.buckets], found.loads, found.received("in")
    ([(0, 1, 0, 1)], (5120, 4480), [48, 40])
    """
    ordered = tuple(sorted(leaves, key=lambda leaf: leaf.path))
    live = {a: n for a, n in sizes.items() if n > 1}
    places = list(_places(tuple(live.items())))
    groups = _groups(ordered, live)
    inside = {i for members in groups.values() for i in members}
    here = tuple(i for i in range(len(ordered)) if i not in inside)
    loads = [sum(ordered[i].flops * ordered[i].count for i in here)] * len(places)
    held = [0] * len(places)
    buckets: list[Bucket] = []
    # Small groups first: their matrices have the fewest ranks to choose from.
    for (copies, split), members in sorted(groups.items(), key=lambda g: (_ways(g[0][0] + g[0][1], live), g[0])):
        axes = (*copies, *split)
        number = [_number(at, axes, live) for at in places]
        owners, flops, nbytes = _assign(ordered, members, number, _ways(axes, live), loads, held, itemsize)
        for r, g in enumerate(number):
            loads[r] += flops[g]
            held[r] += nbytes[g]
        pieces = _ways(split, live)
        buckets += _cut(ordered, members, owners, (copies, split), _ways(axes, live), pieces, itemsize, bucket_bytes)
    return Plan(tuple(live.items()), ordered, tuple(buckets), here, tuple(loads), itemsize)


def _assign(
    leaves: Sequence[Leaf],
    members: Sequence[int],
    number: Sequence[int],
    ranks: int,
    loads: Sequence[int],
    held: Sequence[int],
    itemsize: int,
) -> tuple[dict[int, list[int]], list[int], list[int]]:
    """Owners by leaf, and what they add to the loads and the bytes of each rank of the group."""
    base = [[0, 0] for _ in range(ranks)]
    for r, g in enumerate(number):
        base[g][0], base[g][1] = max(base[g][0], loads[r]), max(base[g][1], held[r])
    heap = [(flops, nbytes, g) for g, (flops, nbytes) in enumerate(base)]
    heapq.heapify(heap)
    owners = {i: [0] * leaves[i].count for i in members}
    added, moved = [0] * ranks, [0] * ranks
    for i in _by_cost(leaves, members):
        cost, nbytes = leaves[i].flops, math.prod(leaves[i].shape) * itemsize
        row = owners[i]
        for k in range(leaves[i].count):
            load, have, g = heap[0]
            heapq.heapreplace(heap, (load + cost, have + nbytes, g))
            row[k] = g
            added[g] += cost
            moved[g] += nbytes
    return owners, added, moved


def _cut(
    leaves: Sequence[Leaf],
    members: Sequence[int],
    owners: Mapping[int, Sequence[int]],
    group: tuple[tuple[str, ...], tuple[str, ...]],
    ranks: int,
    pieces: int,
    itemsize: int,
    bucket_bytes: int,
) -> Iterator[Bucket]:
    """The matrices of a group in buckets, in the order in which owners were found: a multiple of the ranks in each.

    That order deals matrices of like cost to all ranks in turn, so that no rank waits for another in a bucket.
    """
    runs: list[Run] = []
    room = bucket_bytes

    def made() -> Bucket:
        chosen = [g for run in runs for g in owners[run.leaf][run.start : run.stop]]
        elements, flops = [0] * ranks, [0] * ranks
        for run in runs:
            piece = math.prod(leaves[run.leaf].shape) // pieces
            for g in owners[run.leaf][run.start : run.stop]:
                elements[g] += piece
                flops[g] += leaves[run.leaf].flops
        return Bucket(*group, tuple(runs), tuple(chosen), tuple(elements), tuple(flops))

    count = 0
    for i in _by_cost(leaves, members):
        each = math.prod(leaves[i].shape) // pieces * itemsize
        start = 0
        while start < leaves[i].count:
            if count and count % ranks == 0 and room < each:
                yield made()
                runs, room, count = [], bucket_bytes, 0
            # As many as fit, then on to a matrix more for each rank.
            fit = max(room // each if each else leaves[i].count, 0) or ranks - count % ranks
            stop = min(start + fit, leaves[i].count)
            if runs and runs[-1].leaf == i:
                runs[-1] = Run(i, runs[-1].start, stop)
            else:
                runs.append(Run(i, start, stop))
            room, count, start = room - each * (stop - start), count + stop - start, stop
    if runs:
        yield made()


def _by_cost(leaves: Sequence[Leaf], members: Sequence[int]) -> list[int]:
    """Longest processing time first; then bytes, then path."""
    return sorted(members, key=lambda i: (-leaves[i].flops, -math.prod(leaves[i].shape), leaves[i].path))


def _groups(
    leaves: Sequence[Leaf], sizes: Mapping[str, int]
) -> dict[tuple[tuple[str, ...], tuple[str, ...]], list[int]]:
    """The leaves by the axes of their copies and of their splits, in mesh order; without those that move nowhere."""
    found: dict[tuple[tuple[str, ...], tuple[str, ...]], list[int]] = {}
    alike: dict[tuple[tuple[str, ...], ...], list[int]] = {}
    for i, leaf in enumerate(leaves):
        alike.setdefault((leaf.copies, leaf.rows, leaf.cols), []).append(i)
    for (copies, rows, cols), members in alike.items():
        key = (tuple(a for a in sizes if a in copies), tuple(a for a in sizes if a in rows + cols))
        if any(key):
            found[key] = sorted([*found.get(key, []), *members])
    return found


def _places(sizes: Sequence[tuple[str, int]]) -> Iterator[dict[str, int]]:
    for values in itertools.product(*(range(n) for _, n in sizes)):
        yield dict(zip((a for a, _ in sizes), values, strict=True))


def _number(coordinates: Mapping[str, int], axes: Sequence[str], sizes: Mapping[str, int]) -> int:
    number = 0
    for a in axes:
        number = number * sizes[a] + coordinates[a]
    return number


def _ways(axes: Sequence[str], sizes: Mapping[str, int]) -> int:
    return math.prod(sizes[a] for a in axes)
