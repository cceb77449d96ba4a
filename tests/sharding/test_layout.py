"""Layouts as mixed-radix digits: what is cut joins again, parts assemble, and views regroup digits as torch does."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import functitan as ft
from functitan.errors import ShardingError
from functitan.sharding.array import assemble, local_part
from functitan.sharding.layout import (
    Layout,
    Unsplittable,
    canonical,
    dim_size,
    from_spec,
    replicated,
    split,
    stride_of,
    with_axis,
    without,
)
from functitan.sharding.op_rules.view import regroup
from tests.sharding.strategies import layouts

SIZES = {"x": 2, "y": 2, "z": 3}
MESH = ft.make_mesh(SIZES, simulate=True)
BOUNDED = settings(derandomize=True, deadline=None, max_examples=60)


def test_canonical_merges_runs_and_drops_ones():
    assert canonical([1, "x", 2, 1, 3, "y", 1]) == ("x", 6, "y")
    assert canonical([1, 1]) == ()


def test_split_keeps_axes_on_the_leading_part():
    assert split(("x", 12), (4, 6), SIZES) == (("x", 2), (6,))
    assert split(("x", 2, "y", 3), (4, 6), SIZES) == (("x", 2), ("y", 3))
    with pytest.raises(Unsplittable) as e:
        split(("z", 4), (2, 6), SIZES)
    assert e.value.axis == "z"


@BOUNDED
@given(st.data())
def test_split_then_join_is_the_identity(data):
    layout = data.draw(layouts((48,), SIZES))
    (dim,) = layout.dims
    sizes = data.draw(st.sampled_from([(48,), (2, 24), (4, 12), (3, 16), (2, 2, 12), (1, 48), (6, 1, 8)]))
    try:
        parts = split(dim, sizes, SIZES)
    except Unsplittable as e:
        assert e.axis in dim
        return
    assert [dim_size(p, SIZES) for p in parts] == list(sizes)
    assert canonical(d for p in parts for d in p) == dim


@BOUNDED
@given(st.data())
def test_an_axis_goes_back_where_it_was(data):
    layout = data.draw(layouts((24, 12), SIZES))
    for axis in layout.axes:
        where = stride_of(layout, axis, SIZES)
        assert where is not None
        gathered = without(layout, [axis], SIZES)
        assert axis not in gathered.axes and gathered.shape(SIZES) == layout.shape(SIZES)
        assert with_axis(gathered, axis, *where, SIZES) == layout


@BOUNDED
@given(st.data())
def test_parts_assemble_to_the_whole(data):
    layout = data.draw(layouts((24, 12), SIZES, pending=False))
    x = torch.arange(24 * 12).reshape(24, 12)
    parts = [local_part(x, layout, c, MESH) for c in MESH.coordinates()]
    assert all(p.shape == layout.local_shape for p in parts)
    assert torch.equal(assemble(parts, layout, MESH), x)


@BOUNDED
@given(st.data())
def test_views_of_parts_are_parts_of_the_view(data):
    """Digits are regrouped, local values only reshaped, and the assembled result is torch's reshape."""
    layout = data.draw(layouts((24, 12), SIZES, pending=False))
    shapes = [(288,), (2, 12, 12), (24, 2, 6), (4, 6, 3, 4), (12, 24), (6, 48), (2, 144), (1, 24, 1, 12)]
    shape = data.draw(st.sampled_from(shapes))
    x = torch.arange(24 * 12).reshape(24, 12)
    try:
        dims = regroup(layout.dims, shape, SIZES)
    except Unsplittable as e:
        assert e.axis in layout.axes
        return
    after = Layout(dims)
    parts = [local_part(x, layout, c, MESH).reshape(after.local_shape) for c in MESH.coordinates()]
    assert torch.equal(assemble(parts, after, MESH), x.reshape(shape))


def test_specs_and_layouts():
    layout = from_spec((4, 12), [("x", "y"), None], SIZES, what="w")
    assert layout.is_spec and layout.spec == ft.P(("x", "y"), None) and layout.local_shape == (1, 12)
    assert not Layout(((2, "x", 3),)).is_spec
    assert str(Layout((("x", 4), (2, "y", 3)), ("z",))) == "(x, [2 y 3]) pending z"
    assert replicated((1, 4)) == Layout(((), (4,)))
    assert Layout((("x", 4),), ("y",), frozenset({"x"}), True).dual() == Layout((("x", 4),))


def test_indivisible_dim_names_what_would_fit():
    with pytest.raises(ShardingError) as e:
        from_spec((4, 10), [None, ("x", "z")], SIZES, what="params/w")
    assert str(e.value) == (
        "params/w: dim 1 has size 10, which does not divide by x=2 * z=3 = 6. Alone would fit: x. Use a size such as 12, "
        "or give the dim fewer axes."
    )


def test_axis_used_twice_names_both_dims():
    with pytest.raises(ShardingError) as e:
        from_spec((4, 4), ["x", "x"], SIZES, what="h")
    assert str(e.value) == (
        "h: the spec P('x', 'x') uses mesh axis \"x\" for dim 0 and dim 1; an axis can split one dim, once. Keep one of them "
        "(free axes: y, z)."
    )


def test_rank_mismatch():
    with pytest.raises(ShardingError) as e:
        from_spec((4, 4), ["x"], SIZES, what="h")
    assert str(e.value) == (
        "h: the spec P('x') has 1 entries, the value has 2 dims (4, 4). Write one entry per dim, None for a whole one."
    )
    assert math.prod(MESH.shape.values()) == 12
