"""A memory budget for remat: what is saved fits, more budget saves more and repeats less, and gradients stay."""

import functools
from itertools import pairwise

import pytest
import torch

import functitan as ft
from functitan.compiler.flops import flops
from functitan.compiler.split import depends_on
from functitan.errors import ArgumentError, ConfigError
from functitan.recipes import load_recipe
from tests.compiler.placing import agree, mesh_of, place, randn

L, B, S, D, F = 2, 4, 4, 8, 16
TOKENS = B * S
W = {
    "q": randn(L, D, D, seed=5) / 3,
    "k": randn(L, D, D, seed=6) / 3,
    "up": randn(L, D, F, seed=2) / 3,
    "gate": randn(L, D, F, seed=4) / 3,
    "down": randn(L, F, D, seed=3) / 3,
}
NAMES = {
    "q": "param layers embed _",
    "k": "param layers embed _",
    "up": "param layers embed mlp",
    "gate": "param layers embed mlp",
    "down": "param layers mlp embed",
}
X = randn(B, S, D, seed=1)
FRACTIONS = [0.0, 0.15, 0.4, 0.7, 1.0]


def block(x, w):
    h = ft.constrain(x, ("batch", "whole_seq", "embed"))
    mixed = torch.softmax(h @ w["q"], -1) * torch.tanh(h @ w["k"])
    act = torch.tanh(mixed @ w["up"]) * torch.sigmoid(mixed @ w["gate"])
    return x + torch.sin(ft.constrain(act @ w["down"], ("batch", "seq", "embed")))


def loss(remat):
    def f(w, x):
        y, _ = ft.scan(lambda c, u: (block(c, u), None), x, w, remat=remat)
        return y.square().sum()

    return ft.value_and_grad(f, argnums=(0, 1))


@functools.cache
def lowered(remat, axes=(("fsdp", 2),)):
    mesh = mesh_of(dict(axes))
    args = place(W, NAMES, mesh), place(X, "batch seq embed", mesh)
    from tests.compiler.placing import RULES

    return ft.compile(loss(remat), mesh=mesh, rules=RULES).lower(*args)


def saved(program):
    """Bytes that one step of the scan saves on a rank, the carry among them."""
    (body,) = program.bodies.values()
    return sum(v.nbytes for v in body.saved_values)


def repeated(program):
    """Operations of matrix products that backward computes again: those that need no cotangent."""
    (body,) = program.bodies.values()
    found = 0
    for graph in [g for name, g in program.graphs() if name.endswith("backward")]:
        places = [n for n in graph.nodes if n.op == "placeholder"]
        tangents = [n for n in places if n.name.startswith("arg") and n.meta["val"].shape == (B // 2, S, D)][-1:]
        late = depends_on(graph, tangents)
        found += sum(flops(n) for n in graph.nodes if n.op == "call_function" and n not in late)
    assert body.backward is not None
    return found


def product(k, n):
    """Operations of a product of a rank's tokens."""
    return 2 * (TOKENS // 2) * k * n


def test_the_ends():
    none, full = lowered(ft.memory_budget(0.0)), lowered(ft.memory_budget(1.0))
    carry = 8 * TOKENS // 2 * D
    assert saved(none) == saved(lowered(ft.nothing_saveable)) == carry
    assert repeated(none) == 2 * product(D, D) + 2 * product(D, F) + product(F, D)
    # The carry, the products before each nonlinearity, and the softmax's two statistics per token.
    assert repeated(full) == 0
    assert saved(full) <= carry + 8 * TOKENS // 2 * (3 * D + 2 * F + 2)
    assert saved(full) < saved(lowered(ft.everything_saveable))


def test_more_budget_saves_more_and_repeats_less():
    programs = [lowered(ft.memory_budget(f)) for f in FRACTIONS]
    sizes, work = [saved(p) for p in programs], [repeated(p) for p in programs]
    assert all(a <= b for a, b in pairwise(sizes)) and all(a >= b for a, b in pairwise(work))
    assert len(set(sizes)) >= 4 and len(set(work)) >= 4
    low, high = sizes[0], sizes[-1]
    for fraction, size in zip(FRACTIONS, sizes, strict=True):
        assert size <= low + fraction * (high - low)


def test_a_budget_in_bytes():
    full = saved(lowered(ft.memory_budget(1.0)))
    assert saved(lowered(ft.memory_budget(nbytes=full))) == full
    some = saved(lowered(ft.memory_budget(nbytes=full - 1)))
    assert some < full
    (record,) = [r for r in lowered(ft.memory_budget(nbytes=full - 1)).passes if r.name == "memory_budget"]
    assert " saves " in record.changes[0] and "no less" not in record.changes[0]


def test_collectives_are_not_repeated_and_gathers_are():
    """Under tensor sharding the least that is saved is more than the inputs: what collectives gave."""
    axes = (("fsdp", 2), ("tensor", 2))
    tight = lowered(ft.memory_budget(nbytes=0), axes)
    full = lowered(ft.memory_budget(1.0), axes)
    for kind in ("all_gather", "reduce_scatter", "all_reduce"):
        count = [p.collectives().of(kind=kind, axes=("tensor",)).runs for p in (tight, full)]
        assert count[0] == count[1]
    assert saved(tight) <= saved(full)
    (record,) = [r for r in tight.passes if r.name == "memory_budget"]
    assert "no less without repeating collectives" in record.changes[0]


@pytest.mark.parametrize("fraction", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("axes", [{"fsdp": 2}, {"fsdp": 2, "tensor": 2}], ids=str)
def test_gradients_equal_one_device(fraction, axes):
    agree(loss(ft.memory_budget(fraction)), (W, X), (NAMES, "batch seq embed"), axes)
    agree(loss(ft.memory_budget(fraction)), (W, X), (NAMES, "batch seq embed"), axes, passes=ft.Passes(regather=False))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "a fraction or nbytes"),
        ({"fraction": 0.5, "nbytes": 3}, "a fraction or nbytes"),
        ({"fraction": 2}, "from 0 to 1"),
        ({"nbytes": -1}, "from 0 on"),
        ({"nbytes": 0.5}, "as an integer"),
    ],
)
def test_what_is_no_budget_is_refused(given, words):
    with pytest.raises(ArgumentError, match=words):
        ft.memory_budget(**given)


def test_a_recipe_sets_both():
    recipe = load_recipe("llama3-debug")
    assert recipe.replace(remat="memory_budget", remat_budget=0.25).remat_policy() == ft.memory_budget(0.25)
    with pytest.raises(ConfigError, match=r"remat=memory_budget needs a budget.* Set remat_budget to a fraction"):
        recipe.replace(remat="memory_budget").remat_policy()
    with pytest.raises(ConfigError, match=r"remat_budget=0.5 is read by .* and remat is None. Set remat=memory_budget"):
        recipe.replace(remat_budget=0.5).remat_policy()
    with pytest.raises(ConfigError, match="not a fraction"):
        recipe.replace(remat="memory_budget", remat_budget=1.5).remat_policy()
