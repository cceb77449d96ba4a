"""Rules on given gradients are the same bits on 1, 2, 3, 4 and 6 ranks: uneven sizes by padding, empty and zero matrices,
experts, blocks that ranks share; and norms and guards that see the whole."""

import math

import pytest
import torch
from spmd_types.types import PartitionSpec as P

import functitan as ft
from functitan import optim, tree
from functitan.errors import ShardingError
from functitan.nn.padding import pad, unpad
from functitan.optim import Blocks


def _random(shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _mesh(**axes):
    return ft.make_mesh(axes, simulate=True)


def _full(values):
    return tree.map(lambda x: x.full() if isinstance(x, ft.Array) else x, values)


def _equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(tree.leaves(_full(a)), tree.leaves(_full(b)), strict=True))


def _step(rule):
    def step(grads, state, params):
        updates, state = rule.update(grads, state, params)
        return optim.apply_updates(params, updates), state

    return step


def _run(rule, params, grads, mesh=None, specs=None):
    """Parameters and state after a step per tree of gradients, on a mesh or plain."""
    put = lambda values: values if mesh is None else {k: ft.device_put(x, specs[k], mesh) for k, x in values.items()}  # noqa: E731
    init = rule.init if mesh is None else ft.compile(rule.init, mesh=mesh)
    step = _step(rule) if mesh is None else ft.compile(_step(rule), mesh=mesh, max_traces=1)
    params = put(params)
    state = init(params)
    for g in grads:
        params, state = step(put(g), state, params)
    return params, state


def _stacked(**settings):
    return optim.muon(0.02, layout="stacked", axes=("fsdp",), weight_decay=0.5, **settings)


# --- any number of ranks -------------------------------------------------------------------------------------------

SHAPES = {"square": (6, 12, 12), "wide": (12, 6, 24), "thin": (6, 1, 24), "flat": (6, 24, 1)}
SPECS = {
    "square": P(None, "fsdp", None),
    "wide": P(None, None, "fsdp"),
    "thin": P(None, None, "fsdp"),
    "flat": P(None, "fsdp", None),
}


@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
def test_muon_on_any_number_of_ranks(ranks):
    """Three and six ranks too, one row and one column, a zero gradient in one leaf and a zero matrix in another."""
    params = {k: _random(s, i) for i, (k, s) in enumerate(SHAPES.items())}
    grads = [{k: _random(s, 9 * n + i) for i, (k, s) in enumerate(SHAPES.items())} for n in range(1, 3)]
    for g in grads:
        g["wide"].zero_()
        g["square"][2].zero_()
    rule = _stacked(as_torch=True)
    expected = _run(rule, params, grads)
    assert _equal(_run(rule, params, grads, _mesh(fsdp=ranks), SPECS), expected)
    # Only the decay moves what has no gradient.
    shrunk = params["wide"] * (1 - 0.01) * (1 - 0.01)
    torch.testing.assert_close(expected[0]["wide"], shrunk, rtol=1e-6, atol=0)
    assert all(x.isfinite().all() for x in tree.leaves(expected))


@pytest.mark.parametrize("name", ["thin", "flat"])
def test_one_row_or_column_is_torch_muon_bit_for_bit(name):
    w, g = _random(SHAPES[name][1:], 1), _random(SHAPES[name][1:], 2)
    mine, _ = _run(optim.muon(0.02, weight_decay=0.5, as_torch=True), {"w": w}, [{"w": g}])
    theirs = w.T.contiguous().requires_grad_()
    theirs.grad = g.T.contiguous()
    torch.optim.Muon([theirs], lr=0.02, weight_decay=0.5).step()
    assert torch.equal(mine["w"], theirs.detach().T)


@pytest.mark.parametrize("axes,spec", [(("ep", "fsdp"), P("ep", "fsdp", None)), (("fsdp",), P(None, "fsdp", None))])
def test_experts_stay_on_their_axis_and_leave_only_the_storage_one(axes, spec):
    """(experts, in, out) over expert x storage axes: whole matrices, no expert's rows or columns are cut."""
    params, grads = {"experts": _random((4, 8, 12))}, [{"experts": _random((4, 8, 12), i)} for i in (1, 2)]
    rule = optim.muon(0.02, layout="stacked", axes=axes)
    mesh = _mesh(ep=2, fsdp=2)
    assert _equal(_run(rule, params, grads, mesh, {"experts": spec}), _run(rule, params, grads))
    whole = optim.muon(0.02)
    assert _equal(_run(whole, params, grads, mesh, {"experts": P("ep", None, None)}), _run(whole, params, grads))


