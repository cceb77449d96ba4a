"""A state to a file and back, onto another mesh: every dtype, every bit, and the steps that follow."""

import warnings

import pytest
import torch
from spmd_types.types import PartitionSpec as P

import functitan as ft
from functitan import optim, tree
from functitan.checkpoint import load_state, save_state
from functitan.errors import ConfigError

# Dims that 2, 3 and 4 ranks divide.
SHAPES = {"w": (12, 24), "layers": (12, 12, 8), "norm": (24,)}
SPECS = {"w": P("fsdp", None), "layers": P(None, "fsdp", None), "norm": P("fsdp")}
LABELS = [("layers", "muon"), ("*", "adamw")]


def _trees(n, dtype=torch.float32):
    gen = torch.Generator().manual_seed(0)
    return [{k: torch.randn(s, generator=gen).to(dtype) for k, s in SHAPES.items()} for _ in range(n)]


def _low(rule, dtype, **settings):
    return optim.with_low_bit_state(rule, dtype, block=2, min_size=0, **settings)


def _rule(name):
    adamw = optim.adamw(0.01)
    layout = "owned" if name == "float32" else "stacked"
    muon = optim.muon(0.01, layout=layout, axes=("fsdp",), ns_dtype=torch.float32)
    if name == "float32":
        return optim.partition({"muon": muon, "adamw": adamw}, LABELS)
    if name == "int8":
        return optim.partition({"muon": _low(muon, "int8"), "adamw": _low(adamw, "int8")}, LABELS)
    random = _low(adamw, "bfloat16", stochastic=True)
    return optim.partition({"muon": _low(muon, "float8"), "adamw": random}, LABELS)


def _mesh(ranks):
    return ft.make_mesh({"fsdp": ranks}, simulate=True)


def _put(values, mesh):
    return {k: ft.device_put(x, SPECS[k], mesh) for k, x in values.items()}


class Run:
    """A rule on a mesh: a fresh state, and steps on given gradients."""

    def __init__(self, rule, ranks, dtype=torch.float32):
        self.mesh = _mesh(ranks)
        params = _put(_trees(1, dtype)[0], self.mesh)
        self.fresh = params, ft.compile(rule.init, mesh=self.mesh)(params)

        def step(grads, params, state):
            updates, state = rule.update(grads, state, params)
            return optim.apply_updates(params, updates), state

        self._step = ft.compile(step, mesh=self.mesh)

    def steps(self, grads, state):
        for g in grads:
            state = self._step(_put(g, self.mesh), *state)
        return state


def _types(state):
    return [(x.shape, x.dtype, getattr(x, "spec", None)) for x in tree.leaves(state)]


def _bits(state):
    full = [x.full() if isinstance(x, ft.Array) else x for x in tree.leaves(state)]
    return [(x.dtype, x.contiguous().flatten().view(torch.uint8).tolist()) for x in full]


@pytest.mark.parametrize("name", ["float32", "int8", "float8 and bfloat16"])
def test_saved_on_four_ranks_and_loaded_on_fewer_five_more_steps_are_the_same_bits(name, tmp_path):
    """Muon and AdamW side by side, also in 8 bits and with random rounding."""
    rule, grads = _rule(name), _trees(8)[1:]
    four = Run(rule, 4)
    after_two = four.steps(grads[:2], four.fresh)
    save_state(tmp_path / "state", after_two)
    expected = _bits(four.steps(grads[2:], after_two))
    for ranks in (1, 2, 3, 4):
        other = Run(rule, ranks)
        loaded = load_state(tmp_path / "state", other.fresh)
        assert tree.structure(loaded) == tree.structure(after_two) and _bits(loaded) == _bits(after_two)
        spec = lambda x: getattr(x, "spec", None)  # noqa: E731
        assert [spec(x) for x in tree.leaves(loaded)] == [spec(x) for x in tree.leaves(other.fresh)]
        assert _bits(other.steps(grads[2:], loaded)) == expected, ranks


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("params,moments", [("float32", "bfloat16"), ("bfloat16", "float32"), ("bfloat16", "int8")])
def test_dtypes_of_moments_and_masters_survive(params, moments, ranks, tmp_path):
    """Report B22: narrow moments do not widen, wide ones and masters are not cast to the parameters' dtype."""
    rule = optim.adamw(0.01) if moments == "float32" else _low(optim.adamw(0.01), moments)
    rule = optim.with_master(rule)
    dtype = getattr(torch, params)
    run, grads = Run(rule, ranks, dtype), _trees(7, dtype)[1:]
    before = run.steps(grads[:3], run.fresh)
    save_state(tmp_path / "state", before)
    loaded = load_state(tmp_path / "state", run.fresh)
    kinds = {p: x.dtype for p, x in tree.flatten_with_paths(loaded)[0]}
    assert kinds["0/w"] == dtype and (params == "float32" or kinds["1/master/w"] == torch.float32)
    moment = kinds["1/inner/nu/w"] if moments != "int8" else kinds["1/inner/nu/w/codes"]
    assert moment == {"bfloat16": torch.bfloat16, "float32": torch.float32, "int8": torch.uint8}[moments]
    assert _bits(loaded) == _bits(before)
    assert _bits(run.steps(grads[3:], loaded)) == _bits(run.steps(grads[3:], before))


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_average_goes_on_where_it_was(ranks, tmp_path):
    """Report B29: average, raw parameters, and all that counts updates; 5 steps, resumed, and one more are 6."""
    rule, grads = optim.with_ema(optim.adamw(0.01), 0.9), _trees(7)[1:]
    run = Run(rule, ranks)
    five = run.steps(grads[:5], run.fresh)
    save_state(tmp_path / "state", five)
    loaded = load_state(tmp_path / "state", run.fresh)
    params, state = run.steps(grads[5:], loaded)
    assert _bits((params, state)) == _bits(run.steps(grads, run.fresh))
    assert _bits(state.average) != _bits(params)


