"""Optimizers against torch.optim, closed forms and the golden schedule values."""

import math

import pytest
import torch

import functitan as ft
from functitan import optim, tree
from functitan.errors import ArgumentError, ConfigError, NonfiniteError, TreeError


def _problem():
    gen = torch.Generator().manual_seed(0)
    params = {"w": torch.randn(5, 3, generator=gen), "layers": {"b": torch.randn(4, generator=gen)}}
    target = tree.map(lambda p: torch.randn(p.shape, generator=gen), params)
    return params, target


def _grads(params, target):
    return tree.map(lambda p, t: (p - t) * torch.arange(1.0, p.numel() + 1).reshape(p.shape), params, target)


def test_adamw_equals_torch_after_100_steps_with_visible_decay():
    params, target = _problem()
    rule = optim.adamw(1e-2, b1=0.9, b2=0.95, weight_decay=0.5)
    state = rule.init(params)
    theirs = [p.clone() for p in tree.leaves(params)]
    reference = torch.optim.AdamW(theirs, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.5)
    undecayed = params
    no_decay = optim.adamw(1e-2, weight_decay=0.0)
    no_decay_state = no_decay.init(params)
    for _ in range(100):
        updates, state = rule.update(_grads(params, target), state, params)
        params = optim.apply_updates(params, updates)
        for p, t in zip(theirs, tree.leaves(target), strict=True):
            p.grad = (p - t) * torch.arange(1.0, p.numel() + 1).reshape(p.shape)
        reference.step()
        updates, no_decay_state = no_decay.update(_grads(undecayed, target), no_decay_state, undecayed)
        undecayed = optim.apply_updates(undecayed, updates)
    for mine, other, plain in zip(tree.leaves(params), theirs, tree.leaves(undecayed), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)
        assert (mine - plain).abs().max() > 1e-2  # the decay is visible
    assert int(state.step) == 100


def test_update_modifies_nothing_and_keeps_the_structure():
    params, target = _problem()
    rule = optim.skip_nonfinite(optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-3)), max_norm=1.0)
    state, grads = rule.init(params), _grads(params, target)
    before = [t.clone() for t in tree.leaves((params, state, grads))]
    updates, new = rule.update(grads, state, params)
    optim.apply_updates(params, updates)
    assert all(torch.equal(a, b) for a, b in zip(before, tree.leaves((params, state, grads)), strict=True))
    assert tree.structure(new) == tree.structure(state)
    meta = lambda t: [(x.shape, x.dtype) for x in tree.leaves(t)]  # noqa: E731
    assert meta(new) == meta(state)


def test_moments_of_bfloat16_parameters_are_float32():
    params = {"w": torch.ones(3, dtype=torch.bfloat16)}
    rule = optim.adamw(1e-2)
    updates, state = rule.update(params, rule.init(params), params)
    assert state.mu["w"].dtype == torch.float32
    assert optim.apply_updates(params, updates)["w"].dtype == torch.bfloat16


def test_decay_mask_by_path():
    params = {"norm": torch.ones(2), "w": torch.ones(2)}
    rule = optim.adamw(1.0, weight_decay=0.25, decay=lambda path: path != "norm")
    updates, _ = rule.update(tree.map(torch.zeros_like, params), rule.init(params), params)
    assert updates["norm"].tolist() == [0, 0] and updates["w"].tolist() == [-0.25, -0.25]


def test_schedule_feeds_adamw_from_the_step_in_the_state():
    params = {"w": torch.ones(2)}
    rule = optim.adamw(optim.warmup_stable_decay(1.0, steps=10, warmup=2), weight_decay=0.0)
    state, rates = rule.init(params), []
    for _ in range(4):
        _, state = rule.update(params, state, params)
        rates.append(float(state.lr))
    assert rates == [0.5, 1.0, 1.0, 0.875]


def test_norm_of_all_ones_counts_elements():
    """Report B15: the squared norm of all-ones gradients is the number of elements."""
    params, _ = _problem()
    norm = optim.global_norm(tree.map(torch.ones_like, params))
    assert math.isclose(float(norm) ** 2, sum(p.numel() for p in tree.leaves(params)), rel_tol=1e-6)


