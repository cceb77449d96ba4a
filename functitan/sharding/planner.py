"""Choosing owners: even loads on all ranks, and stages in which no rank waits for another.

**Owners** are found longest processing time first (Graham 1969, *Bounds on Multiprocessing Timing Anomalies*), by
operations, then bytes, then path. Leaves may differ in the ranks that can own their matrices: an expert's are shared by
the ranks that hold it, others by all. So ranks are divided in levels, from all of them to single ones. At each level a
group starts with the work that cannot leave it, matrices with a choice go to the groups with least, and what a group
has got is dealt within it, longest first again.

**Stages** are how much moves at a time. A rank starts on a stage when those it exchanges parts with have begun the one
before and have results of the one before that, so no rank waits if each has more to do, up to the end of a stage, than
any of the others had up to the end of the one before. A stage ends as soon as that holds and its bytes are used up.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from functitan.sharding.ownership import Bucket, Leaf, Plan, Run, coordinates_of, number

#: Coordinates on the axes of the work, in mesh order; -1 for what is not decided.
Place = tuple[int, ...]
#: Operations, then bytes.
Load = tuple[int, int]
Owners = dict[int, list[int]]


def plan(leaves: Sequence[Leaf], sizes: Mapping[str, int], *, itemsize: int, bucket_bytes: int) -> Plan:
    """Give every matrix its owner.

    Args:
        leaves: in any order.
        sizes: the axes that the work is spread over, in mesh order.
        itemsize: bytes of an element on the wire.
        bucket_bytes: about what a rank sends in the exchanges of a stage, and no less than keeps all ranks at work.

    >>> split = [Leaf("up", 3, (4, 6), ("fsdp",), (), (), 2560), Leaf("q", 1, (4, 4), ("fsdp",), (), (), 1920)]
    >>> found = plan(split, {"fsdp": 2}, itemsize=2, bucket_bytes=1 << 20)
    >>> [b.owners for b in found.buckets], found.loads, found.received("in")
    ([((0, 1, 0, 1),)], (5120, 4480), [48, 40])
    """
    live = {a: n for a, n in sizes.items() if n > 1}
    ordered = tuple(sorted(leaves, key=lambda leaf: leaf.path))
    kinds = _kinds(ordered, live)
    moving = [i for i, kind in enumerate(kinds) if kind.axes]
    moving.sort(key=lambda i: (-ordered[i].flops, -math.prod(ordered[i].shape), ordered[i].path))
    here = tuple(i for i, kind in enumerate(kinds) if not kind.axes)
    work = _Work(ordered, kinds, live, itemsize)
    owners = work.owners(moving)
    loads = [sum(ordered[i].flops * ordered[i].count for i in here)] * math.prod(live.values())
    for i in moving:
        for r in owners[i]:
            loads[r] += ordered[i].flops
    buckets = tuple(work.stages(moving, owners, bucket_bytes))
    return Plan(tuple(live.items()), ordered, buckets, here, tuple(loads), itemsize)


@dataclass(frozen=True, eq=False)
class _Kind:
    """What leaves that lie alike on the mesh have in common; there is one of each kind.

    Attributes:
        copies, split, apart: as of a :class:`Bucket`.
        groups: the ranks of each group, in their order there.
        numbers: of every rank its number in its group.
        pieces: in how many parts a matrix is.
    """

    copies: tuple[str, ...]
    split: tuple[str, ...]
    apart: tuple[str, ...]
    groups: tuple[tuple[int, ...], ...]
    numbers: tuple[int, ...]
    pieces: int

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes of a group: any of its ranks may own its matrices."""
        return (*self.copies, *self.split)

    @staticmethod
    def of(copies: tuple[str, ...], split: tuple[str, ...], sizes: Mapping[str, int]) -> _Kind:
        apart = tuple(a for a in sizes if a not in copies + split)
        everywhere = list(coordinates_of(tuple(sizes.items())))
        numbers = [number(at, copies + split, sizes) for at in everywhere]
        groups: dict[int, dict[int, int]] = {}
        for rank, (at, own) in enumerate(zip(everywhere, numbers, strict=True)):
            groups.setdefault(number(at, apart, sizes), {})[own] = rank
        rows = [tuple(ranks[own] for own in sorted(ranks)) for _, ranks in sorted(groups.items())]
        return _Kind(copies, split, apart, tuple(rows), tuple(numbers), math.prod(sizes[a] for a in split))


