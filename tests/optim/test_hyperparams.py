"""Hyperparameters in the state: scheduled, set between steps, and never a reason to compile again."""

import math

import pytest
import torch

import functitan as ft
from functitan import optim, tree
from functitan.errors import ArgumentError


def _random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _grads(params, n):
    return [tree.map(lambda p, i=i: _random(*p.shape, seed=p.numel() + i), params) for i in range(n)]


def _steps(rule, params, grads):
    state = rule.init(params)
    for g in grads:
        updates, state = rule.update(g, state, params)
        params = optim.apply_updates(params, updates)
    return params, state


def _params():
    return {"w": _random(4, 6), "norm": _random(6, seed=1), "scalar": torch.tensor(0.5)}


def test_scheduled_decays_of_the_moments_are_the_formula():
    """b1 warms up from 0.5 to 0.9 and the weight decay is halved at step 3."""
    b1 = optim.piecewise([(0, 0.5), (4, 0.9)])
    decay = optim.piecewise([(0, 0.5), (3, 0.25)], interpolate=False)
    rule = optim.inject_hyperparams(optim.adamw)(lr=0.1, b1=b1, b2=0.99, weight_decay=decay)
    params = {"w": _random(4, 6)}
    grads = _grads(params, 6)
    mine, state = _steps(rule, params, grads)
    p, m, v = params["w"].double(), torch.zeros(4, 6).double(), torch.zeros(4, 6).double()
    for t, g in enumerate(grads):
        b = [0.5, 0.6, 0.7, 0.8, 0.9, 0.9][t]
        g = g["w"].double()
        m, v = b * m + (1 - b) * g, 0.99 * v + 0.01 * g * g
        hats = m / (1 - b ** (t + 1)), v / (1 - 0.99 ** (t + 1))
        p = p - 0.1 * (hats[0] / (hats[1].sqrt() + 1e-8) + (0.5 if t < 3 else 0.25) * p)
    torch.testing.assert_close(mine["w"].double(), p, rtol=1e-5, atol=1e-6)
    assert {k: round(float(h), 6) for k, h in state.hyperparams.items()} == {
        "lr": 0.1, "b1": 0.9, "b2": 0.99, "weight_decay": 0.25,
    }  # fmt: skip
    assert int(state.step) == 6