def test_a_state_is_whole_from_init_on_and_alike_on_any_number_of_ranks(tmp_path):
    """Report B25: an expert without a token in the first step, whose matrices are owned by one rank in turn."""
    gradient = _trees(1)[0]
    gradient["layers"][5] = 0.0
    keys = set()
    for ranks in (1, 2, 4):
        run = Run(_rule("float32"), ranks)
        state = run.steps([gradient], run.fresh)
        assert tree.structure(state) == tree.structure(run.fresh)
        assert _types(state) == _types(run.fresh) or ranks == 1
        for x in tree.leaves(state):
            if isinstance(x, ft.Array):
                assert len({part.shape for part in x.shards}) == 1 and len(x.shards) == ranks
        keys.add(tuple(tree.paths(state)))
        mu = state[1].groups["muon"].mu["layers"]
        assert not (mu.full() if isinstance(mu, ft.Array) else mu)[5].any()
        save_state(tmp_path / str(ranks), state)
        assert _bits(load_state(tmp_path / str(ranks), run.fresh)) == _bits(state)
    assert len(keys) == 1
    one, two, four = ((tmp_path / str(ranks)).read_bytes() for ranks in (1, 2, 4))
    assert one == two == four


def test_nothing_is_cast_left_out_or_kept_and_all_of_it_is_said_at_once(tmp_path):
    """Report B24: leaves that the file lacks are no silent zeros."""
    params = _trees(1)[0]
    state = {"params": params, "opt": optim.adamw(0.1).init(params)}
    save_state(tmp_path / "state", state)
    other = {
        "params": {**params, "w": params["w"].bfloat16()},
        "opt": optim.muon(0.1).init({k: v for k, v in params.items() if k != "norm"}),
    }
    with pytest.raises(ConfigError) as error:
        load_state(tmp_path / "state", other)
    text = str(error.value)
    for expected in (
        "params/w is float32[12, 24] in the file, and bfloat16[12, 24] was asked for.",
        "opt/momentum is missing; the file has 12 leaves.",
        "opt/lr is float32[] in the file, and float64[] was asked for.",
        "opt/nu/w is in the file, and was not asked for.",
        "opt/mu/norm is in the file, and was not asked for.",
    ):
        assert expected in text


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_average_that_the_file_lacks_begins_as_its_parameters_when_asked(dtype, ranks, tmp_path):
    """A guarded AdamW goes on with an average around it; everything else is loaded, and what began is said."""
    adamw, grads = optim.adamw(0.01), _trees(4, getattr(torch, dtype))[1:]
    plain = Run(optim.skip_nonfinite(adamw, 1.0), ranks, getattr(torch, dtype))
    before = plain.steps(grads[:2], plain.fresh)
    save_state(tmp_path / "state", {"params": before[0], "opt": before[1]})
    run = Run(optim.skip_nonfinite(optim.with_ema(adamw, 0.5), 1.0), ranks, getattr(torch, dtype))
    like = {"params": run.fresh[0], "opt": run.fresh[1]}
    with pytest.raises(ConfigError) as error:
        load_state(tmp_path / "state", like)
    assert "opt/inner/average/w is missing" in str(error.value)
    assert 'without the average of with_ema at opt/inner. Write start_ema="params"' in str(error.value)
    with pytest.warns(UserWarning, match="3 of its leaves, opt/inner/average/layers to opt/inner/average/w, begin as"):
        loaded = load_state(tmp_path / "state", like, start_ema="params")
    assert tree.structure(loaded) == tree.structure(like) and _types(loaded) == _types(like)
    state = loaded["opt"].inner
    assert float(state.decay) == 0.5
    assert _bits((loaded["params"], state.inner)) == _bits((before[0], before[1].inner))
    widened = tree.map(lambda x: (x.full() if isinstance(x, ft.Array) else x).float(), before[0])
    assert _bits(state.average) == _bits(widened)
    after, expected = run.steps(grads[2:], (loaded["params"], loaded["opt"])), plain.steps(grads[2:], before)
    assert _bits((after[0], after[1].inner.inner)) == _bits((expected[0], expected[1].inner))
    full = lambda t: tree.map(lambda x: x.full() if isinstance(x, ft.Array) else x, t)  # noqa: E731
    for a, old, new in zip(*map(tree.leaves, map(full, (after[1].inner.average, before[0], after[0]))), strict=True):
        torch.testing.assert_close(a, 0.5 * old.float() + 0.5 * new.float(), rtol=1e-6, atol=1e-7)


def test_an_average_in_the_file_is_loaded_and_one_with_other_parameters_is_refused(tmp_path):
    params = _trees(1)[0]
    rule = optim.with_ema(optim.sgd(0.1), 0.5)
    _, state = rule.update(params, rule.init(params), params)
    save_state(tmp_path / "state", {"params": params, "opt": state})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = load_state(tmp_path / "state", {"params": params, "opt": rule.init(params)}, start_ema="params")
    assert _bits(loaded["opt"]) == _bits(state)
    save_state(tmp_path / "plain", {"params": params, "opt": state.inner})
    with pytest.raises(ConfigError, match=r"opt/average/w, from weights/w, is missing"):
        load_state(tmp_path / "plain", {"params": params, "opt": state}, start_ema="weights")