def _kinds(leaves: Sequence[Leaf], sizes: Mapping[str, int]) -> list[_Kind]:
    """Of each leaf."""
    found: dict[Any, _Kind] = {}
    made: dict[Any, _Kind] = {}
    for leaf in leaves:
        if (lies := (leaf.copies, leaf.rows, leaf.cols)) not in found:
            copies, split = (tuple(a for a in sizes if a in axes) for axes in (leaf.copies, leaf.rows + leaf.cols))
            if (copies, split) not in made:
                made[copies, split] = _Kind.of(copies, split, sizes)
            found[lies] = made[copies, split]
    return [found[leaf.copies, leaf.rows, leaf.cols] for leaf in leaves]


@dataclass(frozen=True)
class _Work:
    """The leaves of a plan, with the kind of each."""

    leaves: Sequence[Leaf]
    kinds: Sequence[_Kind]
    sizes: Mapping[str, int]
    itemsize: int

    def owners(self, order: Sequence[int]) -> Owners:
        """Per leaf the ranks that own its matrices: matrix by matrix, for each of them group by group."""
        axes = tuple(self.sizes)
        start = {
            kind: [
                tuple(at.get(a, -1) for a in axes) for at in coordinates_of([(a, self.sizes[a]) for a in kind.apart])
            ]
            for kind in {self.kinds[i] for i in order}
        }
        found = {i: start[self.kinds[i]] * self.leaves[i].count for i in order}
        outer = axes
        for inner in _levels({kind.axes for kind in start}, self.sizes):
            groups = _Groups({a: n for a, n in self.sizes.items() if a not in inner}, axes)
            free = {kind: any(a in outer and a not in inner for a in kind.axes) for kind in start}
            for i in sorted(order, key=lambda i: free[self.kinds[i]]):  # what cannot leave its group first
                flops, nbytes = self.leaves[i].flops, math.prod(self.leaves[i].shape) * self.itemsize
                found[i] = [groups.add(at, flops, nbytes) for at in found[i]]
            outer = inner
        rank = {at: r for r, at in enumerate(itertools.product(*map(range, self.sizes.values())))}
        return {i: [rank[at] for at in rows] for i, rows in found.items()}

    def stages(self, order: Sequence[int], owners: Owners, bucket_bytes: int) -> Iterator[Bucket]:
        """The matrices in the order in which owners were found, in stages; each has a bucket for every kind in it."""
        loads = [0] * math.prod(self.sizes.values())
        before = list(loads)
        stage, room = 0, bucket_bytes
        runs: dict[int, list[int]] = {}  # first and past the last matrix, by leaf
        kinds: set[_Kind] = set()
        for i in order:
            leaf, kind = self.leaves[i], self.kinds[i]
            each = math.prod(leaf.shape) // kind.pieces * self.itemsize
            kinds.add(kind)
            for k in range(leaf.count):
                if runs and room < each and _at_work(kinds, loads, before):
                    yield from self._buckets([Run(j, *ends) for j, ends in runs.items()], stage, owners)
                    stage, room, runs, kinds, before = stage + 1, bucket_bytes, {}, {kind}, list(loads)
                runs.setdefault(i, [k, k])[1] += 1
                room -= each
                for r in owners[i][k * len(kind.groups) : (k + 1) * len(kind.groups)]:
                    loads[r] += leaf.flops
        if runs:
            yield from self._buckets([Run(j, *ends) for j, ends in runs.items()], stage, owners)

    def _buckets(self, runs: Iterable[Run], stage: int, owners: Owners) -> Iterator[Bucket]:
        """A stage as a bucket per kind."""
        by_kind: dict[_Kind, list[Run]] = {}
        for run in runs:
            by_kind.setdefault(self.kinds[run.leaf], []).append(run)
        for kind, mine in by_kind.items():
            chosen: list[list[int]] = [[] for _ in kind.groups]
            elements = [[0] * len(ranks) for ranks in kind.groups]
            flops = [[0] * len(ranks) for ranks in kind.groups]
            for run in mine:
                leaf, n = self.leaves[run.leaf], len(kind.groups)
                piece = math.prod(leaf.shape) // kind.pieces
                for m, rank in enumerate(owners[run.leaf][run.start * n : run.stop * n]):
                    g, own = m % n, kind.numbers[rank]
                    chosen[g].append(own)
                    elements[g][own] += piece
                    flops[g][own] += leaf.flops
            by_group = [tuple(map(tuple, rows)) for rows in (chosen, elements, flops)]
            yield Bucket(stage, kind.apart, kind.copies, kind.split, tuple(mine), *by_group)


