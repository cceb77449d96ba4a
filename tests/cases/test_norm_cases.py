"""Faults that others reported in gradient norms, clipping and the dtype of reductions."""

from __future__ import annotations

import math

import pytest
import torch

import functitan as ft
from functitan import optim, tree
from functitan.nn.init import ones
from tests.cases.toy import RULES, assert_close, mesh_of, on, params, rows, whole

MESHES = [{"tensor": 2}, {"data": 2}, {"fsdp": 2}, {"fsdp": 2, "tensor": 2}]


@pytest.mark.parametrize("axes", MESHES, ids="x".join)
def test_b15_the_squared_norm_of_ones_counts_elements(axes):
    """Gradients that ranks hold equally were counted once per rank. With all gradients 1, the squared norm is the
    number of logical elements on every mesh."""
    mesh = mesh_of(**axes)

    def norm(p):
        g = ft.grad(lambda p: sum(x.sum() for x in tree.leaves(p)))(p)
        return optim.global_norm(g), g

    squared, ones = ft.compile(norm, mesh=mesh, rules=RULES)(on(mesh, params()))
    assert_close(ones, tree.map(torch.ones_like, params()))
    assert float(squared) ** 2 == pytest.approx(sum(p.numel() for p in tree.leaves(params())), rel=1e-6)


def step_with(rule):
    """One optimizer step on the sum of x times two leaves; x is split over ranks, so its last row is rank 1's."""

    def step(p, state, x):
        g = ft.grad(lambda p: (x @ p["a"]).sum() + (p["b"] * x.sum(0)).sum())(p)
        updates, state = rule.update(g, state, p)
        return optim.apply_updates(p, updates), state

    return step


@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("axes", [{"data": 2}, {"fsdp": 2}], ids="x".join)
def test_b17_a_norm_that_is_not_finite_changes_nothing_anywhere(bad, axes):
    """Clipping went on with a norm that was not finite. One element of one rank makes all ranks skip alike:
    parameters, moments and step count stay, and the state says so."""
    mesh = mesh_of(**axes)
    rule = optim.skip_nonfinite(optim.adamw(0.1), max_norm=1.0)
    declared = {"a": ft.Param((4, 4), ("embed", None), init=ones()), "b": ft.Param((4,), (None,), init=ones())}
    placed = ft.init(ft.random.key(0), declared, mesh, RULES)
    compiled = ft.compile(step_with(rule), mesh=mesh, rules=RULES)
    state = ft.compile(rule.init, mesh=mesh, rules=RULES)(placed)
    good = torch.arange(8.0).reshape(2, 4)
    first, state = compiled(placed, state, rows(mesh, {"x": good})["x"])
    poisoned = good.clone()
    poisoned[1, 2] = bad
    second, after = compiled(first, state, rows(mesh, {"x": poisoned})["x"])
    for a, b in zip(tree.leaves((first, state.inner)), tree.leaves((second, after.inner)), strict=True):
        parts = [x.shards if isinstance(x, ft.Array) else [x] for x in (a, b)]
        assert all(torch.equal(u, v) for u, v in zip(*parts, strict=True))
    assert int(after.skipped) == 1 and not math.isfinite(float(after.norm))


def test_b17_huge_finite_gradients_are_clipped():
    """A finite float32 gradient whose norm overflows was clipped to zero."""
    mesh = mesh_of(fsdp=2)
    rule = optim.clip_by_global_norm(1.0)
    g = {"a": ft.device_put(torch.full((4,), 1e30), ft.P("fsdp"), mesh)}
    clipped, state = ft.compile(rule.update, mesh=mesh, rules=RULES)(g, whole(rule.init({"a": torch.ones(4)})), g)
    torch.testing.assert_close(clipped["a"].full(), torch.full((4,), 0.5))
    torch.testing.assert_close(whole(state.norm), torch.tensor(2e30))


def test_b53_gradients_are_reduced_in_the_asked_dtype():
    """The sum over tensor ranks of gradients of bfloat16 parameters ran in bfloat16. Addends 1 and three times 2^-8
    are 1 when added in bfloat16, and 1 + 2^-6 when added in float32 and rounded once."""
    mesh = mesh_of(tensor=4)
    x = torch.tensor([1.0, 2**-8, 2**-8, 2**-8], dtype=torch.bfloat16)[None, :, None].expand(1, 4, 8)

    def loss(p, x):
        h = ft.constrain(x, ("batch", "seq", "embed")) * p["norm"]  # held whole by all, used on split positions
        return ft.constrain(h @ p["up"], ("batch", "seq", None)).sum()

    p = {"norm": torch.ones(8, dtype=torch.bfloat16), "up": torch.eye(8, dtype=torch.bfloat16)}
    compiled = ft.compile(ft.grad(loss), mesh=mesh, rules=RULES)
    gradient = compiled(p, x)
    assert all(g.dtype == torch.bfloat16 for g in tree.leaves(gradient))
    assert torch.equal(gradient["norm"], torch.full((8,), 1 + 2**-6, dtype=torch.bfloat16))
    reductions = [c for c in compiled.lower(p, x).collectives() if c.param]
    assert {c.param for c in reductions} == {"p/{up,norm}"}
    assert all(c.dtype == "float32" for c in reductions)
    low = ft.compile(ft.grad(loss), mesh=mesh, rules=RULES, reduce_dtype=torch.bfloat16)
    assert {c.dtype for c in low.lower(p, x).collectives()} == {"bfloat16"}
