"""Schedule-free AdamW against its three sequences written out in float64, and where its average is read."""

import pytest
import torch

import functitan as ft
from functitan import optim, tree
from functitan.checkpoint import load_params, save_params
from functitan.errors import ArgumentError


def _random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _rate(i):
    """A warmup over 3 steps, then 0.1, then 0.05: the largest rate stays."""
    return 0.1 * min((i + 1) / 3, 1.0) if i < 6 else 0.05


RATES = optim.piecewise([(i, _rate(i)) for i in range(10)], interpolate=False)
PARAMS = {"w": _random(3, 4), "b": _random(4, seed=1), "scalar": torch.tensor(0.5, dtype=torch.float64)}
GRADS = [{k: _random(*p.shape, seed=10 * i + len(k)) for k, p in PARAMS.items()} for i in range(10)]


def _by_hand(b1_at, step_power=0.0, decay=0.3, b2=0.95, eps=1e-8):
    """z and x kept apart, for one leaf after the other; gradients are given, so y enters by the decay."""
    out = {}
    for name, start in PARAMS.items():
        x, z, v = start.clone(), start.clone(), torch.zeros_like(start)
        y, weights, largest = start, 0.0, 0.0
        for t, grads in enumerate(GRADS):
            g, lr = grads[name], float(torch.tensor(_rate(t), dtype=torch.float32))
            v = b2 * v + (1 - b2) * g * g
            z = z - lr * (g / ((v / (1 - b2 ** (t + 1))).sqrt() + eps) + decay * y)
            largest = max(largest, lr)
            weight = (t + 1) ** step_power * largest**2
            weights += weight
            x = (1 - weight / weights) * x + weight / weights * z
            y = (1 - b1_at(t)) * z + b1_at(t) * x
        out[name] = (x, y, z)
    return out


def _run(rule, params=PARAMS, grads=GRADS, state=None):
    state = rule.init(params) if state is None else state
    for g in grads:
        updates, state = rule.update(g, state, params)
        params = optim.apply_updates(params, updates)
    return params, state


def _near(found, params, state, tolerance=1e-13):
    for name, (x, y, z) in found.items():
        assert (params[name] - y).abs().max() <= tolerance and (state.z[name] - z).abs().max() <= tolerance
        assert (optim.eval_params(state, params)[name] - x).abs().max() <= 10 * tolerance


@pytest.mark.parametrize("step_power", [0.0, 1.5])
def test_ten_steps_are_the_three_sequences(step_power):
    rule = optim.schedule_free_adamw(RATES, b2=0.95, weight_decay=0.3, step_power=step_power)
    params, state = _run(rule)
    _near(_by_hand(lambda t: 0.9, step_power), params, state)
    assert int(state.step) == 10 and float(state.lr_max) == pytest.approx(0.1)


def test_a_moving_b1_leaves_the_average_where_it_is():
    """The parameters are read with the b1 that made them."""
    b1 = [0.5, 0.6, 0.7, 0.8, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9]
    exact = [float(torch.tensor(b, dtype=torch.float32)) for b in b1]
    moving = optim.piecewise(list(enumerate(b1)), interpolate=False)
    expected = _by_hand(lambda t: exact[t])
    for rule in (
        optim.schedule_free_adamw(RATES, b1=moving, b2=0.95, weight_decay=0.3),
        optim.inject_hyperparams(optim.schedule_free_adamw)(RATES, b1=moving, b2=0.95, weight_decay=0.3),
    ):
        params, state = _run(rule)
        inner = getattr(state, "inner", state)
        _near(expected, params, inner)
        found = optim.eval_params(state, params)  # through the wrapper
        assert all((found[k] - x).abs().max() <= 1e-12 for k, (x, _, _) in expected.items())


def test_with_a_constant_rate_the_average_is_the_mean_of_the_steps():
    rule, params = optim.schedule_free_adamw(0.1), {"w": _random(3)}
    state, seen = rule.init(params), []
    for g in GRADS[:5]:
        updates, state = rule.update({"w": g["w"][:, 0]}, state, params)
        params = optim.apply_updates(params, updates)
        seen.append(state.z["w"])
    assert (optim.eval_params(state, params)["w"] - torch.stack(seen).mean(0)).abs().max() <= 1e-14


def test_a_rate_of_zero_moves_nothing():
    rule = optim.schedule_free_adamw(optim.piecewise([(0, 0.0), (2, 0.0), (3, 0.1)], interpolate=False))
    params, state = _run(rule, grads=GRADS[:2])
    assert all((params[k] - PARAMS[k]).abs().max() <= 1e-15 for k in PARAMS)
    assert all(x.isfinite().all() for x in tree.leaves(state))
    _run(rule, params, GRADS[2:4], state)


