"""constrain_like: back to a layout that the code does not know."""

import pytest
import torch

import functitan as ft
from functitan.errors import ShardingError


def _made(f):
    mesh = ft.make_mesh({"fsdp": 2, "tensor": 2}, simulate=True)
    like = torch.arange(48.0).reshape(4, 12)
    step = ft.compile(lambda x: {"out": f(x)}, mesh=mesh)
    spread = ft.device_put(like, ft.P("fsdp", "tensor"), mesh)
    return step(spread)["out"], f(like), step.lower(spread).collectives()


def test_a_moved_value_goes_back():
    out, expected, sent = _made(lambda x: ft.constrain_like(ft.constrain(x, ft.P(None, "tensor")) + 1, x))
    assert out.spec == ft.P("fsdp", "tensor") and torch.equal(out.full(), expected)
    assert [c.kind for c in sent] == ["all_gather"]


def test_a_dim_of_size_one_stays_whole():
    """A mean over a split dim is one reduction of what is left, where the rest lies."""
    out, expected, sent = _made(lambda x: ft.constrain_like(x.mean(0, keepdim=True), x))
    assert out.spec == ft.P(None, "tensor") and torch.equal(out.full(), expected)
    assert [(c.kind, c.axes, c.count) for c in sent] == [("all_reduce", ("fsdp",), 1)]


def test_other_shapes_are_refused():
    with pytest.raises(ShardingError, match=r"\(2,\) and \(3,\); a layout is shared"):
        ft.constrain_like(torch.ones(2), torch.ones(3))
