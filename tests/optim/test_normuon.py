"""NorMuon against its formula written out, and the same on every mesh."""

import math

import pytest
import torch
from spmd_types.types import PartitionSpec as P

import functitan as ft
from functitan import optim, tree
from functitan.optim import Blocks
from tests.optim.stacked import mesh_of, normal, stepped

LR, BETA, B2, DECAY = 0.1, 0.9, 0.8, 0.5


def _by_hand(weight, grads):
    """One matrix (in, out) in float64, neuron by neuron."""
    rows, cols = weight.shape
    m, v = torch.zeros_like(weight), torch.zeros(cols, dtype=torch.float64)
    for g in grads:
        m = BETA * m + (1 - BETA) * g
        o = optim.newton_schulz(BETA * m + (1 - BETA) * g, dtype=torch.float64)
        scaled = torch.empty_like(o)
        for i in range(cols):
            v[i] = B2 * v[i] + (1 - B2) * sum(float(x) ** 2 for x in o[:, i]) / rows
            scaled[:, i] = o[:, i] / (math.sqrt(v[i]) + 1e-8)
        scaled *= o.norm() / scaled.norm()
        weight = weight - LR * DECAY * weight - LR * 0.2 * math.sqrt(max(rows, cols)) * scaled
    return weight


def _rule(**settings):
    return optim.normuon(
        LR, momentum=BETA, b2=B2, weight_decay=DECAY, ns_dtype=torch.float64, wire_dtype=torch.float64, **settings
    )


def _run(rule, params, grads):
    state = rule.init(params)
    for g in grads:
        params, state = stepped(rule)(g, state, params)
    return params, state


def _double(*shape, n=4):
    return [normal(shape, i).double() for i in range(n)]


@pytest.mark.parametrize("shape", [(6, 10), (10, 6)])
def test_steps_are_the_formula(shape):
    weight, *grads = _double(*shape)
    mine, state = _run(_rule(), {"w": weight}, [{"w": g} for g in grads])
    assert (mine["w"] - _by_hand(weight, grads)).abs().max() <= 1e-12
    assert state.nu["w"].shape == (1, shape[1]) and int(state.step) == 3


