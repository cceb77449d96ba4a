"""Reshard plans by value: from any layout to any other, joined dims and pending sums included; and their bytes."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import functitan as ft
from functitan import _torch
from functitan.compiler import reshard
from functitan.compiler.emit import Emitter
from functitan.runtime.lockstep import Lockstep
from functitan.sharding.array import assemble, local_part
from functitan.sharding.layout import Layout, replicated, without
from functitan.sharding.op_rules.base import TensorType
from tests.sharding.strategies import layouts

SIZES = {"x": 2, "y": 3, "z": 2}
MESH = ft.make_mesh(SIZES, simulate=True)
SHAPE = (24, 12)


def parts_of(x: torch.Tensor, layout: Layout) -> list[torch.Tensor]:
    """Every rank's part; over pending axes addends that differ and sum up to the value."""
    parts = []
    for c in MESH.coordinates():
        share = math.prod((c[a] + 1) / sum(range(1, SIZES[a] + 1)) for a in layout.pending)
        parts.append(local_part(x, Layout(layout.dims), c, MESH) * share)
    return parts


def value_of(parts: list[torch.Tensor], layout: Layout) -> torch.Tensor:
    """The global value; pending axes are summed, others must hold the same."""
    places = list(MESH.coordinates())
    total = None
    for at in {tuple(c[a] for a in layout.pending) for c in places}:
        mine = []
        for c in places:
            twin = {**c, **dict(zip(layout.pending, at, strict=True))}
            mine.append(parts[places.index(twin)])
        whole = assemble(mine, Layout(layout.dims), MESH)
        total = whole if total is None else total + whole
    assert total is not None
    for p, q in zip(parts, parts_of(total, Layout(layout.dims)), strict=True):
        if not layout.pending:
            torch.testing.assert_close(p, q)
    return total


def moved(x: torch.Tensor, src: Layout, dst: Layout) -> tuple[list[torch.Tensor], tuple[reshard.Move, ...]]:
    emitter = Emitter(SIZES, _torch.FakeTensorMode())
    node = emitter.placeholder("x", TensorType(SHAPE, x.dtype), src)
    moves = reshard.plan(src, dst, SIZES, x.dtype.itemsize)
    for move in moves:
        node = emitter.move(node, move)
    emitter.graph.output([node])
    outs = Lockstep(MESH, {}).graph("test", emitter.graph, [parts_of(x, src)])
    return outs[0], moves


@settings(derandomize=True, deadline=None, max_examples=120)
@given(st.data())
def test_any_layout_to_any_other(data):
    src = data.draw(layouts(SHAPE, SIZES))
    dst = data.draw(layouts(SHAPE, SIZES))
    x = torch.arange(24.0 * 12, dtype=torch.float64).reshape(SHAPE)
    parts, moves = moved(x, src, dst)
    assert all(p.shape == dst.local_shape for p in parts)
    torch.testing.assert_close(value_of(parts, dst), x)
    # Never dearer than all sums, then all gathers, then slices.
    whole = without(src.settled(), src.axes, SIZES)
    settle = reshard.plan(src, src.settled(), SIZES, 8)
    gather = reshard.plan(src.settled(), whole, SIZES, 8)
    assert reshard.cost(moves) <= reshard.cost(settle) + reshard.cost(gather)


@pytest.mark.parametrize(
    ("src", "dst", "kinds", "nbytes"),
    [
        # n = 2: a gather sends its part once; a scatter the half of the whole, an all-reduce twice that.
        (Layout((("x", 12), (12,))), replicated(SHAPE), ["all_gather"], 12 * 12 * 8),
        (replicated(SHAPE), Layout((("x", 12), (12,))), ["slice"], 0),
        (Layout(((24,), (12,)), ("x",)), replicated(SHAPE), ["all_reduce"], 24 * 12 * 8),
        (Layout(((24,), (12,)), ("x",)), Layout((("x", 12), (12,))), ["reduce_scatter"], 12 * 12 * 8),
        (Layout((("x", 12), (12,))), Layout(((24,), ("x", 6))), ["all_to_all"], 12 * 12 * 8 // 2),
        (replicated(SHAPE), Layout(((24,), (12,)), ("x",)), ["mask"], 0),
        # Two axes of one dim, of one sum: one collective over both.
        (Layout((("x", "y", 4), (12,))), replicated(SHAPE), ["all_gather"], 20 * 12 * 8),
        (Layout(((24,), (12,)), ("x", "y")), replicated(SHAPE), ["all_reduce"], 2 * 24 * 12 * 8 * 5 // 6),
        # The slice comes first, and makes the sum smaller.
        (Layout(((24,), (12,)), ("x",)), Layout((("y", 8), (12,))), ["slice", "all_reduce"], 8 * 12 * 8),
    ],
)
def test_moves_and_bytes(src, dst, kinds, nbytes):
    moves = reshard.plan(src, dst, SIZES, 8)
    assert [m.kind for m in moves] == kinds
    assert reshard.cost(moves) == nbytes
