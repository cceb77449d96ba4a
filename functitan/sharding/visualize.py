"""Drawings of who holds what: boxes for the parts of an array, with the ranks that hold them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import overload

from spmd_types.types import PartitionSpec

from functitan.errors import ArgumentError
from functitan.sharding.array import Array
from functitan.sharding.layout import Layout
from functitan.sharding.logical import Entry, layout_of
from functitan.sharding.mesh import Mesh

#: At most so many rows of boxes; the middle ones are left out.
_ROWS = 8


@overload
def visualize(x: Array, *, width: int = ...) -> None: ...
@overload
def visualize(x: Sequence[int], spec: PartitionSpec | Sequence[Entry], mesh: Mesh, *, width: int = ...) -> None: ...
def visualize(
    x: Array | Sequence[int],
    spec: PartitionSpec | Sequence[Entry] | None = None,
    mesh: Mesh | None = None,
    *,
    width: int = 80,
) -> None:
    """Print which ranks hold which part of an array.

    Args:
        x: an Array, or a shape with a spec and a mesh.
        spec, mesh: how a shape is laid out; not for an Array, which knows.
        width: the columns to draw in; what does not fit is left out in the middle.

    Raises:
        ArgumentError: a shape without spec and mesh, or an Array with one.

    >>> from functitan.sharding.mesh import abstract_mesh
    >>> visualize((8, 4), PartitionSpec("fsdp", "tensor"), abstract_mesh({"fsdp": 2, "tensor": 2}))
    [8, 4] as (fsdp, tensor) on fsdp=2, tensor=2; each rank holds [4, 2]
           0:2   2:4  dim 1
         ┌─────┬─────┐
     0:4 │  0  │  1  │
         ├─────┼─────┤
     4:8 │  2  │  3  │
         └─────┴─────┘
    dim 0
    """
    print(drawing(x, spec, mesh, width=width))


def drawing(
    x: Array | Sequence[int],
    spec: PartitionSpec | Sequence[Entry] | None = None,
    mesh: Mesh | None = None,
    *,
    width: int = 80,
) -> str:
    """What :func:`visualize` prints.

    >>> from functitan.sharding.mesh import abstract_mesh
    >>> print(drawing((6,), ["data"], abstract_mesh({"data": 3, "tensor": 2})))
    [6] as (data,) on data=3, tensor=2; each rank holds [2]
      0:2    2:4    4:6  dim 0
    ┌──────┬──────┬──────┐
    │ 0, 1 │ 2, 3 │ 4, 5 │
    └──────┴──────┴──────┘
    """
    if isinstance(x, Array):
        if spec is not None or mesh is not None:
            raise ArgumentError("visualize of an Array takes no spec and no mesh: it has its own. Leave them out.")
        shape, layout, mesh = tuple(x.shape), x.layout, x.mesh
    else:
        if spec is None or mesh is None:
            raise ArgumentError(
                f"visualize was given {x!r} without a spec and a mesh; write ft.visualize((8, 4), "
                "ft.P('data', None), mesh), or give it an Array."
            )
        shape = tuple(x)
        layout = layout_of(shape, spec, mesh, "visualize")
    axes = ", ".join(f"{a}={n}" for a, n in mesh.axes) or "one device"
    head = f"{list(shape)} as {layout} on {axes}; each rank holds {list(layout.local_shape)}"
    split = [i for i, dim in enumerate(layout.dims) if any(isinstance(d, str) for d in dim)]
    holders = _holders(layout, split, mesh)
    if len(split) > 2 or not layout.is_spec:
        return "\n".join([head, *_listed(shape, layout, split, holders)])
    return "\n".join([head, *_grid(shape, layout, split, holders, width)])


def _holders(layout: Layout, split: list[int], mesh: Mesh) -> dict[tuple[int, ...], list[int]]:
    """The ranks of every part, by the part's index in the dims that are split."""
    sizes = mesh.shape
    found: dict[tuple[int, ...], list[int]] = {}
    for rank, at in enumerate(mesh.coordinates()):
        index = []
        for i in split:
            part = 0
            for axis in (d for d in layout.dims[i] if isinstance(d, str)):
                part = part * sizes[axis] + at[axis]
            index.append(part)
        found.setdefault(tuple(index), []).append(rank)
    return found


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks in a row; an even progression by its ends.

    >>> [ranks_text(r) for r in ([3], [0, 4], [0, 1, 2, 3], [0, 2, 4, 6], [0, 1, 4, 5])]
    ['3', '0, 4', '0-3', '0-6 by 2', '0, 1, 4, 5']
    """
    steps = {b - a for a, b in itertools.pairwise(ranks)}
    if len(ranks) < 3 or (len(steps) > 1 and len(ranks) <= 4):
        return ", ".join(map(str, ranks))
    if len(steps) > 1:
        return f"{ranks[0]}, {ranks[1]}, ... {ranks[-1]}"
    step = steps.pop()
    return f"{ranks[0]}-{ranks[-1]}" + (f" by {step}" if step != 1 else "")


def _range(size: int, parts: int, part: int) -> str:
    own = size // parts
    return f"{part * own}:{(part + 1) * own}"


def _parts(layout: Layout, shape: Sequence[int], dim: int) -> int:
    return shape[dim] // max(math.prod(d for d in layout.dims[dim] if isinstance(d, int)), 1)


def _grid(
    shape: Sequence[int],
    layout: Layout,
    split: list[int],
    holders: dict[tuple[int, ...], list[int]],
    width: int,
) -> list[str]:
    """Boxes: the first split dim downwards and the second across; a single one across."""
    down = split[0] if len(split) == 2 else None
    across = split[-1] if split else None
    n_rows = _parts(layout, shape, down) if down is not None else 1
    n_cols = _parts(layout, shape, across) if across is not None else 1
    row_names = [_range(shape[down], n_rows, i) for i in range(n_rows)] if down is not None else [""]
    col_names = [_range(shape[across], n_cols, i) for i in range(n_cols)] if across is not None else [""]

    def label(i: int, j: int) -> str:
        key = tuple(part for dim, part in ((down, i), (across, j)) if dim is not None)
        return ranks_text(holders[key])

    cell = max([*(len(label(i, j)) for i in range(n_rows) for j in range(n_cols)), *map(len, col_names), 1]) + 2
    margin = max(map(len, row_names)) + 2 if down is not None else 0
    cols = _some(n_cols, max((width - margin - 1) // (cell + 1), 3))
    rows = _some(n_rows, _ROWS)
    pad = " " * margin

    def line(left: str, middle: str, right: str) -> str:
        return pad + left + middle.join("─" * cell for _ in cols) + right

    lines = []
    if across is not None:
        names = " ".join(("..." if j is None else col_names[j]).center(cell) for j in cols)
        lines.append(f"{pad} {names.rstrip()}  dim {across}")
    lines.append(line("┌", "┬", "┐"))
    for at, i in enumerate(rows):
        if at:
            lines.append(line("├", "┼", "┤"))
        name = "..." if i is None else row_names[i]
        texts = ["..." if i is None or j is None else label(i, j) for j in cols]
        side = f"{name:>{margin - 1}} " if down is not None else ""
        lines.append(side + "│" + "│".join(t.center(cell) for t in texts) + "│")
    lines.append(line("└", "┴", "┘"))
    if down is not None:
        lines.append(f"dim {down}")
    return lines


def _some(count: int, limit: int) -> list[int | None]:
    """At most ``limit`` of ``count`` places, None where the middle is left out."""
    if count <= limit:
        return list(range(count))
    head = (limit - 1) // 2
    return [*range(limit - 1 - head), None, *range(count - head, count)]


def _listed(
    shape: Sequence[int], layout: Layout, split: list[int], holders: dict[tuple[int, ...], list[int]]
) -> list[str]:
    """One line per part, where boxes would need more than two dims."""
    keys = sorted(holders)
    lines = []
    for at in _some(len(keys), 2 * _ROWS):
        if at is None:
            lines.append("  ...")
            continue
        names = dict(zip(split, keys[at], strict=True))
        if layout.is_spec:
            place = ", ".join(
                _range(shape[i], _parts(layout, shape, i), names[i]) if i in names else ":" for i in range(len(shape))
            )
        else:
            place = ", ".join(f"part {names[i]}" if i in names else ":" for i in range(len(shape)))
        lines.append(f"  [{place}]  rank {ranks_text(holders[keys[at]])}")
    return lines
