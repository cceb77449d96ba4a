"""The stacked layout: the same bits on any mesh, two all-to-alls per leaf, and no work done twice."""

import math

import pytest
import torch
from spmd_types.types import PartitionSpec as P

import functitan as ft
from functitan import optim, tree
from functitan.compiler.flops import flops
from functitan.errors import ShardingError
from functitan.optim.newton_schulz import newton_schulz_flops
from tests.optim.stacked import SHAPES, SPECS, TENSOR, mesh_of, run_on, run_plain, stacked, stepped, trees


def _lower(rule, mesh, specs=SPECS):
    params, grads = ({k: ft.device_put(x, specs[k], mesh) for k, x in values.items()} for values in trees(2))
    state = ft.compile(rule.init, mesh=mesh)(params)
    return ft.compile(stepped(rule), mesh=mesh).lower(grads, state, params)


@pytest.mark.parametrize("settings", [{}, {"ns_dtype": torch.float32}, {"as_torch": True}], ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_any_number_of_ranks_gives_the_bits_of_plain_torch(ranks, settings):
    rule = stacked(**settings)
    found, expected = run_on(rule, mesh_of(fsdp=ranks)), run_plain(rule)
    for (path, a), b in zip(tree.flatten_with_paths(found)[0], tree.leaves(expected), strict=True):
        assert torch.equal(a, b), path


@pytest.mark.parametrize("axes", [("fsdp", "tensor"), ("data", "fsdp")])
def test_two_axes_give_the_same_bits(axes):
    rule, mesh = stacked(axes), dict.fromkeys(axes, 2)
    found, expected = run_on(rule, mesh_of(**mesh), TENSOR), run_plain(rule)
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(found), tree.leaves(expected), strict=True))


@pytest.mark.parametrize(
    "settings,dtype", [({}, "bfloat16"), ({"ns_dtype": torch.float32}, "float32"),
                       ({"ns_dtype": torch.float32, "wire_dtype": torch.bfloat16}, "bfloat16")],
)  # fmt: skip
@pytest.mark.parametrize("ranks", [2, 4])
def test_each_leaf_goes_and_comes_by_one_all_to_all(ranks, settings, dtype):
    """(R - 1) / R of a rank's part, 1 / R of the leaf, each way; nothing else is sent."""
    found = _lower(stacked(**settings), mesh_of(fsdp=ranks)).collectives()
    size = getattr(torch, dtype).itemsize
    each = [math.prod(s) * size * (ranks - 1) // ranks**2 for s in SHAPES.values()]
    expected = sorted(each * 2)
    assert sorted(c.nbytes for c in found) == expected and found.runs == 2 * len(SHAPES)
    assert {(c.kind, c.axes, c.dtype) for c in found} == {("all_to_all", ("fsdp",), dtype)}
    assert any("leaf wq" in c.why for c in found)


def test_axes_that_split_the_other_dim_are_moved_too():
    found = _lower(stacked(("fsdp", "tensor")), mesh_of(fsdp=2, tensor=2), TENSOR).collectives()
    assert {c.kind for c in found} == {"all_to_all"} and found.runs == 4 * len(SHAPES)


def _work(program):
    return sum(times * flops(node) for _, node, times in program.calls())


@pytest.mark.parametrize(
    "mesh,axes", [({"fsdp": 2}, ("fsdp",)), ({"fsdp": 4}, ("fsdp",)), ({"fsdp": 2, "tensor": 2}, ("fsdp", "tensor"))]
)
def test_all_ranks_together_do_the_work_of_one(mesh, axes):
    ranks = 1
    for n in mesh.values():
        ranks *= n
    whole = sum(newton_schulz_flops(s, 5) for s in SHAPES.values())
    assert _work(_lower(stacked(axes), mesh_of())) == whole
    assert ranks * _work(_lower(stacked(axes), mesh_of(**mesh), TENSOR)) == whole


def test_matrices_that_are_whole_in_storage_do_not_move():
    whole = {k: P("fsdp", None, None) for k in SHAPES}
    for rule in (stacked(), optim.muon(0.02)):
        program = _lower(rule, mesh_of(fsdp=4), whole)
        assert not program.collectives()
        assert 4 * _work(program) == sum(newton_schulz_flops(s, 5) for s in SHAPES.values())


def test_blocks_are_cut_from_whole_matrices():
    """A storage split inside a block changes nothing."""
    rule = stacked(blocks={"up": optim.Blocks(-1, (6, 18)), "wq": optim.Blocks(-2, 4)}, scale="match_rms")
    specs = {**SPECS, "up": P(None, None, "fsdp")}
    found, expected = run_on(rule, mesh_of(fsdp=4), specs), run_plain(rule)
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(found), tree.leaves(expected), strict=True))
    assert {c.kind for c in _lower(rule, mesh_of(fsdp=4), specs).collectives()} == {"all_to_all"}


def test_layers_that_do_not_divide_name_the_leaf_and_the_ranks():
    mesh = mesh_of(fsdp=8)
    with pytest.raises(ShardingError) as error:
        _lower(stacked(), mesh)
    text = str(error.value)
    assert 'leaf down for muon(layout="stacked"), its 4 matrices' in text
    assert "leaf wq" in text and "leaf up" not in text and "fsdp=8" in text and 'layout="gathered"' in text


def test_split_matrices_are_gathered_on_request_only():
    with pytest.raises(ShardingError, match=r"(?s)3 problems.*needs a dim whole that is split over fsdp"):
        _lower(optim.muon(0.02), mesh_of(fsdp=2))
    rule = optim.muon(0.02, layout="gathered")
    found = _lower(rule, mesh_of(fsdp=2)).collectives()
    assert {(c.kind, c.dtype) for c in found} == {("all_gather", "bfloat16")} and found.runs == len(SHAPES)
    found, expected = run_on(rule, mesh_of(fsdp=2)), run_plain(rule)
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(found), tree.leaves(expected), strict=True))


def test_a_new_rate_does_not_compile_again():
    mesh = mesh_of(fsdp=2)
    rule = stacked()
    params, grads = ({k: ft.device_put(x, SPECS[k], mesh) for k, x in t.items()} for t in trees(2))
    state = ft.compile(rule.init, mesh=mesh)(params)
    traced = []

    def step(grads, state, params):
        traced.append(1)
        return rule.update(grads, state, params)

    compiled = ft.compile(step, mesh=mesh)
    for rate in (0.1, 0.2, 0.4):
        compiled(grads, state.replace(lr=ft.device_put(torch.tensor(rate, dtype=torch.float64), P(), mesh)), params)
    assert len(traced) == 1


def test_every_layout_of_a_step_is_verified():
    found = ft.verify(_lower(stacked(), mesh_of(fsdp=2)))
    assert "0 unchecked" in str(found)
