"""Parameters gathered again in backward, or kept from forward: one gather more, or the whole of them held."""

from dataclasses import replace

import pytest
import torch

import functitan as ft
from functitan import tree
from functitan.errors import ConfigError
from functitan.recipes import load_recipe, override
from tests.compiler.mlp import D, F, L, lowered
from tests.compiler.placing import RULES, agree, mesh_of, on_meshes, place, randn, whole

OFF = ft.Passes.off()
KEEP = replace(OFF, regather=False)
MATRIX = 4 * D * F
POLICIES = [None, ft.nothing_saveable, ft.dots_saveable]


@pytest.mark.parametrize("remat", POLICIES, ids=str)
def test_gathers_and_scatters_from_formulas(remat):
    """Regathered: 2 gathers and 1 reduce-scatter per matrix and layer; kept: 1 and 1; each (n - 1) / n of a matrix."""
    for passes, gathers in ((OFF, 2), (KEEP, 1)):
        found = lowered(fsdp=4, remat=remat, passes=passes).collectives()
        for kind, times in (("all_gather", gathers), ("reduce_scatter", 1)):
            rows = found.of(kind=kind, axes=("fsdp",))
            assert sum(c.count for c in rows) == times * 2 * L
            assert sum(c.total for c in rows) == times * 2 * L * MATRIX * 3 // 4


@pytest.mark.parametrize("remat", POLICIES, ids=str)
def test_memory_shows_what_is_held(remat):
    again, kept = (lowered(fsdp=4, remat=remat, passes=p).memory() for p in (OFF, KEEP))
    assert again["gathered parameters"] <= 3 * MATRIX
    assert 2 * L * MATRIX <= kept["gathered parameters"] <= (2 * L + 1) * MATRIX
    assert kept["saved activations"] == again["saved activations"] and kept.peak > again.peak


def test_what_is_kept_is_recorded():
    program = lowered(fsdp=4, passes=KEEP)
    record = program.passes[0]
    assert (record.name, record.on) == ("regather", False)
    assert record.changes == (f"block: 2 gathered parameters, {2 * MATRIX // 1024}.0 KiB, are kept for backward",)
    assert lowered(fsdp=4, passes=OFF).passes[0].changes == ()


W = {"a": randn(3, 8, 16, seed=1) / 3, "b": randn(3, 16, 8, seed=2) / 3}
NAMES = ({"a": "param layers embed mlp", "b": "param layers mlp embed"}, "batch seq embed")


def loss(w, x):
    def block(c, u):
        h = ft.constrain(c, ("batch", "whole_seq", "embed"))
        return c + ft.constrain(torch.tanh(h @ u["a"]) @ u["b"], ("batch", "seq", "embed")), None

    y, _ = ft.scan(block, x, w, remat=ft.nothing_saveable)
    y = ft.constrain(y, ("batch", "whole_seq", "embed"))
    return (y @ w["a"][0]).square().sum()


@on_meshes
def test_equal_to_one_device_and_the_same_bits(axes):
    results = [
        agree(ft.value_and_grad(loss, argnums=(0, 1)), (W, randn(4, 4, 8, seed=4)), NAMES, axes, passes=p)[1]
        for p in (OFF, KEEP, ft.Passes(regather=False))
    ]
    for other in results[1:]:
        for a, b in zip(tree.leaves(results[0]), tree.leaves(other), strict=True):
            assert torch.equal(whole(a), whole(b))


PARTS = {"layers": randn(3, 8, 8, seed=5) / 3, "head": randn(8, 8, seed=6) / 3, "out": randn(8, 8, seed=7) / 3}
PART_NAMES = {"layers": "param layers embed mlp", "head": "param embed mlp", "out": "param embed mlp"}


def in_parts(w, x):
    """A scan, a region, and what is outside of them, each with parameters of its own name."""
    y, _ = ft.scan(lambda c, u: (torch.tanh(c @ u), None), x, w["layers"], name="layers")
    y = ft.region(lambda y, u: torch.tanh(y @ u), name="head")(y, w["head"])
    return torch.tanh(y @ w["out"]).square().sum()


@pytest.mark.parametrize("again", [(), ("layers",), ("head", "step"), ("*s*",), ("layers", "head", "step")], ids=str)
def test_some_regions_gather_again_and_the_others_keep(again):
    """Two gathers of a parameter where its region is named, one elsewhere, and the same bits."""
    mesh = mesh_of({"fsdp": 2})
    args = place((PARTS, randn(4, 8, seed=8)), (PART_NAMES, "batch embed"), mesh)
    f = ft.value_and_grad(in_parts)
    compiled = ft.compile(f, mesh=mesh, rules=RULES, passes=replace(OFF, regather=again))
    found = compiled.lower(*args).collectives().of(kind="all_gather")
    counts = {name: sum(c.count for c in found if c.param.endswith(name)) for name in PARTS}
    named = {"layers": {"layers", "*s*"}, "head": {"head"}, "out": {"step", "*s*"}}
    times = {name: 1 + bool(named[name] & set(again)) for name in PARTS}
    assert counts == {"layers": 3 * times["layers"], "head": times["head"], "out": times["out"]}
    plain = ft.compile(f, mesh=mesh, rules=RULES, passes=OFF)(*args)
    for a, b in zip(tree.leaves(plain), tree.leaves(compiled(*args)), strict=True):
        assert torch.equal(whole(a), whole(b))


def test_a_single_text_is_refused():
    with pytest.raises(ConfigError, match=r"regather='layers': it takes true, false, or a tuple.*\('layers',\)"):
        ft.Passes(regather="layers")


def test_a_pattern_without_a_region_is_refused():
    mesh = mesh_of({"fsdp": 2})
    args = place((PARTS, randn(4, 8, seed=8)), (PART_NAMES, "batch embed"), mesh)
    passes = ft.Passes(regather=("layer", "head", "x*"))
    with pytest.raises(ConfigError, match=r'2 problems[\s\S]*"layer", which no region .* there are head, layers, step'):
        ft.compile(ft.value_and_grad(in_parts), mesh=mesh, rules=RULES, passes=passes).lower(*args)


@pytest.mark.parametrize(("text", "value"), [("false", False), ("on", True), ("layers,h*", ("layers", "h*"))])
def test_a_recipe_sets_it(text, value):
    assert override(load_recipe("llama3-debug"), [f"passes.regather={text}"]).passes.regather == value
