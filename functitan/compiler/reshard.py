"""Resharding: the cheapest explicit moves from one layout to another.

Every axis makes at most one move. Which order is cheapest (slices first, gathers last, a reduce-scatter before an
all-reduce) is found by trying all of them; there are few axes. Neighbouring moves of one kind become one collective
over several axes.

Bytes are what a rank sends in the bandwidth-optimal algorithm over n ranks: (n-1)/n of the large side for gathers and
scatters, of the local value for all-to-all, and twice that for all-reduce.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from functitan.sharding.layout import Layout, Unsplittable, stride_of, with_axis, without

Sizes = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Move:
    """One step of a reshard.

    Attributes:
        kind: "slice", "mask", "all_gather", "reduce_scatter", "all_reduce" or "all_to_all".
        axes: the mesh axes, major to minor; one collective over all of them.
        before, after: layouts.
        dim: the dim that is gathered, scattered or sliced; for all_to_all the dim that is split.
        source: for all_to_all the dim that is joined.
        nbytes: bytes that a rank sends.
    """

    kind: str
    axes: tuple[str, ...]
    before: Layout
    after: Layout
    dim: int
    source: int
    nbytes: int


def plan(src: Layout, dst: Layout, sizes: dict[str, int], itemsize: int) -> tuple[Move, ...]:
    """The moves from ``src`` to ``dst``, with the fewest bytes; fewest peak elements, then collectives, break ties."""
    return _plan(src, Layout(dst.dims, dst.pending), tuple(sizes.items()), itemsize)


def cost(moves: tuple[Move, ...]) -> int:
    """The bytes that a rank sends for these moves."""
    return sum(m.nbytes for m in moves)


@functools.lru_cache(maxsize=65536)
def _plan(src: Layout, dst: Layout, sizes: Sizes, itemsize: int) -> tuple[Move, ...]:
    table = dict(sizes)
    start = Layout(src.dims, src.pending)
    if start == dst:
        return ()
    steps = [s for axis in table for s in _steps(start, dst, axis, table)]
    best: tuple[tuple[int, int, int], tuple[Move, ...]] | None = None
    for order in itertools.permutations(steps):
        moves = _follow(start, order, table, itemsize)
        if moves is None or moves[-1].after != dst:
            continue
        peak = max(math.prod(m.after.local_shape) for m in moves)
        score = (cost(moves), peak, len(moves))
        if best is None or score < best[0]:
            best = (score, moves)
    if best is None:  # no order fits (axes that cross): whole in between
        whole = without(start.settled(), start.axes, table)
        return _plan(src, whole, sizes, itemsize) + _plan(whole, dst, sizes, itemsize)
    return best[1]


Step = tuple[str, str, int, int]  # kind, axis, dim, stride


def _steps(src: Layout, dst: Layout, axis: str, sizes: dict[str, int]) -> Iterator[Step]:
    """The moves that an axis needs."""
    was, will = stride_of(src, axis, sizes), stride_of(dst, axis, sizes)
    if axis in src.pending:
        if will is not None:
            yield ("reduce_scatter", axis, *will)
        elif axis not in dst.pending:
            yield ("all_reduce", axis, 0, 0)
    elif axis in dst.pending:
        if was is not None:
            yield ("all_gather", axis, *was)
        yield ("mask", axis, 0, 0)
    elif was is not None and will is None:
        yield ("all_gather", axis, *was)
    elif was is None and will is not None:
        yield ("slice", axis, *will)
    elif was is not None and will is not None and was != will:
        if was[0] != will[0]:
            yield ("all_to_all", axis, *will)
        else:
            yield ("all_gather", axis, *was)
            yield ("slice", axis, *will)


def _follow(layout: Layout, order: tuple[Step, ...], sizes: dict[str, int], itemsize: int) -> tuple[Move, ...] | None:
    """The moves in this order, neighbours joined, or None where one does not fit."""
    moves: list[Move] = []
    for kind, axis, dim, stride in order:
        before, source = layout, -1
        try:
            if kind == "all_gather":
                if axis not in layout.axes:
                    return None
                layout = without(layout, [axis], sizes)
            elif kind == "all_reduce":
                layout = replace(layout, pending=tuple(a for a in layout.pending if a != axis))
            elif kind == "mask":
                if axis in layout.axes:
                    return None
                layout = replace(layout, pending=tuple(a for a in sizes if a in (*layout.pending, axis)))
            elif kind == "reduce_scatter":
                layout = replace(layout, pending=tuple(a for a in layout.pending if a != axis))
                layout = with_axis(layout, axis, dim, stride, sizes)
            elif kind == "slice":
                if axis in layout.axes:
                    return None
                layout = with_axis(layout, axis, dim, stride, sizes)
            else:
                at = stride_of(layout, axis, sizes)
                assert at is not None
                source = at[0]
                layout = with_axis(without(layout, [axis], sizes), axis, dim, stride, sizes)
        except Unsplittable:
            return None
        moves.append(_move(kind, (axis,), before, layout, dim, source, sizes, itemsize))
        while len(moves) > 1 and (joined := _join(moves[-2], moves[-1], sizes, itemsize)):
            moves[-2:] = [joined]
    return tuple(moves)


def _move(
    kind: str,
    axes: tuple[str, ...],
    before: Layout,
    after: Layout,
    dim: int,
    source: int,
    sizes: dict[str, int],
    itemsize: int,
) -> Move:
    n = math.prod(sizes[a] for a in axes)
    elements = {
        "all_gather": math.prod(after.local_shape) * (n - 1) // n,
        "reduce_scatter": math.prod(before.local_shape) * (n - 1) // n,
        "all_reduce": 2 * math.prod(before.local_shape) * (n - 1) / n,
        "all_to_all": math.prod(before.local_shape) * (n - 1) // n,
    }.get(kind, 0)
    return Move(kind, axes, before, after, dim, source, math.ceil(elements * itemsize))


def _join(a: Move, b: Move, sizes: dict[str, int], itemsize: int) -> Move | None:
    """Two neighbouring moves as one collective over the axes of both, or None."""
    if a.kind != b.kind or a.kind in ("all_to_all", "mask"):
        return None
    if a.kind == "all_reduce":
        axes = tuple(x for x in sizes if x in a.axes + b.axes)
        return _move(a.kind, axes, a.before, b.after, 0, -1, sizes, itemsize)
    if a.dim != b.dim:
        return None
    digits = (a.before if a.kind == "all_gather" else b.after).dims[a.dim]
    both = [d for d in digits if d in a.axes + b.axes]
    at = digits.index(both[0])
    if list(digits[at : at + len(both)]) != both:
        return None
    return _move(a.kind, tuple(str(d) for d in both), a.before, b.after, a.dim, -1, sizes, itemsize)