def test_nested_rules_are_looked_through():
    params = {"w": _random(3, 4), "embed": _random(5, 4)}
    rule = optim.skip_nonfinite(
        optim.chain(
            optim.clip_by_global_norm(1.0),
            optim.partition(
                {"free": optim.schedule_free_adamw(0.1), "plain": optim.adamw(0.1)},
                [("w", "free"), ("*", "plain")],
            ),
        )
    )
    grads = [{"w": _random(3, 4, seed=i), "embed": _random(5, 4, seed=i)} for i in range(3)]
    params, state = _run(rule, params, grads)
    found = optim.eval_params(state, params)
    own = state.inner[1].groups["free"]
    assert torch.equal(found["embed"], params["embed"])
    assert torch.equal(found["w"], optim.eval_params(own, {"w": params["w"]})["w"])
    assert (found["w"] - params["w"]).abs().max() > 1e-3


def test_masters_are_averaged_and_rounded_last():
    params = {"w": _random(8, 8).to(torch.bfloat16)}
    grads = [{"w": _random(8, 8, seed=i).to(torch.bfloat16)} for i in range(4)]
    mine, state = _run(optim.with_master(optim.schedule_free_adamw(1e-3)), params, grads)
    wide, inner = _run(
        optim.schedule_free_adamw(1e-3), {"w": params["w"].float()}, [{"w": g["w"].float()} for g in grads]
    )
    found, expected = optim.eval_params(state, mine)["w"], optim.eval_params(inner, wide)["w"]
    assert found.dtype == torch.bfloat16 and torch.equal(found, expected.to(torch.bfloat16))


def test_averages_of_ema_are_what_is_evaluated():
    params = {"w": torch.tensor([2.0])}
    rule = optim.skip_nonfinite(optim.with_ema(optim.sgd(0.5), 0.5))
    params, state = _run(rule, params, [{"w": torch.tensor([1.0])}] * 3)
    assert optim.eval_params(state, params)["w"].tolist() == [0.9375]


def test_a_saved_state_goes_on_bit_for_bit_and_evaluates_alike(tmp_path):
    rule = optim.schedule_free_adamw(RATES, b1=optim.piecewise([(0, 0.5), (8, 0.9)]), weight_decay=0.3)
    whole = _run(rule)
    params, state = _run(rule, grads=GRADS[:6])
    save_params(tmp_path / "state.safetensors", {"params": params, "opt": state})
    fresh = {"params": PARAMS, "opt": rule.init(PARAMS)}
    loaded = load_params(tmp_path / "state.safetensors", fresh)
    before, after = optim.eval_params(state, params), optim.eval_params(loaded["opt"], loaded["params"])
    assert all(torch.equal(before[k], after[k]) for k in PARAMS)
    resumed = _run(rule, loaded["params"], GRADS[6:], loaded["opt"])
    assert tree.structure(resumed) == tree.structure(whole)
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(resumed), tree.leaves(whole), strict=True))


def test_a_mesh_gives_the_numbers_of_one_device():
    mesh = ft.make_mesh({"fsdp": 2}, simulate=True)
    rule = optim.schedule_free_adamw(RATES, b2=0.95, weight_decay=0.3)
    put = lambda x: {**x, "w": ft.device_put(x["w"], ft.P(None, "fsdp"), mesh)}  # noqa: E731
    params, state = put(PARAMS), ft.compile(rule.init, mesh=mesh)(put(PARAMS))
    step = ft.compile(rule.update, mesh=mesh)
    apply = ft.compile(optim.apply_updates, mesh=mesh)
    for g in GRADS:
        updates, state = step(put(g), state, params)
        params = apply(params, updates)
    evaluated = ft.compile(optim.eval_params, mesh=mesh)(state, params)
    assert evaluated["w"].spec == ft.P(None, "fsdp")
    for name, (x, y, _) in _by_hand(lambda t: 0.9).items():
        for found, expected in ((params[name], y), (evaluated[name], x)):
            found = found.full() if isinstance(found, ft.Array) else found
            assert (found - expected).abs().max() <= 1e-10


def test_b1_has_to_leave_a_share_of_both():
    for b1 in (0.0, 1.0):
        with pytest.raises(ArgumentError, match=rf"b1={b1}; gradients are taken between z and x"):
            optim.schedule_free_adamw(0.1, b1=b1)
