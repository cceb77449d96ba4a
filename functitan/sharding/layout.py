"""Layouts: how a value lies over the mesh.

Each tensor dim is a row of *digits*, major to minor, like a number in mixed radix: a mesh axis name is a digit that
the rank's coordinate supplies, an integer is a run of that many local indices. A plain spec is axes first, then one
local run. For ``data=2, tensor=4``::

    a dim of 64 split over data                    ("data", 32)
    the join of (8 split over data) and
                (16 split over tensor)             ("data", 4, "tensor", 4)

The second cannot be said as a spec, and needs no communication: the digits are regrouped, the values stay. So views
are exact on digits, and every op that treats a dim as one index set carries them along. Where an axis sits in a dim
is given by its *stride*: the product of the digits after it.

A layout also names the axes over which the value is a pending sum, and those axes that only store it (they are
gathered where the value is used for compute).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from spmd_types.types import PartitionSpec

from functitan.errors import ShardingError

Digit = str | int
Dim = tuple[Digit, ...]
Sizes = Mapping[str, int]


class Unsplittable(Exception):
    """A dim cannot be cut where a view cuts it: a mesh axis lies across the cut. ``axis`` says which."""

    def __init__(self, axis: str) -> None:
        super().__init__(axis)
        self.axis = axis


@dataclass(frozen=True)
class Layout:
    """The layout of one value.

    Attributes:
        dims: the digits of each dim, canonical (see :func:`canonical`).
        pending: axes over which the ranks hold addends, in mesh order.
        storage: sharding axes that are storage only: gathered before compute reads the value.
        active: True inside a differentiated function, where reading the value gathers its storage axes.
        unreduced: of a parameter in use, axes over which its gradient may stay a pending sum.
    """

    dims: tuple[Dim, ...]
    pending: tuple[str, ...] = ()
    storage: frozenset[str] = frozenset()
    active: bool = False
    unreduced: frozenset[str] = frozenset()

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that shard some dim, in dim order."""
        return tuple(d for dim in self.dims for d in dim if isinstance(d, str))

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of a rank's part."""
        return tuple(math.prod(d for d in dim if isinstance(d, int)) for dim in self.dims)

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        """The global shape."""
        return tuple(dim_size(dim, sizes) for dim in self.dims)

    @property
    def is_spec(self) -> bool:
        """Whether every dim is axes first, then one local run: what a PartitionSpec can say."""
        return all(isinstance(d, str) for dim in self.dims for d in dim[:-1])

    @property
    def spec(self) -> PartitionSpec:
        """The PartitionSpec. Only for layouts with ``is_spec``."""
        entries: list[str | tuple[str, ...] | None] = []
        for dim in self.dims:
            names = tuple(d for d in dim if isinstance(d, str))
            entries.append(None if not names else names[0] if len(names) == 1 else names)
        return PartitionSpec(*entries)

    def settled(self) -> Layout:
        """The same dims without pending sums."""
        return replace(self, pending=())

    def dual(self) -> Layout:
        """The layout of a gradient: same dims, pending sums settled (replicated), storage stays sharded."""
        return Layout(self.dims)

    def where(self) -> dict[str, tuple[int, int]]:
        """For every sharding axis the dim it splits and its position in that dim, for messages."""
        return {d: (i, j) for i, dim in enumerate(self.dims) for j, d in enumerate(dim) if isinstance(d, str)}

    def __str__(self) -> str:
        text = "(" + ", ".join(dim_text(dim) for dim in self.dims) + ("," if len(self.dims) == 1 else "") + ")"
        if self.pending:
            text += " pending " + "+".join(self.pending)
        return text


def dim_text(dim: Dim) -> str:
    """A dim as users write it: ``None``, an axis, or for a composite all digits."""
    names = [d for d in dim if isinstance(d, str)]
    if not names:
        return "None"
    if all(isinstance(d, str) for d in dim[:-1]):
        return names[0] if len(names) == 1 else "(" + ", ".join(names) + ")"
    return "[" + " ".join(str(d) for d in dim) + "]"


def digit_size(digit: Digit, sizes: Sizes) -> int:
    """How many values a digit takes."""
    return digit if isinstance(digit, int) else sizes[digit]


def dim_size(dim: Dim, sizes: Sizes) -> int:
    """The global size of a dim."""
    return math.prod(digit_size(d, sizes) for d in dim)


def canonical(digits: Iterable[Digit]) -> Dim:
    """Merge neighbouring local runs and drop runs of one.

    >>> canonical(["data", 2, 8, 1])
    ('data', 16)
    """
    out: list[Digit] = []
    for d in digits:
        if d == 1:
            continue
        if isinstance(d, int) and out and isinstance(out[-1], int):
            out[-1] = out[-1] * d
        else:
            out.append(d)
    return tuple(out)


def replicated(shape: Sequence[int]) -> Layout:
    """The layout of a value that every rank holds whole."""
    return Layout(tuple(canonical([int(s)]) for s in shape))


