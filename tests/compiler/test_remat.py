"""Remat policies inside ft.compile: equal gradients, and what each lets forward save."""

from __future__ import annotations

import functools

import pytest
import torch

import functitan as ft
from functitan.compiler.split import names_of
from tests.compiler.placing import agree, on_meshes, randn

L, B, S, D, F = 2, 4, 4, 8, 16
X = randn(B, S, D, seed=1)
W = {"up": randn(L, D, F, seed=2) / 3, "gate": randn(L, D, F, seed=4) / 3, "down": randn(L, F, D, seed=3) / 3}
W_NAMES = {"up": "param layers embed mlp", "gate": "param layers embed mlp", "down": "param layers mlp embed"}
POLICIES = {
    "default": None,
    "nothing": ft.nothing_saveable,
    "everything": ft.everything_saveable,
    "dots": ft.dots_saveable,
    "names": ft.save_only_these_names("hidden", "act"),
}
MM, WAIT = torch.ops.aten.mm.default, torch.ops._c10d_functional.wait_tensor.default
KEY = ft.random.key(7)


def block(x, w):
    h = ft.constrain(x, ("batch", "whole_seq", "embed"))
    hidden = ft.checkpoint_name(h @ w["up"], "hidden")
    act = ft.checkpoint_name(torch.tanh(hidden) * torch.sigmoid(h @ w["gate"]), "act")
    keep = ft.random.bernoulli(KEY, 0.8, act.shape)
    out = ft.constrain((act * keep) @ w["down"], ("batch", "seq", "embed"))
    return x + torch.sin(out)


def step(remat, kind):
    def loss(w, x):
        if kind == "scan":
            y, _ = ft.scan(lambda c, u: (block(c, u), None), x, w, remat=remat)
        else:
            run = ft.region(block, remat=remat)
            for i in range(L):
                x = run(x, {k: v.sum(0) * (i + 1) for k, v in w.items()})
            y = x
        return y.square().sum()

    return ft.value_and_grad(loss, argnums=(0, 1))


def run(policy, kind, axes):
    """The Program, after a comparison with plain autograd; each is made once."""
    return _run(policy, kind, tuple(axes.items()))


@functools.cache
def _run(policy, kind, axes):
    return agree(step(POLICIES[policy], kind), (W, X), (W_NAMES, "batch seq embed"), dict(axes))[0]


def saved(program):
    """The nodes that the only body hands to its backward, without the carry."""
    (body,) = program.bodies.values()
    output = next(n for n in body.forward.nodes if n.op == "output")
    return [n for n in output.args[0][len(body.out_layouts) :] if n.op != "placeholder"]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", ["scan", "region"])
@on_meshes
def test_every_policy_gives_the_gradients_of_plain_autograd(policy, kind, axes):
    run(policy, kind, axes)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_on_three_axes(policy):
    run(policy, "scan", {"data": 2, "fsdp": 2, "tensor": 2})


@pytest.mark.parametrize("kind", ["scan", "region"])
@on_meshes
def test_nothing_saveable_saves_inputs_only(kind, axes):
    program = run("nothing", kind, axes)
    (body,) = program.bodies.values()
    assert saved(program) == []
    assert len(body.saved_values) == (1 if kind == "scan" else 0)  # the carry is no input of the whole loop
    if kind == "region":
        assert 0 in body.saved_inputs


@pytest.mark.parametrize("kind", ["scan", "region"])
@on_meshes
def test_dots_saveable_saves_dots(kind, axes):
    nodes = saved(run("dots", kind, axes))
    assert [n.target for n in nodes if n.target is not WAIT] == [MM] * (2 if axes.get("tensor") else 3)
    # A product whose pending sum is reduced is saved as the sum.
    waits = [n for n in nodes if n.target is WAIT]
    assert len(waits) == (2 if axes.get("tensor") else 0)


@pytest.mark.parametrize("kind", ["scan", "region"])
@on_meshes
def test_only_the_named_values_and_collectives_are_saved(kind, axes):
    program = run("names", kind, axes)
    nodes = saved(program)
    (body,) = program.bodies.values()
    assert body.remat == POLICIES["names"]
    named = [n for n in nodes if n.target is not WAIT]
    assert [names_of(n) for n in named] == [{"hidden"}, {"act"}]
    assert len(nodes) - len(named) == (2 if axes.get("tensor") else 0)


def test_a_name_that_is_not_asked_for_is_not_saved():
    remat = ft.save_only_these_names("hidden")
    program = agree(step(remat, "scan"), (W, X), (W_NAMES, "batch seq embed"), {"fsdp": 2})[0]
    assert [names_of(n) for n in saved(program)] == [{"hidden"}]


@on_meshes
def test_everything_saveable_computes_nothing_again(axes):
    """But for views, gathered parameters and what costs nothing: none of the forward products is in backward."""
    for policy in ("everything", "default"):
        program = run(policy, "scan", axes)
        (body,) = program.bodies.values()
        products = [sum(n.target is MM for n in g.nodes) for g in (body.forward, body.backward)]
        assert products == [3, 6]
    nothing = run("nothing", "scan", axes)
    (body,) = nothing.bodies.values()
    assert sum(n.target is MM for n in body.backward.nodes) == 9


@on_meshes
def test_saved_bytes_are_ordered(axes):
    def nbytes(policy):
        (body,) = run(policy, "scan", axes).bodies.values()
        return sum(v.numel() * v.dtype.itemsize for v in body.saved_values)

    nothing, names, dots, everything = map(nbytes, ("nothing", "names", "dots", "everything"))
    assert nothing < min(names, dots) and max(names, dots) <= everything


@on_meshes
def test_gathered_parameters_are_never_saved(axes):
    for policy in POLICIES:
        assert not any(n.meta["origin"].gather for n in saved(run(policy, "scan", axes)))


def test_two_policies_are_two_bodies():
    def loss(w, x):
        first = {k: v.sum(0) for k, v in w.items()}
        a = ft.region(block, remat=ft.nothing_saveable)(x, first)
        return ft.remat(block, ft.dots_saveable)(a, first).sum()

    program, _ = agree(ft.value_and_grad(loss), (W, X), (W_NAMES, "batch seq embed"), {"fsdp": 2})
    assert [str(b.remat) for b in program.bodies.values()] == ["nothing_saveable", "dots_saveable"]
