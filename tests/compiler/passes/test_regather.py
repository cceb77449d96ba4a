"""Parameters gathered again in backward, or kept from forward: one gather more, or the whole of them held."""

from dataclasses import replace

import pytest
import torch

import functitan as ft
from functitan import tree
from tests.compiler.mlp import D, F, L, lowered
from tests.compiler.placing import agree, on_meshes, randn, whole

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
