"""Faults that others reported in sharded initialisation and dropout."""

from __future__ import annotations

import itertools

import pytest
import torch

import functitan as ft
from functitan import tree
from tests.cases.toy import mesh_of, whole

ONE = ft.random.key(3)


def rules_with(storage):
    return ft.Rules(rows=None, cols=None, other=None, storage=storage)


def test_b44_shards_and_equal_leaves_differ():
    """Ranks drew the same bytes for their shards, and leaves of one shape were equal."""
    declared = {"a": ft.Param((8, 4), ("rows", "cols")), "b": ft.Param((8, 4), ("rows", "cols"))}
    mesh = mesh_of(fsdp=2)
    made = ft.init(ONE, declared, mesh, rules_with({"rows": "fsdp"}))
    parts = [*made["a"].shards, *made["b"].shards]
    for x, y in itertools.combinations(parts, 2):
        assert not (x == y).any()
    for name, x in ft.init(ONE, declared).items():
        assert torch.equal(made[name].full(), x)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("dim", ["rows", "cols"])
def test_b45_initial_values_do_not_depend_on_the_mesh(ranks, dim):
    """Values depended on the number of shards and on the dim that they split."""
    declared = {"w": ft.Param((8, 12), ("rows", "cols")), "n": ft.Param((4,), ("other",), init=ft.nn.init.normal())}
    made = ft.init(ONE, declared, mesh_of(fsdp=ranks), rules_with({dim: "fsdp"}))
    assert made["w"].layout.axes == ("fsdp",)
    for name, x in ft.init(ONE, declared).items():
        assert torch.equal(whole(made[name]), x)


@pytest.mark.parametrize(
    "spec",
    [ft.P("data", None, None), ft.P("data", None, "tensor"), ft.P("data", "tensor", None), ft.P(None, None, None)],
    ids=["whole over tensor", "features over tensor", "sequence over tensor", "whole"],
)
def test_b46_dropout_masks_are_slices_of_one_mask(spec):
    """One seed for the whole mesh, or one per device: replicas shared masks, or whole activations got different ones.
    A mask is a slice of the mask of one device, so equal exactly where the same elements are held."""
    mesh = mesh_of(data=2, tensor=2)
    shape = (4, 8, 8)

    def mask(key):
        return ft.random.bernoulli(key, 0.5, shape)

    got = ft.compile(lambda key: ft.constrain(mask(key), spec), mesh=mesh)(ONE)
    expected = mask(ONE)
    if not any(spec):
        assert torch.equal(got, expected)
        return
    assert all(torch.equal(a, b) for a, b in zip(got.shards, ft.device_put(expected, spec, mesh).shards, strict=True))
    ranks = dict(zip(itertools.product(range(2), range(2)), got.shards, strict=True))
    assert not torch.equal(ranks[0, 0], ranks[1, 0])
    assert torch.equal(ranks[0, 0], ranks[0, 1]) == ("tensor" not in spec)


@pytest.mark.parametrize("remat", [None, ft.nothing_saveable, ft.dots_saveable], ids=str)
@pytest.mark.parametrize("axes", [None, {}, {"data": 2, "tensor": 2}], ids=["plain", "one", "mesh"])
def test_b54_backward_uses_the_mask_of_forward(remat, axes):
    """Random ops were drawn again where backward computes forward again. The gradient is nonzero exactly where the
    output is, in plain runs and compiled ones, whatever is saved."""
    x, w = (1 + torch.rand((4, 8, 8), generator=torch.Generator().manual_seed(s), dtype=torch.float64) for s in (0, 1))

    def block(h, w, key):
        keep = ft.random.bernoulli(key, 0.5, h.shape)
        return torch.exp(h * w) * keep / 0.5

    def step(w, x, key):
        def loss(w):
            y = ft.region(block, remat=remat)(x, w, key)
            y2, _ = ft.scan(lambda h, k: (torch.sin(block(h, w, k)), None), x, ft.random.split(key, 2), remat=remat)
            return y.sum() + y2.sum(), (y, y2)

        (_, (y, y2)), g = ft.value_and_grad(lambda w: loss(w), has_aux=True)(w)
        first = ft.grad(lambda w: ft.region(block, remat=remat)(x, w, key).sum())(w)
        return y, y2, g, first

    run, place = step, lambda v: v
    if axes is not None:
        mesh = mesh_of(**axes)
        run, place = ft.compile(step, mesh=mesh), lambda v: ft.device_put(v, ft.P("data", None, "tensor"), mesh)
    y, y2, g, first = tree.map(whole, run(place(w), place(x), ONE))
    assert 0 < (y == 0).sum() < y.numel()
    assert torch.equal(first != 0, y != 0)
    for got, expected in zip((y, y2, g, first), step(w, x, ONE), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=0)
