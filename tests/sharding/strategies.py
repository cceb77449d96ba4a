"""Random meshes, specs and layouts for property tests."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import strategies as st

import functitan as ft
from functitan.sharding.layout import Dim, Layout, canonical

NAMES = ("x", "y", "z")
Draw = Callable[[st.SearchStrategy[Any]], Any]


@st.composite
def meshes(draw: Draw, ranks: int = 8) -> ft.Mesh:
    """One to three axes of sizes 1 to 4, and at most so many ranks."""
    axes: dict[str, int] = {}
    for name in NAMES[: draw(st.integers(1, 3))]:
        room = ranks // math.prod(axes.values())
        axes[name] = draw(st.integers(1, min(4, room)))
    return ft.make_mesh(axes, simulate=True)


@st.composite
def specs(draw: Draw, shape: Sequence[int], mesh: ft.Mesh) -> ft.P:
    """A spec that fits a shape: each axis splits one dim that it divides, or none."""
    dims: list[list[str]] = [[] for _ in shape]
    local = list(shape)
    for axis, n in draw(st.permutations(list(mesh.axes))):
        fits = [d for d, size in enumerate(local) if size % n == 0]
        where = draw(st.sampled_from([None, *fits]))
        if where is not None:
            dims[where].append(axis)
            local[where] //= n
    return ft.P(*(tuple(d) if d else None for d in dims))


def _primes(n: int) -> list[int]:
    found, p = [], 2
    while n > 1:
        while n % p == 0:
            found.append(p)
            n //= p
        p += 1
    return found


@st.composite
def layouts(draw: Draw, shape: Sequence[int], sizes: dict[str, int], pending: bool = True) -> Layout:
    """Any layout of a shape that every product of axes divides: joined dims and pending sums too."""
    places: list[list[str]] = [[] for _ in shape]
    waiting: list[str] = []
    for axis in draw(st.permutations(list(sizes))):
        where = draw(st.integers(-2 if pending else -1, len(shape) - 1))
        if where >= 0:
            places[where].append(axis)
        elif where == -2:
            waiting.append(axis)
    dims: list[Dim] = []
    for size, axes in zip(shape, places, strict=True):
        runs = [1] * (len(axes) + 1)
        for p in _primes(size // math.prod(sizes[a] for a in axes)):
            runs[draw(st.integers(0, len(axes)))] *= p
        row: list[str | int] = [runs[0]]
        for axis, run in zip(axes, runs[1:], strict=True):
            row += [axis, run]
        dims.append(canonical(row))
    return Layout(tuple(dims), tuple(a for a in sizes if a in waiting))