def test_blocks_that_a_shard_border_cuts():
    """Query, key and value of 12, 6 and 6 columns on three ranks of 8: each is a matrix of its own, decay included."""
    blocks = {"wqkv": Blocks(-1, (12, 6, 6))}
    params, grads = {"wqkv": _random((3, 8, 24))}, [{"wqkv": _random((3, 8, 24), i)} for i in (1, 2)]
    rule = _stacked(blocks=blocks, scale="match_rms", as_torch=True)
    found = _full(_run(rule, params, grads, _mesh(fsdp=3), {"wqkv": P(None, None, "fsdp")})[0])
    apart = lambda x: dict(zip("qkv", x["wqkv"].split([12, 6, 6], -1), strict=True))  # noqa: E731
    single, _ = _run(
        optim.muon(0.02, weight_decay=0.5, scale="match_rms", as_torch=True), apart(params), [apart(g) for g in grads]
    )
    assert all(torch.equal(part, single[name]) for name, part in apart(found).items())


# --- sizes that do not divide --------------------------------------------------------------------------------------


def test_a_size_that_ranks_do_not_divide_is_refused_by_name():
    """18 rows on 8 ranks: no rank is left without rows in silence, nothing is padded unasked."""
    declared = {"w": ft.Param((2, 18, 4), ("layers", "embed", "mlp"))}
    rules = ft.Rules(layers=None, embed=None, mlp=None, storage={"embed": "fsdp"})
    with pytest.raises(ShardingError, match=r"w.*dim 1 has size 18, which does not divide by fsdp=8.*such as 24"):
        ft.init(ft.random.key(0), declared, _mesh(fsdp=8), rules)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_padding_by_declaration_stays_zero_and_changes_no_bit_of_the_rest(ranks):
    """5 layers of 14 x 10 as 12 of 24 x 12: Muon and AdamW, moments in 8 bits too. The scale c is that of the padded
    shape; here both are 1."""
    declared = {
        "w": ft.Param((12, 24, 12), ("layers", "embed", "mlp"), pad=(7, 10, 2)),
        "v": ft.Param((12, 24), ("layers", "embed"), pad=(7, 10)),
    }
    rules = ft.Rules(layers=None, embed=None, mlp=None, storage={"embed": "fsdp"})
    mesh = _mesh(fsdp=ranks)
    adamw = optim.with_low_bit_state(optim.adamw(0.02), "int8", block=2, min_size=0)
    rule = optim.partition({"muon": _stacked(), "adamw": adamw}, [("w", "muon"), ("v", "adamw")])
    params = ft.init(ft.random.key(0), declared, mesh, rules)
    real = tree.map(unpad, declared, _full(params))
    assert real["w"].shape == (5, 14, 10)
    grads = [{k: _random(x.shape, 3 * n + i) for i, (k, x) in enumerate(real.items())} for n in range(2)]
    state, step = ft.compile(rule.init, mesh=mesh)(params), ft.compile(_step(rule), mesh=mesh)
    for g in grads:
        padded = tree.map(pad, declared, g)
        params, state = step({k: ft.device_put(x, params[k].spec, mesh) for k, x in padded.items()}, state, params)
    found, (expected, _) = _full(params), _run(rule, real, grads)
    for name, x in found.items():
        assert torch.equal(unpad(declared[name], x), expected[name]), name
        assert torch.equal(pad(declared[name], expected[name]), x), f"the padding of {name} is not zero"