def _at_work(kinds: Iterable[_Kind], loads: Sequence[int], before: Sequence[int]) -> bool:
    """Whether in each group of these kinds the least load is above the highest that was there a stage before."""
    groups = (ranks for kind in kinds for ranks in kind.groups)
    return all(min(loads[r] for r in ranks) > max(before[r] for r in ranks) for ranks in groups)


def _levels(kinds: Iterable[tuple[str, ...]], sizes: Mapping[str, int]) -> Iterator[tuple[str, ...]]:
    """The axes of the groups that all ranks are divided into, then of those within them, down to single ranks.

    >>> list(_levels([("a", "b"), ("b",)], {"a": 2, "b": 2}))
    [('b',), ()]
    """
    inner = tuple(sizes)
    while inner:
        smaller = {tuple(a for a in inner if a in kind) for kind in kinds} - {inner}
        inner = max(smaller, key=lambda axes: (math.prod(sizes[a] for a in axes), axes), default=())
        yield inner


class _Groups:
    """The groups of a level, by coordinates, and their loads."""

    def __init__(self, sizes: Mapping[str, int], axes: Sequence[str]) -> None:
        self._sizes = tuple(sizes.values())
        self._mine = [axes.index(a) for a in sizes]
        self._whole = len(sizes) == len(axes)
        self._loads: dict[Place, Load] = dict.fromkeys(itertools.product(*map(range, self._sizes)), (0, 0))
        self._heaps: dict[Place, list[tuple[Load, Place]]] = {}

    def add(self, at: Place, flops: int, nbytes: int) -> Place:
        """Put a matrix into the group with least operations, then bytes, of those that it can be in.

        Args:
            at: what is known of its owner.
            flops, nbytes: its operations and bytes.

        Returns:
            What is known now.
        """
        group = at if self._whole else tuple([at[p] for p in self._mine])
        if -1 in group:
            heap = self._heap(group)
            # By way of another heap a group may have got more since; loads only rise.
            while heap[0][0] != self._loads[heap[0][1]]:
                heapq.heapreplace(heap, (self._loads[heap[0][1]], heap[0][1]))
            group = heap[0][1]
            at = group if self._whole else self._known(at, group)
        load = self._loads[group]
        self._loads[group] = (load[0] + flops, load[1] + nbytes)
        return at

    def _known(self, at: Place, group: Place) -> Place:
        found = list(at)
        for p, c in zip(self._mine, group, strict=True):
            found[p] = c
        return tuple(found)

    def _heap(self, known: Place) -> list[tuple[Load, Place]]:
        heap = self._heaps.get(known)
        if heap is None:
            where = [(k,) if k >= 0 else range(n) for n, k in zip(self._sizes, known, strict=True)]
            heap = self._heaps[known] = [(self._loads[group], group) for group in itertools.product(*where)]
            heapq.heapify(heap)
        return heap
