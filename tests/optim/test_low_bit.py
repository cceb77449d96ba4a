"""State in fewer bits: what rounding does to a rule, what it takes, and that no mesh changes a bit of it."""

import pytest
import torch
from spmd_types.types import PartitionSpec as P

import functitan as ft
from functitan import optim, tree
from functitan.errors import ArgumentError, ShardingError
from functitan.optim import with_low_bit_state

SHAPES = {"w": (12, 16), "layers": (2, 12, 24), "bias": (96,)}
SPECS = {"w": P("fsdp", None), "layers": P(None, "fsdp", "tensor"), "bias": P("fsdp")}
FORMATS = {
    "int8": dict(dtype="int8", block=4),
    "float8": dict(dtype="float8", block=4),
    "bfloat16": dict(dtype="bfloat16"),
    "stochastic": dict(dtype="bfloat16", stochastic=True),
}


def _random(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _trees(n, shapes=SHAPES):
    return [{k: _random(s, 10 * i + j) for j, (k, s) in enumerate(shapes.items())} for i in range(n)]


def _adamw(name, **settings):
    return with_low_bit_state(optim.adamw(0.01, b2=0.95), min_size=0, **{**FORMATS[name], **settings})


def _step(rule):
    def step(grads, state, params):
        updates, state = rule.update(grads, state, params)
        return optim.apply_updates(params, updates), state

    return step


def _run(rule, mesh=None, steps=2, specs=SPECS):
    params, *grads = _trees(steps + 1)
    if mesh is None:
        state, step, put = rule.init(params), _step(rule), lambda values: values
    else:
        put = lambda values: {k: ft.device_put(x, specs[k], mesh) for k, x in values.items()}  # noqa: E731
        params = put(params)
        state, step = ft.compile(rule.init, mesh=mesh)(params), ft.compile(_step(rule), mesh=mesh)
    for g in grads:
        params, state = step(put(g), state, params)
    return params, state


def same(a, b):
    """Whether two trees have the same structure, dtypes and bits."""
    rows = [[x.full() if isinstance(x, ft.Array) else x for x in tree.leaves(t)] for t in (a, b)]
    assert tree.structure(a) == tree.structure(b)
    view = lambda x: x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x  # noqa: E731
    return all(x.dtype == y.dtype and torch.equal(view(x), view(y)) for x, y in zip(*rows, strict=True))


@pytest.mark.parametrize("name", list(FORMATS))
@pytest.mark.parametrize("sizes", [(3, 1), (2, 2), (4, 3)], ids=str)
def test_any_mesh_gives_the_bits_of_one_device(name, sizes):
    """Random bits too, on 3, 4 and 12 ranks; the state is split as its parameters are."""
    mesh = ft.make_mesh({"fsdp": sizes[0], "tensor": sizes[1]}, simulate=True)
    found = _run(_adamw(name), mesh)
    assert same(found, _run(_adamw(name)))
    if sizes == (2, 2):
        for path, x in tree.flatten_with_paths((found[1].mu, found[1].nu))[0]:
            assert x.spec == SPECS[path.split("/")[1]], path


@pytest.mark.parametrize("name", list(FORMATS))
def test_muon_and_lion_take_it_too(name):
    shapes = {k: s for k, s in SHAPES.items() if len(s) == 3}
    params, grads = _trees(2, shapes)
    for rule in (optim.muon(0.01, ns_dtype=torch.float32), optim.lion(0.01, b2=0.98)):
        low = with_low_bit_state(rule, min_size=0, **FORMATS[name])
        state = low.init(params)
        updates, new = low.update(grads, state, params)
        # The first step computes with moments that are not rounded yet.
        assert same(updates, rule.update(grads, rule.init(params), params)[0])
        assert tree.structure(new) == tree.structure(state)
        assert same(low.update(grads, state, params), (updates, new))


@pytest.mark.parametrize("layout,ranks", [("stacked", 2), ("owned", 3)])
def test_muon_in_8_bits_on_ranks_is_one_device_bit_for_bit(layout, ranks):
    """Momentum is decoded where it is stored; only what is orthogonalised moves."""
    shapes, specs = {"layers": (4, 24, 16)}, {"layers": P(None, "fsdp", None)}
    mesh = ft.make_mesh({"fsdp": ranks}, simulate=True)
    rule = with_low_bit_state(optim.muon(0.01, layout=layout, axes=("fsdp",)), "int8", block=8, min_size=0)
    params, *grads = _trees(3, shapes)
    put = lambda values: {k: ft.device_put(x, specs[k], mesh) for k, x in values.items()}  # noqa: E731
    p, state, step = put(params), ft.compile(rule.init, mesh=mesh)(put(params)), ft.compile(_step(rule), mesh=mesh)
    q, plain = params, rule.init(params)
    for g in grads:
        p, state = step(put(g), state, p)
        q, plain = _step(rule)(g, plain, q)
    assert same((p, state), (q, plain))
    program = step.lower(put(params), state, p)
    assert {c.kind for c in program.collectives()} == {"all_to_all"}


BYTES = [
    ("adamw", "float32", 8.0), ("adamw", "bfloat16", 4.0), ("adamw", "int8", 2.03125), ("adamw", "float8", 2.03125),
    ("muon", "float32", 4.0), ("muon", "bfloat16", 2.0), ("muon", "int8", 1.015625),
]  # fmt: skip


@pytest.mark.parametrize("name,dtype,expected", BYTES)
def test_bytes_of_state_per_parameter(name, dtype, expected):
    """Beside the numbers of the whole tree: a step and rates."""
    params = {"w": torch.zeros(64, 512), "layers": torch.zeros(2, 16, 256)}
    rule = {"adamw": optim.adamw(0.1), "muon": optim.muon(0.1)}[name]
    rule = rule if dtype == "float32" else with_low_bit_state(rule, dtype)
    state = rule.init(params)
    numbers = optim.state_bytes({k: v for k, v in vars(state).items() if k not in ("mu", "nu")})
    assert (optim.state_bytes(state) - numbers) / sum(p.numel() for p in tree.leaves(params)) == expected


def _decayed(rule, steps):
    """The second moment of a parameter whose gradient is zero from the second step on, by its size at first."""
    params = {"w": torch.zeros(32, 32)}
    _, state = rule.update({"w": torch.ones(32, 32)}, rule.init(params), params)
    first = state.nu["w"].float().mean().item()
    for _ in range(steps):
        _, state = rule.update({"w": torch.zeros(32, 32)}, state, params)
    nu = state.nu["w"]
    return (optim.dequantize(nu) if isinstance(nu, optim.Quantized) else nu.float()).mean().item() / first


def test_a_bfloat16_second_moment_stands_still_unless_rounded_at_random():
    """0.999 ** 200 = 0.819 is left of it. Rounded to the nearest, all of it: what the refusal below is for."""
    slow = optim.adamw(0.01, b2=0.999)
    nearest = with_low_bit_state(optim.GradientTransformation(slow.init, slow.update), "bfloat16", min_size=0)
    assert _decayed(nearest, 200) == 1.0
    rule = with_low_bit_state(slow, "bfloat16", stochastic=True, min_size=0)
    assert _decayed(rule, 200) == pytest.approx(0.999**200, rel=4e-3)


@pytest.mark.parametrize("dtype", ["int8", "float8"])
def test_8_bits_decay_by_their_scale(dtype):
    rule = with_low_bit_state(optim.adamw(0.01, b2=0.999), dtype, min_size=0)
    params = {"w": torch.zeros(4, 64)}
    _, state = rule.update({"w": torch.ones(4, 64)}, rule.init(params), params)
    for _ in range(200):
        _, state = rule.update({"w": torch.zeros(4, 64)}, state, params)
    torch.testing.assert_close(
        optim.dequantize(state.nu["w"]), torch.full((4, 64), 0.001 * 0.999**200), rtol=1e-4, atol=0
    )


def test_a_slow_average_in_bfloat16_is_refused_with_what_to_write():
    with pytest.raises(ArgumentError, match=r"nu is an average with rate 0.999.*Write stochastic=True, or a rate of"):
        with_low_bit_state(optim.adamw(0.1, b2=0.999), "bfloat16")
    with_low_bit_state(optim.adamw(0.1, b2=0.999), "bfloat16", stochastic=True)
    with_low_bit_state(optim.adamw(0.1, b2=0.999), "bfloat16", fields=("mu",))
    with_low_bit_state(optim.adamw(0.1, b2=0.99), "bfloat16")
    for rule in (optim.normuon(0.1, b2=0.995), optim.schedule_free_adamw(0.1, b2=0.999), optim.lion(0.1, b2=0.995)):
        with pytest.raises(ArgumentError, match="Write stochastic=True"):
            with_low_bit_state(rule, "bfloat16")


@pytest.mark.parametrize("name,near", [("int8", 0.06), ("float8", 0.12), ("bfloat16", 0.01), ("stochastic", 0.02)])
def test_it_steps_nearly_as_float32_state_does(name, near):
    params, *grads = _trees(51)
    rule = optim.adamw(0.01, b2=0.95)
    low, state, own = params, _adamw(name).init(params), rule.init(params)
    for g in grads:
        low, state = _step(_adamw(name))(g, state, low)
        params, own = _step(rule)(g, own, params)
    gap = sum((a - b).square().sum() for a, b in zip(tree.leaves(low), tree.leaves(params), strict=True)).sqrt()
    moved = sum(
        (a - b).square().sum() for a, b in zip(tree.leaves(params), tree.leaves(_trees(1)[0]), strict=True)
    ).sqrt()
    assert gap < near * moved


def test_random_bits_differ_by_leaf_moment_step_and_seed_and_not_by_what_else_there_is():
    params = {"a": torch.zeros(40, 40), "b": torch.zeros(40, 40)}
    grads = tree.map(lambda p: torch.full_like(p, 0.3), params)

    def moments(params, grads, seed=0, steps=1):
        rule = with_low_bit_state(optim.adamw(0.0), "bfloat16", stochastic=True, min_size=0, seed=seed)
        state = rule.init(params)
        for _ in range(steps):
            _, state = rule.update(grads, state, params)
        return state

    state = moments(params, grads)
    alone = moments({"b": params["b"]}, {"b": grads["b"]})
    assert torch.equal(state.mu["b"], alone.mu["b"]) and not torch.equal(state.mu["a"], state.mu["b"])
    assert not torch.equal(moments(params, grads, seed=1).mu["a"], state.mu["a"])
    ups = lambda x: x == x.max()  # noqa: E731
    assert not torch.equal(ups(state.mu["a"]), ups(state.nu["a"]))


def test_small_leaves_scalars_and_those_left_out_stay_as_they_are():
    params = {"norm": torch.zeros(64), "scale": torch.zeros(()), "w": torch.zeros(64, 64), "head": torch.zeros(64, 64)}
    state = with_low_bit_state(optim.adamw(0.1), "int8", where=lambda path: path != "head").init(params)
    kinds = {k: type(v).__name__ for k, v in state.mu.items()}
    assert kinds == {"norm": "Tensor", "scale": "Tensor", "w": "Quantized", "head": "Tensor"}
    assert (state.mu["w"].format, state.nu["w"].format) == ("int8", "uint8")
    neurons = with_low_bit_state(optim.normuon(0.1), "int8", min_size=0).init({"w": params["w"]})
    assert isinstance(neurons.mu["w"], optim.Quantized) and neurons.nu["w"].shape == (1, 64)
    one = with_low_bit_state(optim.adamw(0.1), "int8", fields=("nu",)).init(params)
    assert isinstance(one.mu["w"], torch.Tensor) and isinstance(one.nu["w"], optim.Quantized)


def test_a_block_that_is_a_row_may_lie_on_several_ranks():
    """Their largest numbers are joined: a scale per row is all that is sent."""
    mesh = ft.make_mesh({"fsdp": 2, "tensor": 2}, simulate=True)
    rule = _adamw("int8", block=256)
    assert same(_run(rule, mesh), _run(rule))
    params = {k: ft.device_put(x, SPECS[k], mesh) for k, x in _trees(1)[0].items()}
    state = ft.compile(rule.init, mesh=mesh)(params)
    program = ft.compile(rule.update, mesh=mesh, passes=ft.Passes.off()).lower(params, state, params)
    found = program.collectives()
    assert sorted((c.kind, c.axes, c.nbytes) for c in found) == [
        ("all_reduce", ("fsdp",), 4), ("all_reduce", ("fsdp",), 4),
        ("all_reduce", ("tensor",), 2 * 6 * 4), ("all_reduce", ("tensor",), 2 * 6 * 4),
    ]  # fmt: skip


@pytest.mark.parametrize("block,write", [(16, "block=12"), (32, "block=24"), (5, "block=4")])
def test_a_block_that_a_split_cuts_is_refused_with_one_that_fits(block, write):
    mesh = ft.make_mesh({"fsdp": 2, "tensor": 2}, simulate=True)
    params = {"layers": ft.device_put(torch.zeros(4, 24, 48), SPECS["layers"], mesh)}
    with pytest.raises(ShardingError) as error:
        ft.compile(_adamw("int8", block=block).init, mesh=mesh)(params)
    text = str(error.value)
    assert f"mu of layers: rows of 48 are cut into blocks of {block}, and each rank holds 24 of a row" in text
    assert f"Write {write}, whose" in text and "or block=48, one scale for a row" in text and "where=" in text
    fits = _adamw("int8", block=int(write.removeprefix("block=")))
    assert ft.compile(fits.init, mesh=mesh)(params).mu["layers"].codes.spec == SPECS["layers"]


@pytest.mark.parametrize("name", list(FORMATS))
def test_check_and_verify_know_every_op_of_it(name):
    mesh = ft.make_mesh({"fsdp": 2, "tensor": 2}, simulate=True)
    params = {"layers": ft.device_put(_random(SHAPES["layers"], 1), SPECS["layers"], mesh)}
    rule = with_low_bit_state(optim.lion(0.01, b2=0.9), min_size=0, **FORMATS[name])
    state = ft.compile(rule.init, mesh=mesh)(params)
    report = ft.check(rule.update, (params, state, params), mesh)
    assert report and "0 unchecked" in str(report), str(report)


def test_a_guard_around_it_keeps_the_stored_bits():
    params, bad = _trees(1)[0], _trees(1)[0]
    bad["bias"][0] = float("nan")
    for name in FORMATS:
        rule = optim.skip_nonfinite(_adamw(name))
        _, state = rule.update(_trees(2)[1], rule.init(params), params)
        updates, after = rule.update(bad, state, params)
        assert not any(u.any() for u in tree.leaves(updates)) and same(after.inner, state.inner)


def test_settings_and_states_that_do_not_fit():
    with pytest.raises(ArgumentError, match=r'(?s)3 problems.*dtype="int4".*stochastic=True.*block=0'):
        with_low_bit_state(optim.adamw(0.1), "int4", stochastic=True, block=0)  # type: ignore[arg-type]
    for rule in (optim.with_master(optim.adamw(0.1)), optim.sgd(0.1), optim.clip_by_value(1.0)):
        with pytest.raises(ArgumentError, match=r"Wrap the rule itself, inside of chain, partition"):
            with_low_bit_state(rule, "int8").init({"w": torch.zeros(2, 2)})
    with pytest.raises(ArgumentError, match=r"stores the fields nu .* MuonState has step, lr, .*mu"):
        with_low_bit_state(optim.muon(0.1), "int8", fields=("nu",)).init({"w": torch.zeros(2, 2)})