def test_padding_costs_its_share_and_no_more():
    """18 rows padded to 24 on 8 ranks move 24/18 as much, by the formula; nothing is padded up to whole shards."""
    program = {}
    for rows in (16, 24):
        leaf = {"w": ft.device_put(torch.zeros(8, rows, 4), P(None, "fsdp", None), _mesh(fsdp=8))}
        rule, mesh = _stacked(), leaf["w"].mesh
        state = ft.compile(rule.init, mesh=mesh)(leaf)
        program[rows] = ft.compile(rule.update, mesh=mesh).lower(leaf, state, leaf)
        sent = [(c.kind, c.nbytes) for c in program[rows].collectives()]
        assert sent == [("all_to_all", 8 * rows * 4 * 2 * 7 // 64)] * 2


# --- the whole of it: norms, guards, schedules ------------------------------------------------------------------------

LAID = {"whole": P(None, None), "rows": P("data", None), "cols": P(None, "tensor"), "both": P("data", "tensor")}


@pytest.mark.parametrize("axes", [dict(data=1, tensor=2), dict(data=2, tensor=1), dict(data=2, tensor=2)], ids=str)
def test_the_norm_of_all_ones_counts_each_element_once_on_every_mesh(axes):
    """Report B15: replicated leaves are not counted once per rank."""
    mesh = _mesh(**axes)
    ones = {k: ft.device_put(torch.ones(4, 6), spec, mesh) for k, spec in LAID.items()}
    norm = ft.compile(optim.global_norm, mesh=mesh)(ones)
    assert float(norm) == pytest.approx(math.sqrt(4 * 24), rel=1e-7)
    rule = optim.clip_by_global_norm(1.0)
    clipped, state = ft.compile(rule.update, mesh=mesh)(ones, ft.compile(rule.init, mesh=mesh)(ones), ones)
    assert float(state.norm) == float(norm)
    assert float(ft.compile(optim.global_norm, mesh=mesh)(clipped)) == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_element_on_one_rank_stops_all_ranks(bad):
    """Report B17 a, b: parameters, moments and count untouched everywhere, and the norm says why."""
    mesh, specs = _mesh(data=2), {"a": P("data", None), "b": P(None, None)}
    params = {"a": _random((4, 3)), "b": _random((2, 3), 1)}
    grads = [{k: _random(x.shape, i) for k, x in params.items()} for i in (2, 3)]
    grads[1]["a"][3, 1] = bad
    rule = optim.skip_nonfinite(optim.adamw(0.1), max_norm=1.0)
    before = _run(rule, params, grads[:1], mesh, specs)
    after = _run(rule, params, grads, mesh, specs)
    assert _equal(before[0], after[0]) and _equal(before[1].inner, after[1].inner)
    assert (int(after[1].skipped), math.isfinite(float(after[1].norm))) == (1, False)
    assert int(after[1].inner.step) == 1


def test_huge_finite_gradients_are_clipped_on_a_mesh():
    """Report B17 c: their squares are beyond float32, their norm is not."""
    mesh = _mesh(data=2)
    grads = {"a": ft.device_put(torch.full((4, 1), 1e30), P("data", None), mesh)}
    rule = optim.clip_by_global_norm(1.0)
    clipped, state = ft.compile(rule.update, mesh=mesh)(grads, ft.compile(rule.init, mesh=mesh)(grads), grads)
    torch.testing.assert_close(clipped["a"].full(), torch.full((4, 1), 0.5))
    assert float(state.norm) == pytest.approx(2e30, rel=1e-6)


RULES = {
    "adamw": optim.adamw,
    "lion": optim.lion,
    "muon": lambda rate: optim.muon(rate, layout="stacked", axes=("fsdp",), ns_dtype=torch.float32),
    "adamw in int8": lambda rate: optim.with_low_bit_state(optim.adamw(rate), "int8", block=4, min_size=0),
    "adamw in bfloat16": lambda rate: optim.with_low_bit_state(
        optim.adamw(rate), "bfloat16", stochastic=True, min_size=0
    ),
}


@pytest.mark.parametrize("name", list(RULES))
def test_a_whole_schedule_is_one_trace_and_gathers_nothing(name):
    """``max_traces=1``: 12 rates, and a weight decay that is set by hand, are values. A leaf whose gradient is zero at
    first is stepped once it has one."""
    mesh, spec = _mesh(fsdp=2), {"w": P(None, "fsdp", None), "late": P(None, "fsdp", None)}
    put = lambda values: {k: ft.device_put(x, spec[k], mesh) for k, x in values.items()}  # noqa: E731
    rule = RULES[name](optim.warmup_stable_decay(0.1, steps=12, warmup=3))
    params = {"w": _random((2, 8, 8)), "late": _random((2, 8, 8), 1)}
    state, step = ft.compile(rule.init, mesh=mesh)(put(params)), ft.compile(_step(rule), mesh=mesh, max_traces=1)
    plain, own, params_on = rule.init(params), params, put(params)
    rates = set()
    for i in range(12):
        grads = {"w": _random((2, 8, 8), 50 + i), "late": torch.zeros(2, 8, 8) if i < 3 else _random((2, 8, 8), 90 + i)}
        if i == 6:
            state, plain = (s.replace(weight_decay=s.weight_decay * 3) for s in (state, plain))
        params_on, state = step(put(grads), state, params_on)
        own, plain = _step(rule)(grads, plain, own)
        rates.add(float(state.lr))
    assert _equal((params_on, state), (own, plain)) and len(rates) > 8
    kinds = {c.kind for c in step.lower(put(params), state, params_on).collectives()}
    assert kinds == ({"all_to_all"} if name == "muon" else set())