def test_clip_scales_to_the_norm_and_leaves_small_gradients():
    rule = optim.clip_by_global_norm(1.0)
    large = {"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}
    clipped, state = rule.update(large, rule.init(large), large)
    torch.testing.assert_close(clipped, {"a": torch.tensor([0.6]), "b": torch.tensor([0.8])})
    assert float(state.norm) == 5.0
    small = {"a": torch.tensor([0.3]), "b": torch.tensor([0.0])}
    assert torch.equal(rule.update(small, state, small)[0]["a"], small["a"])
    zero = tree.map(torch.zeros_like, small)
    assert torch.equal(rule.update(zero, state, zero)[0]["a"], zero["a"])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_step_that_is_not_finite_changes_nothing(bad):
    """Report B17 a, b."""
    params = {"a": torch.ones(3), "b": torch.ones(2)}
    rule = optim.skip_nonfinite(optim.adamw(0.1), max_norm=1.0)
    _, state = rule.update(params, rule.init(params), params)
    grads = {"a": torch.tensor([1.0, bad, 1.0]), "b": torch.ones(2)}
    updates, new = rule.update(grads, state, params)
    assert all(not u.any() for u in tree.leaves(updates))
    assert all(torch.equal(n, o) for n, o in zip(tree.leaves(new.inner), tree.leaves(state.inner), strict=True))
    assert int(new.skipped) == 1 and not math.isfinite(float(new.norm))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_in_mode_raise_everything_stays_as_before_the_bad_step(bad):
    """However many steps pass before somebody looks."""
    params = {"a": torch.ones(3), "b": torch.ones(2)}
    rule = optim.chain(optim.skip_nonfinite(optim.adamw(0.1), max_norm=1.0, mode="raise"))
    _, state = rule.update(params, rule.init(params), params)
    optim.raise_nonfinite(state)
    before = state
    _, state = rule.update({"a": torch.tensor([1.0, bad, 1.0]), "b": torch.ones(2)}, state, params)
    with pytest.raises(NonfiniteError, match=f"the gradient of the last step has the global norm {bad}"):
        optim.raise_nonfinite(state)
    updates, state = rule.update(params, state, params)
    assert all(not u.any() for u in tree.leaves(updates))
    for new, old in zip(tree.leaves(state[0].inner), tree.leaves(before[0].inner), strict=True):
        assert torch.equal(new, old)
    with pytest.raises(NonfiniteError, match=f"the step 2 steps ago has the global norm {bad}. Parameters"):
        optim.raise_nonfinite(state)
    assert tree.structure(state) == tree.structure(before) and int(state[0].skipped) == 2


@pytest.mark.parametrize("mode", ["skip", "raise"])
def test_all_ranks_decide_alike_on_a_bad_number_in_one_part(mode):
    """Report B17 a: one element of one rank's part, on two axes; leaves that are whole decide the same."""
    mesh = ft.make_mesh({"fsdp": 2, "tensor": 2}, simulate=True)
    params = {"a": torch.ones(4, 4), "b": torch.ones(3)}
    bad = torch.ones(4, 4)
    bad[3, 0] = math.nan
    put = lambda x: {"a": ft.device_put(x["a"], ft.P("fsdp", "tensor"), mesh), "b": x["b"]}  # noqa: E731
    rule = optim.skip_nonfinite(optim.adamw(0.1), max_norm=1.0, mode=mode)
    step = ft.compile(rule.update, mesh=mesh)
    spread, state = put(params), ft.compile(rule.init, mesh=mesh)(put(params))
    for grads in (params, {"a": bad, "b": params["b"]}, params):
        updates, state = step(put(grads), state, spread)
    whole = tree.map(lambda x: x.full() if isinstance(x, ft.Array) else x, (updates, state))
    alone = rule.init(params)
    for grads in (params, {"a": bad, "b": params["b"]}, params):
        expected, alone = rule.update(grads, alone, params)
    assert int(alone.skipped) == (1 if mode == "skip" else 2) and int(alone.inner.step) == (2 if mode == "skip" else 1)
    for a, b in zip(tree.leaves(whole), tree.leaves((expected, alone)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7, equal_nan=True)
    assert all(shard.isfinite().all() for x in (updates["a"], state.inner.mu["a"]) for shard in x.shards)
    if mode == "raise":
        with pytest.raises(NonfiniteError, match="nan"):
            optim.raise_nonfinite(state)
    else:
        optim.raise_nonfinite(state)


def test_a_mode_that_does_not_exist():
    with pytest.raises(ArgumentError, match=r'mode="halt"; there are "skip" and "raise"'):
        optim.skip_nonfinite(optim.sgd(0.1), mode="halt")  # type: ignore[arg-type]


def test_huge_finite_gradients_are_clipped_not_zeroed():
    """Report B17 c."""
    grads = {"a": torch.full((4,), 1e30)}
    rule = optim.clip_by_global_norm(1.0)
    clipped, state = rule.update(grads, rule.init(grads), grads)
    torch.testing.assert_close(clipped["a"], torch.full((4,), 0.5))
    torch.testing.assert_close(state.norm, torch.tensor(2e30))


def test_other_structure_names_the_leaf():
    rule = optim.adamw(0.1)
    params = {"a": torch.ones(1), "b": torch.ones(1)}
    with pytest.raises(TreeError, match="only params has: b"):
        rule.update({"a": torch.ones(1)}, rule.init(params), params)


GOLDEN = [
    (dict(steps=10, warmup=2), [1 / 2, 1, 1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8]),
    (dict(steps=10, warmup=2, decay_ratio=0.5), [1 / 2, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2]),
    (dict(steps=5, warmup=10), [0.2, 0.4, 0.6, 0.8, 1.0]),
    (dict(steps=10, warmup=2, decay_ratio=0.0), [0.5] + [1] * 9),
    (dict(steps=10, warmup=5, decay_ratio=0.8), [0.2, 0.4, 0.6, 0.8, 1, 1, 0.8, 0.6, 0.4, 0.2]),
]


@pytest.mark.parametrize("settings,factors", GOLDEN)
def test_schedule_factors(settings, factors):
    rate = optim.warmup_stable_decay(1.0, **settings)
    found = [float(rate(torch.tensor(i))) for i in range(settings["steps"])]
    assert found == pytest.approx(factors, abs=1e-6)


def test_schedule_ends_at_the_minimum_and_the_shapes_differ():
    rates = {
        d: optim.warmup_stable_decay(1.0, steps=10, warmup=2, min_factor=0.2, decay=d)
        for d in ("linear", "sqrt", "cosine")
    }
    for rate in rates.values():
        assert float(rate(torch.tensor(10))) == pytest.approx(0.2, abs=1e-7)
    half = {d: float(rate(torch.tensor(6))) for d, rate in rates.items()}
    expected = {"linear": 0.5, "sqrt": 1 - math.sqrt(0.5), "cosine": 0.5}
    assert half == pytest.approx({d: 0.2 + 0.8 * f for d, f in expected.items()}, abs=1e-6)


def test_a_short_run_warms_up_and_ends_exactly_at_the_minimum():
    """The step after the last, for all shapes; and a minimum of 0.2 that no step of the run undercuts."""
    for shape in ("linear", "sqrt", "cosine"):
        rate = optim.warmup_stable_decay(1.0, steps=10, warmup=2, decay=shape, min_factor=0.2)
        found = [float(rate(torch.tensor(i))) for i in range(20)]
        assert min(found) == found[10] == found[19] == pytest.approx(0.2, abs=1e-7)
        assert found[2:11] == sorted(found[2:11], reverse=True)


def test_schedule_errors_come_together():
    with pytest.raises(ConfigError, match=r"2 problems(.|\n)*steps=0(.|\n)*Did you mean \"cosine\""):
        optim.warmup_stable_decay(1.0, steps=0, warmup=0, decay="cosin")  # type: ignore[arg-type]
