"""The Gram form: matrices that stay split along their long side, where that costs less than an owner each."""

import pytest
import torch
from spmd_types.types import PartitionSpec as P

import functitan as ft
from functitan import tree
from functitan.compiler.flops import flops
from functitan.compiler.gram import gram_cost, owned_cost
from functitan.compiler.work_report import work_text
from functitan.errors import ArgumentError
from tests.optim.owned import lowered, owned, run_on, run_plain, trees
from tests.optim.stacked import mesh_of

SHAPES = {"up": (2, 8, 512), "down": (2, 512, 8), "square": (2, 16, 16)}
SPECS = {
    "up": P(None, "fsdp", "tensor"),
    "down": P(None, "tensor", "fsdp"),
    "square": P(None, "fsdp", "tensor"),
}
STEPS, SHORT, LONG = 5, 8, 512


def relative(found, expected):
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def rule(**settings):
    return owned(("fsdp", "tensor"), gram=("tensor",), **settings)


@pytest.mark.parametrize("dtype,allowed", [(torch.float32, 5e-6), (torch.bfloat16, 3e-2)], ids=str)
@pytest.mark.parametrize("mesh", [{"tensor": 2}, {"tensor": 4}, {"fsdp": 2, "tensor": 2}], ids=str)
def test_it_differs_by_rounding_alone(mesh, dtype, allowed):
    """Of what is orthogonalised: momentum 0, decay 0, so that an update is a scaled direction."""
    values = trees(2, SHAPES)
    settings = dict(ns_dtype=dtype, weight_decay=0.0)
    zeros = [{k: torch.zeros_like(x) for k, x in values[0].items()}, values[1]]
    found, _ = run_on(rule(**settings), mesh_of(**mesh), SPECS, zeros)
    expected, _ = run_plain(rule(**settings), zeros)
    for k in SHAPES:
        assert relative(found[k], expected[k]) <= allowed, k
    assert torch.equal(found["square"], expected["square"])  # that one has an owner


def test_nearly_dependent_rows_and_a_zero_matrix():
    values = trees(2, {"up": (2, 8, 512)})
    values[1]["up"][0, 1] = values[1]["up"][0, 0] * (1 + 1e-3)
    values[1]["up"][1] = 0
    zeros = [{"up": torch.zeros(2, 8, 512)}, values[1]]
    settings = dict(ns_dtype=torch.float32, weight_decay=0.0)
    found, _ = run_on(rule(**settings), mesh_of(tensor=4), SPECS, zeros)
    expected, _ = run_plain(rule(**settings), zeros)
    assert relative(found["up"], expected["up"]) <= 5e-6
    assert not found["up"][1].any()


@pytest.mark.parametrize("fsdp,tensor", [(1, 2), (1, 4), (2, 2)])
def test_operations_and_bytes_are_those_of_the_formulas(fsdp, tensor):
    shapes = {k: SHAPES[k] for k in ("up", "down")}
    program = lowered(rule(ns_dtype=torch.float32), mesh_of(fsdp=fsdp, tensor=tensor), SPECS, trees(2, shapes))
    each = 2 * STEPS * SHORT**2 * (2 * LONG // tensor + SHORT)
    matrices = 4 // fsdp
    assert sum(times * flops(node) for _, node, times in program.calls()) == matrices * each
    redundancy = tensor * fsdp * matrices * each / (4 * 2 * STEPS * SHORT**2 * (2 * LONG + SHORT))
    assert redundancy == pytest.approx((2 * LONG + tensor * SHORT) / (2 * LONG + SHORT))
    over = program.collectives().of(kind="all_reduce", axes=("tensor",))
    grams = [c for c in over if c.shape[-1] == SHORT]
    sent = 2 * (tensor - 1) * SHORT**2 * 4 // tensor * matrices
    assert sum(c.total for c in grams) == STEPS * sent and sum(c.count for c in grams) == 2 * STEPS
    norms = [c for c in over if c.shape[-1] == 1]
    assert len(over) == len(grams) + len(norms) and len(norms) == 2
    others = {(c.kind, c.axes) for c in program.collectives() if c.axes != ("tensor",)}
    assert others == ({("all_to_all", ("fsdp",))} if fsdp > 1 else set())


def test_a_leaf_takes_it_where_it_costs_less():
    program = lowered(rule(), mesh_of(tensor=4), SPECS, trees(2, SHAPES))
    told = [text for _, text in program.choices]
    assert [t.split(":")[1].split(",")[0] for t in told] == [" yes", " no", " yes"]  # down, square, up
    assert all("operations and" in t and "with one owner each" in t for t in told)
    assert [leaf.path for plan in program.plans() for leaf in plan.leaves] == ["square"]
    assert "leaf up for the Gram form over tensor: yes" in work_text(program)
    # k s T / l = 40 for a square matrix over 8 ranks; few ranks on a long one are the other way round.
    assert gram_cost((512, 512), 8, 8, 5, 2).nbytes == 40 * owned_cost((512, 512), 8, 8, 5, 2).nbytes
    assert gram_cost((8, 512), 8, 4, 5, 2).nbytes < owned_cost((8, 512), 8, 4, 5, 2).nbytes


def test_the_short_side_is_refused():
    specs = {"up": P(None, "tensor", None)}
    program = lowered(rule(), mesh_of(tensor=4), specs, trees(2, {"up": (2, 8, 512)}))
    assert "no, since tensor splits the short side" in str(program)
    assert {c.kind for c in program.collectives()} == {"all_to_all"}


def test_settings_that_do_not_fit():
    with pytest.raises(ArgumentError, match=r"gram=\('tensor',\) with layout='owned' and axes=\('fsdp',\)"):
        owned(("fsdp",), gram=("tensor",))


def test_one_device_against_the_mesh_in_float64():
    params, grads = trees(2, SHAPES)
    state = rule().init(params)
    assert tree.leaves(state)
    assert ft.check(rule().update, (grads, state, params), mesh_of(fsdp=2, tensor=2))