FACTORIES = {
    "sgd": lambda make: make(optim.sgd)(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": lambda make: make(optim.adam)(lr=0.1, b1=0.8, b2=0.9, eps=1e-6),
    "adamw": lambda make: make(optim.adamw, ("decay",))(lr=0.1, b1=0.8, decay=lambda path: path == "w"),
    "lion": lambda make: make(optim.lion)(lr=0.1, b1=0.8, b2=0.7, weight_decay=0.1),
    "muon": lambda make: make(optim.muon)(lr=0.1, momentum=0.8, weight_decay=0.1, ns_dtype=torch.float32),
    "normuon": lambda make: make(optim.normuon)(lr=0.1, b2=0.8, eps=1e-6, ns_dtype=torch.float32),
    "ema": lambda make: make(optim.with_ema)(optim.sgd(0.1), decay=0.5),
    "clip": lambda make: make(optim.clip_by_global_norm)(0.5),
    "clip_value": lambda make: make(optim.clip_by_value)(limit=0.25),
    "skip": lambda make: make(optim.skip_nonfinite)(optim.sgd(0.1), max_norm=0.5),
}


@pytest.mark.parametrize("name", list(FACTORIES))
def test_every_factory_gives_the_steps_that_it_gives_with_numbers(name):
    make = FACTORIES[name]
    params = _params() if "muon" not in name else {"w": _random(4, 6)}
    grads = _grads(params, 4)
    plain, _ = _steps(make(lambda factory, static=(): factory), params, grads)
    injected, state = _steps(make(optim.inject_hyperparams), params, grads)
    for a, b in zip(tree.leaves(injected), tree.leaves(plain), strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    assert state.hyperparams and all(h.dtype == torch.float64 for h in state.hyperparams.values())
    meta = lambda t: [(x.shape, x.dtype) for x in tree.leaves(t)]  # noqa: E731
    rule = make(optim.inject_hyperparams)
    assert meta(rule.init(params)) == meta(state) and tree.structure(rule.init(params)) == tree.structure(state)


@pytest.mark.parametrize("name", list(FACTORIES))
def test_pure(name):
    rule = FACTORIES[name](optim.inject_hyperparams)
    params = _params() if "muon" not in name else {"w": _random(4, 6)}
    grads = _grads(params, 1)[0]
    state = rule.init(params)
    before = [t.clone() for t in tree.leaves((params, grads, state))]
    first, second = rule.update(grads, state, params), rule.update(grads, state, params)
    assert all(torch.equal(a, b) for a, b in zip(before, tree.leaves((params, grads, state)), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(first), tree.leaves(second), strict=True))


def test_one_program_for_a_schedule_and_for_what_is_set():
    """Traced once over 8 steps of a schedule and 2 changes by hand; donated, and on a mesh."""
    mesh = ft.make_mesh({"fsdp": 2}, simulate=True)
    rule = optim.inject_hyperparams(optim.adamw)(lr=optim.cosine(0.1, 8), b1=0.9, weight_decay=0.1)
    params = {"w": _random(4, 6)}
    grads = _grads(params, 10)
    put = lambda x: {"w": ft.device_put(x["w"], ft.P("fsdp", None), mesh)}  # noqa: E731
    traced = []

    def step(grads, state, params):
        traced.append(1)
        updates, state = rule.update(grads, state, params)
        return optim.apply_updates(params, updates), state

    compiled = ft.compile(step, mesh=mesh, donate_argnums=(1, 2))
    spread, spread_state = put(params), ft.compile(rule.init, mesh=mesh)(put(params))
    state = rule.init(params)
    for i, g in enumerate(grads):
        if i >= 8:
            number = torch.tensor(0.5 + 0.1 * i, dtype=torch.float64)
            state = state.replace(hyperparams={**state.hyperparams, "b1": number})
            spread_state = spread_state.replace(hyperparams={**spread_state.hyperparams, "b1": number.clone()})
        updates, state = rule.update(g, state, params)
        params = optim.apply_updates(params, updates)
        spread, spread_state = compiled(put(g), spread_state, spread)
    assert len(traced) == 1
    torch.testing.assert_close(spread["w"].full(), params["w"], rtol=1e-6, atol=1e-7)
    assert float(spread_state.hyperparams["b1"]) == 0.5 + 0.1 * 9
    assert float(spread_state.inner.lr) == pytest.approx(float(optim.cosine(0.1, 8)(torch.tensor(9))))


def test_a_changed_number_changes_the_next_update():
    params = {"w": _random(4)}
    rule = optim.inject_hyperparams(optim.sgd)(lr=0.1)
    state = rule.init(params)
    doubled = state.replace(hyperparams={"lr": state.hyperparams["lr"] * 2})
    one, two = (rule.update(params, s, params)[0]["w"] for s in (state, doubled))
    torch.testing.assert_close(two, 2 * one)
    _, after = rule.update(params, doubled, params)
    assert float(after.hyperparams["lr"]) == 0.2  # and stays


@pytest.mark.parametrize("factory", [optim.adamw, optim.lion, optim.sgd])
def test_weight_decay_follows_a_schedule_without_injection(factory):
    params = {"w": torch.ones(3)}
    rule = factory(1.0, weight_decay=optim.piecewise([(0, 0.5), (1, 0.25)], interpolate=False))
    zero = {"w": torch.zeros(3)}
    first, state = rule.update(zero, rule.init(params), params)
    second, _ = rule.update(zero, state, params)
    assert first["w"].tolist() == [-0.5] * 3 and second["w"].tolist() == [-0.25] * 3


@pytest.mark.parametrize("factory,names", [
    (optim.adamw, ("b1", "b2")), (optim.adam, ("b1", "b2")), (optim.lion, ("b1", "b2")), (optim.sgd, ("momentum",)),
    (optim.muon, ("momentum",)), (optim.normuon, ("momentum", "b2")), (optim.schedule_free_adamw, ("b2",)),
])  # fmt: skip
def test_a_share_that_is_none_is_refused(factory, names):
    for value in (1.0, 2, -0.1):
        with pytest.raises(ArgumentError) as error:
            factory(0.1, **dict.fromkeys(names, value))
        assert all(f"{name}={value}: it is the share of an average" in str(error.value) for name in names)
    # Tensors and schedules decide as the step runs.
    assert factory(0.1, **dict.fromkeys(names, torch.tensor(0.5)))


def test_b1_of_zero_is_no_momentum():
    params = {"w": torch.ones(2)}
    rule = optim.adamw(0.1, b1=0.0, weight_decay=0.0)
    updates, _ = rule.update({"w": torch.tensor([2.0, -3.0])}, rule.init(params), params)
    torch.testing.assert_close(updates["w"], torch.tensor([-0.1, 0.1]))


def test_functions_that_are_no_schedules_are_named():
    with pytest.raises(ArgumentError, match=r'(?s)"decay" of adamw.*AttributeError.*Write static=\("decay",\)'):
        optim.inject_hyperparams(optim.adamw)(lr=0.1, decay=lambda path: path.startswith("w"))
    with pytest.raises(ArgumentError, match=r'"lr" of adamw .* it gives a float; a schedule gives a 0-d floating'):
        optim.inject_hyperparams(optim.adamw)(lr=lambda step: math.pi)
    with pytest.raises(ArgumentError, match=r'muon: the eps .* name it in static=\("eps",\)'):
        optim.inject_hyperparams(optim.muon)(lr=0.1, eps=1e-9)
    with pytest.raises(ArgumentError, match=r'static names "decy", and adamw takes lr, b1.* Did you mean "decay"'):
        optim.inject_hyperparams(optim.adamw, static=("decy",))
