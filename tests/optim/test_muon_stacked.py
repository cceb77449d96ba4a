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

SHAPES = {"wq": (4, 16, 16), "up": (8, 16, 24), "down": (4, 24, 16)}
SPECS = {"wq": P(None, "fsdp", None), "up": P(None, "fsdp", None), "down": P(None, None, "fsdp")}
TENSOR = {"wq": P(None, "fsdp", "tensor"), "up": P(None, "fsdp", "tensor"), "down": P(None, "tensor", "fsdp")}
BF16 = torch.bfloat16


def _random(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _trees(n=4):
    """Parameters, then gradients of n - 1 steps."""
    return [{k: _random(s, 10 * i + j) for j, (k, s) in enumerate(SHAPES.items())} for i in range(n)]


def _mesh(**axes):
    return ft.make_mesh({"data": 1, "fsdp": 1, "tensor": 1, **axes}, simulate=True)


def _rule(axes=("fsdp",), **settings):
    return optim.muon(0.02, layout="stacked", axes=axes, **settings)


def _step(rule):
    def step(grads, state, params):
        updates, state = rule.update(grads, state, params)
        return optim.apply_updates(params, updates), state

    return step


def _lower(rule, mesh, specs=SPECS):
    params, grads = ({k: ft.device_put(x, specs[k], mesh) for k, x in values.items()} for values in _trees(2))
    state = ft.compile(rule.init, mesh=mesh)(params)
    return ft.compile(_step(rule), mesh=mesh).lower(grads, state, params)


def _run(rule, mesh, specs=SPECS):
    first, *grads = _trees()
    put = lambda values: {k: ft.device_put(x, specs[k], mesh) for k, x in values.items()}  # noqa: E731
    params = put(first)
    state = ft.compile(rule.init, mesh=mesh)(params)
    step = ft.compile(_step(rule), mesh=mesh)
    for g in grads:
        params, state = step(put(g), state, params)
    if mesh.size > 1:
        assert all(x.spec == put(first)[k].spec for values in (params, state.mu) for k, x in values.items())
    return tree.map(lambda x: x.full() if isinstance(x, ft.Array) else x, (params, state))


def _plain(rule):
    params, *grads = _trees()
    state = rule.init(params)
    for g in grads:
        params, state = _step(rule)(g, state, params)
    return params, state


@pytest.mark.parametrize("settings", [{}, {"ns_dtype": torch.float32}, {"as_torch": True}], ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_any_number_of_ranks_gives_the_bits_of_plain_torch(ranks, settings):
    rule = _rule(**settings)
    found, expected = _run(rule, _mesh(fsdp=ranks)), _plain(rule)
    for (path, a), b in zip(tree.flatten_with_paths(found)[0], tree.leaves(expected), strict=True):
        assert torch.equal(a, b), path


@pytest.mark.parametrize("axes", [("fsdp", "tensor"), ("data", "fsdp")])
def test_two_axes_give_the_same_bits(axes):
    rule, mesh = _rule(axes), dict.fromkeys(axes, 2)
    found, expected = _run(rule, _mesh(**mesh), TENSOR), _plain(rule)
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(found), tree.leaves(expected), strict=True))


@pytest.mark.parametrize(
    "settings,dtype", [({}, "bfloat16"), ({"ns_dtype": torch.float32}, "float32"),
                       ({"ns_dtype": torch.float32, "wire_dtype": BF16}, "bfloat16")],
)  # fmt: skip
@pytest.mark.parametrize("ranks", [2, 4])
def test_each_leaf_goes_and_comes_by_one_all_to_all(ranks, settings, dtype):
    """(R - 1) / R of a rank's part, 1 / R of the leaf, each way; nothing else is sent."""
    found = _lower(_rule(**settings), _mesh(fsdp=ranks)).collectives()
    size = getattr(torch, dtype).itemsize
    each = [math.prod(s) * size * (ranks - 1) // ranks**2 for s in SHAPES.values()]
    expected = sorted(each * 2)
    assert sorted(c.nbytes for c in found) == expected and found.runs == 2 * len(SHAPES)
    assert {(c.kind, c.axes, c.dtype) for c in found} == {("all_to_all", ("fsdp",), dtype)}
    assert any("leaf wq" in c.why for c in found)


def test_axes_that_split_the_other_dim_are_moved_too():
    found = _lower(_rule(("fsdp", "tensor")), _mesh(fsdp=2, tensor=2), TENSOR).collectives()
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
    assert _work(_lower(_rule(axes), _mesh())) == whole
    assert ranks * _work(_lower(_rule(axes), _mesh(**mesh), TENSOR)) == whole


def test_matrices_that_are_whole_in_storage_do_not_move():
    whole = {k: P("fsdp", None, None) for k in SHAPES}
    for rule in (_rule(), optim.muon(0.02)):
        program = _lower(rule, _mesh(fsdp=4), whole)
        assert not program.collectives()
        assert 4 * _work(program) == sum(newton_schulz_flops(s, 5) for s in SHAPES.values())


def test_blocks_are_cut_from_whole_matrices():
    """A storage split inside a block changes nothing."""
    rule = _rule(blocks={"up": optim.Blocks(-1, (6, 18)), "wq": optim.Blocks(-2, 4)}, scale="match_rms")
    specs = {**SPECS, "up": P(None, None, "fsdp")}
    found, expected = _run(rule, _mesh(fsdp=4), specs), _plain(rule)
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(found), tree.leaves(expected), strict=True))
    assert {c.kind for c in _lower(rule, _mesh(fsdp=4), specs).collectives()} == {"all_to_all"}


def test_layers_that_do_not_divide_name_the_leaf_and_the_ranks():
    mesh = _mesh(fsdp=8)
    with pytest.raises(ShardingError) as error:
        _lower(_rule(), mesh)
    text = str(error.value)
    assert 'leaf down for muon(layout="stacked"), its 4 matrices' in text
    assert "leaf wq" in text and "leaf up" not in text and "fsdp=8" in text and 'layout="gathered"' in text


def test_split_matrices_are_gathered_on_request_only():
    with pytest.raises(ShardingError, match=r"(?s)3 problems.*needs a dim whole that is split over fsdp"):
        _lower(optim.muon(0.02), _mesh(fsdp=2))
    rule = optim.muon(0.02, layout="gathered")
    found = _lower(rule, _mesh(fsdp=2)).collectives()
    assert {(c.kind, c.dtype) for c in found} == {("all_gather", "bfloat16")} and found.runs == len(SHAPES)
    found, expected = _run(rule, _mesh(fsdp=2)), _plain(rule)
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(found), tree.leaves(expected), strict=True))


def test_a_new_rate_does_not_compile_again():
    mesh = _mesh(fsdp=2)
    rule = _rule()
    params, grads = ({k: ft.device_put(x, SPECS[k], mesh) for k, x in t.items()} for t in _trees(2))
    state = ft.compile(rule.init, mesh=mesh)(params)
    traced = []

    def step(grads, state, params):
        traced.append(1)
        return rule.update(grads, state, params)

    compiled = ft.compile(step, mesh=mesh)
    for rate in (0.1, 0.2, 0.4):
        compiled(grads, state.replace(lr=ft.device_put(torch.tensor(rate, dtype=torch.float64), P(), mesh)), params)
    assert len(traced) == 1