def test_neurons_move_alike_and_the_norm_stays():
    """With b2 = 0 the second moment is the step's own: every column has one norm, and the matrix its own."""
    weight, g, *_ = _double(6, 10)
    g[:, :5] *= 1e-3
    rule = optim.normuon(1.0, b2=0.0, scale="original", weight_decay=0.0, ns_dtype=torch.float64)
    updates, _ = rule.update({"w": g}, rule.init({"w": weight}), {"w": weight})
    norms = updates["w"].norm(dim=0)
    torch.testing.assert_close(norms, norms[0].expand(10), rtol=1e-6, atol=0)
    plain = optim.newton_schulz(g, dtype=torch.float64)
    assert plain.norm(dim=0).max() > 1.1 * plain.norm(dim=0).min()
    torch.testing.assert_close(updates["w"].norm(), math.sqrt(10 / 6) * plain.norm(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("dim,sizes", [(-1, 8), (-1, (16, 8, 8)), (-2, 8), (-2, (8, 24))])
@pytest.mark.parametrize("lead", [(), (2,)])
def test_blocks_are_parameters_of_their_own(dim, sizes, lead):
    shape = [*lead, 12, 12]
    shape[dim] = 32
    weight, *grads = _double(*shape)
    fused, _ = _run(_rule(blocks={"w": Blocks(dim, sizes)}), {"w": weight}, [{"w": g} for g in grads])
    widths = [sizes] * (32 // sizes) if isinstance(sizes, int) else list(sizes)
    apart = lambda x: {str(i): part for i, part in enumerate(torch.split(x, widths, dim))}  # noqa: E731
    single, _ = _run(_rule(), apart(weight), [apart(g) for g in grads])
    for name, part in apart(fused["w"]).items():
        assert (part - single[name]).abs().max() <= 1e-12


def test_a_convolution_is_its_flattened_weight():
    """torch's (out, in, h, w): a matrix (in * h * w, out) of ours."""
    weight, *grads = _double(2, 6, 3, 2, 2)
    mine, state = _run(_rule(convs={"w": 2}), {"w": weight}, [{"w": g} for g in grads])
    flat = lambda x: x.reshape(2, 6, 12).mT  # noqa: E731
    other, _ = _run(_rule(), {"w": flat(weight)}, [{"w": flat(g)} for g in grads])
    assert (flat(mine["w"]) - other["w"]).abs().max() <= 1e-12 and state.nu["w"].shape == (2, 6, 1, 1, 1)


SHAPES = {"wqkv": (4, 12, 16), "down": (4, 24, 12), "conv": (4, 8, 3, 2, 2), "split": (4, 16, 12)}
BLOCKS = {"wqkv": Blocks(-1, (6, 10)), "split": Blocks(-2, (4, 12))}
SPECS = {
    "wqkv": P(None, "fsdp", "tensor"), "down": P(None, "tensor", "fsdp"), "conv": P(None, "fsdp", None, None, None),
    "split": P(None, ("fsdp", "tensor"), None),
}  # fmt: skip


@pytest.mark.parametrize(
    "spread_by",
    [{"layout": "stacked"}, {"layout": "owned", "bucket_bytes": 1 << 10, "gram": ("tensor",)}],
    ids=["stacked", "owned"],
)
def test_a_mesh_gives_the_numbers_of_one_device(spread_by):
    """Norms are those of the global matrix: rescaled per shard, columns would depend on the number of ranks."""
    mesh = mesh_of(fsdp=2, tensor=2)
    params, *grads = ({k: normal(s, 7 * i + len(k)).double() for k, s in SHAPES.items()} for i in range(4))
    rule = _rule(blocks=BLOCKS, convs={"conv": 2}, axes=("fsdp", "tensor"), **spread_by)
    expected = _run(rule, params, grads)
    put = lambda values: {k: ft.device_put(x, SPECS[k], mesh) for k, x in values.items()}  # noqa: E731
    spread, state = put(params), ft.compile(rule.init, mesh=mesh)(put(params))
    first = tree.map(lambda x: getattr(x, "spec", None), state)
    step = ft.compile(stepped(rule), mesh=mesh)
    for g in grads:
        spread, state = step(put(g), state, spread)
    assert tree.map(lambda x: getattr(x, "spec", None), state) == first
    found = tree.map(lambda x: x.full() if isinstance(x, ft.Array) else x, (spread, state))
    assert tree.structure(found) == tree.structure(expected)
    for (path, a), b in zip(tree.flatten_with_paths(found)[0], tree.leaves(expected), strict=True):
        assert (a - b).abs().max() <= 1e-10 * max(1.0, float(b.abs().max())), path


def test_the_second_moment_is_stored_with_its_outputs_and_costs_a_number_per_neuron():
    """Beside the all-to-alls of the matrix: the mean over the split inputs, and two numbers per layer (sent: 2 (R-1)/R)."""
    mesh = mesh_of(fsdp=2, tensor=2)
    params = {"w": ft.device_put(normal((4, 8, 16), 0), P(None, "fsdp", "tensor"), mesh)}
    rule = optim.normuon(LR, layout="stacked", axes=("fsdp", "tensor"), ns_dtype=torch.float32)
    state = ft.compile(rule.init, mesh=mesh)(params)
    assert state.nu["w"].spec == P(None, None, "tensor")
    rows = [c for c in ft.compile(stepped(rule), mesh=mesh).lower(params, state, params).collectives()]
    small = [(c.axes, c.nbytes) for c in rows if c.kind != "all_to_all"]
    assert {c.kind for c in rows} == {"all_to_all", "all_reduce"}
    assert sorted(small) == [(("fsdp",), 4 * 8 * 4), (("tensor",), 4 * 4), (("tensor",), 4 * 4)]


def test_a_gradient_of_zero_moves_nothing():
    params = {"w": normal((4, 6), 0)}
    rule = optim.normuon(0.1, weight_decay=0.0)
    updates, _ = rule.update({"w": torch.zeros(4, 6)}, rule.init(params), params)
    assert not updates["w"].any() and updates["w"].isfinite().all()