def split(dim: Dim, into: Sequence[int], sizes: Sizes) -> tuple[Dim, ...]:
    """Cut a dim into dims of the given sizes, major to minor.

    Raises:
        Unsplittable: a mesh axis lies across a cut.

    >>> split(("data", 8), (4, 4), {"data": 2})
    (('data', 2), (4,))
    """
    if any(s == 0 for s in into):
        return tuple(canonical([s]) for s in into)
    rest = list(dim)
    out: list[Dim] = []
    for size in reversed(into):  # from the minor end, so that leading axes stay on the leading part
        got: list[Digit] = []
        need = size
        while need > 1:
            digit = rest.pop()
            n = digit_size(digit, sizes)
            if need % n == 0:
                got.append(digit)
                need //= n
            elif isinstance(digit, int) and n % need == 0:
                got.append(need)
                rest.append(n // need)
                need = 1
            else:
                axes = [d for d in [digit, *reversed(rest)] if isinstance(d, str)]
                raise Unsplittable(axes[0] if axes else str(digit))
        out.append(canonical(reversed(got)))
    return tuple(reversed(out))


def without(layout: Layout, axes: Iterable[str], sizes: Sizes) -> Layout:
    """The layout after gathering those axes: their digits become local."""
    gone = set(axes)
    dims = tuple(canonical(sizes[d] if isinstance(d, str) and d in gone else d for d in dim) for dim in layout.dims)
    return replace(layout, dims=dims, storage=layout.storage - gone)


def stride_of(layout: Layout, axis: str, sizes: Sizes) -> tuple[int, int] | None:
    """The dim that an axis shards and its stride there (the product of the digits after it), or None."""
    for i, dim in enumerate(layout.dims):
        if axis in dim:
            return i, math.prod(digit_size(d, sizes) for d in dim[dim.index(axis) + 1 :])
    return None


def by_slices(have: Layout, want: Layout, sizes: Sizes) -> bool:
    """Whether slices alone, which are free, lead from a settled layout to another.

    >>> split_both, sizes = Layout((("data", 2), ("tensor", 4))), {"data": 2, "tensor": 2}
    >>> by_slices(Layout((("data", 2), (8,))), split_both, sizes), by_slices(Layout(((4,), ("data", 4))), split_both, sizes)
    (True, False)
    """
    return all(stride_of(have, a, sizes) == stride_of(want, a, sizes) for a in have.axes)


def with_axis(layout: Layout, axis: str, dim: int, stride: int, sizes: Sizes) -> Layout:
    """The layout with one more axis on a dim, cutting the local run at that stride.

    Raises:
        Unsplittable: no local run has room for the axis at that stride.
    """
    n = sizes[axis]
    outer, inner = split(layout.dims[dim], (dim_size(layout.dims[dim], sizes) // stride, stride), sizes)
    head, own = split(outer, (dim_size(outer, sizes) // n, n), sizes)
    if own != canonical([n]):
        raise Unsplittable(axis)
    dims = list(layout.dims)
    dims[dim] = canonical([*head, axis, *inner])
    return replace(layout, dims=tuple(dims))


def from_spec(
    shape: Sequence[int],
    entries: Sequence[str | tuple[str, ...] | None],
    sizes: Sizes,
    *,
    what: str,
    pending: Sequence[str] = (),
) -> Layout:
    """The layout that a spec gives to a global shape; axes of size 1 vanish.

    Args:
        shape: the global shape.
        entries: per dim None, an axis, or a tuple of axes (major to minor).
        sizes: axis sizes of the mesh.
        what: how messages name the value.
        pending: axes over which the value is a pending sum.

    Raises:
        ShardingError: another number of entries than dims, an axis used twice, or a dim that does not divide.
    """
    if len(entries) != len(shape):
        raise ShardingError(
            f"{what}: the spec {spec_text(entries)} has {len(entries)} entries, the value has "
            f"{len(shape)} dims {tuple(shape)}. Write one entry per dim, None for a whole one."
        )
    used: dict[str, int] = {}
    dims: list[Dim] = []
    for i, entry in enumerate(entries):
        names = (entry,) if isinstance(entry, str) else tuple(entry or ())
        for name in names:
            if name in used or names.count(name) > 1:
                free = [n for n in sizes if n not in used and n not in names]
                twice = f"for dim {used[name]} and dim {i}" if name in used else f"twice for dim {i}"
                raise ShardingError(
                    f'{what}: the spec {spec_text(entries)} uses mesh axis "{name}" {twice}; an axis can split one dim, '
                    f"once. Keep one of them" + (f" (free axes: {', '.join(free)})." if free else ".")
                )
            if name in pending:
                raise ShardingError(
                    f'{what}: "{name}" cannot both split dim {i} and be pending; leave it out of one of the two.'
                )
        used.update(dict.fromkeys(names, i))
        live = [n for n in names if sizes[n] > 1]
        ways = math.prod(sizes[n] for n in live)
        if shape[i] % ways:
            raise ShardingError(indivisible(what, i, shape[i], live, sizes))
        dims.append(canonical([*live, shape[i] // ways]))
    order = list(sizes)
    live_pending = sorted({p for p in pending if sizes[p] > 1}, key=order.index)
    return Layout(tuple(dims), tuple(live_pending))


def spec_text(entries: Sequence[str | tuple[str, ...] | None]) -> str:
    """A spec as users write it.

    >>> spec_text(["data", None, ("fsdp", "tensor")])
    "P('data', None, ('fsdp', 'tensor'))"
    """
    short = [e[0] if isinstance(e, tuple) and len(e) == 1 else e or None for e in entries]
    return f"P({', '.join(map(repr, short))})"


def indivisible(what: str, dim: int, size: int, axes: Sequence[str], sizes: Sizes) -> str:
    """The message for a dim that its axes do not divide, with what would fit."""
    ways = math.prod(sizes[a] for a in axes)
    product = " * ".join(f"{a}={sizes[a]}" for a in axes)
    fits = [a for a in axes if size % sizes[a] == 0] if len(axes) > 1 else []
    alone = f" Alone would fit: {', '.join(fits)}." if fits else ""
    return (
        f"{what}: dim {dim} has size {size}, which does not divide by {product}"
        + (f" = {ways}" if len(axes) > 1 else "")
        + f".{alone} Use a size such as {math.ceil(size / ways) * ways}, or give the dim fewer axes."
    )
