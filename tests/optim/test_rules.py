"""SGD, Adam and Lion against torch and their formulas; masters, averages, schedules and clipping by value."""

import math

import pytest
import torch

import functitan as ft
from functitan import optim, tree
from functitan.errors import ArgumentError, ConfigError


def _random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _params():
    return {"w": _random(5, 3, seed=1), "b": [_random(4, seed=2)]}


def _grads(n):
    return [tree.map(lambda p, i=i: _random(*p.shape, seed=10 + i), _params()) for i in range(n)]


def _steps(rule, params, grads):
    state = rule.init(params)
    for g in grads:
        updates, state = rule.update(g, state, params)
        params = optim.apply_updates(params, updates)
    return params, state


def _theirs(make, params, grads):
    leaves = [p.clone() for p in tree.leaves(params)]
    reference = make(leaves)
    for g in grads:
        for p, own in zip(leaves, tree.leaves(g), strict=True):
            p.grad = own
        reference.step()
    return leaves


@pytest.mark.parametrize(
    "settings",
    [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.5}, {"weight_decay": 0.5}],
    ids=str,
)
def test_sgd_is_torch_sgd(settings):
    mine, state = _steps(optim.sgd(0.02, **settings), _params(), _grads(20))
    theirs = _theirs(lambda p: torch.optim.SGD(p, lr=0.02, **settings), _params(), _grads(20))
    for a, b in zip(tree.leaves(mine), theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert (state.mu is None) == (not settings.get("momentum")) and int(state.step) == 20


def test_adam_is_torch_adam():
    mine, _ = _steps(optim.adam(0.02), _params(), _grads(50))
    theirs = _theirs(lambda p: torch.optim.Adam(p, lr=0.02), _params(), _grads(50))
    for a, b in zip(tree.leaves(mine), theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_lion_is_its_formula():
    p, m = _random(6, seed=1).double(), torch.zeros(6, dtype=torch.float64)
    grads = [{"w": _random(6, seed=20 + i)} for i in range(10)]
    for g in grads:
        own = g["w"].double()
        p = p - 0.01 * (torch.sign(0.9 * m + 0.1 * own) + 0.5 * p)
        m = 0.99 * m + 0.01 * own
    mine, state = _steps(optim.lion(0.01, weight_decay=0.5), {"w": _random(6, seed=1)}, grads)
    torch.testing.assert_close(mine["w"].double(), p, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(state.mu["w"].double(), m, rtol=1e-5, atol=1e-6)


RULES = {
    "sgd": lambda: optim.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: optim.adam(0.1),
    "lion": lambda: optim.lion(0.1, weight_decay=0.1),
    "master": lambda: optim.with_master(optim.adamw(0.1)),
    "ema": lambda: optim.with_ema(optim.sgd(0.1), 0.5),
    "clip": lambda: optim.clip_by_value(0.1),
}


@pytest.mark.parametrize("name", list(RULES))
def test_pure_with_one_structure_and_alike_on_a_mesh(name):
    rule, params, grads = RULES[name](), _params(), _grads(1)[0]
    params["half"], grads["half"] = _random(4, 2).to(torch.bfloat16), _random(4, 2, seed=9).to(torch.bfloat16)
    state = rule.init(params)
    before = [t.clone() for t in tree.leaves((params, grads, state))]
    first, second = rule.update(grads, state, params), rule.update(grads, state, params)
    assert all(torch.equal(a, b) for a, b in zip(before, tree.leaves((params, grads, state)), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(first), tree.leaves(second), strict=True))
    assert tree.structure(first[1]) == tree.structure(state)
    mesh = ft.make_mesh({"fsdp": 2}, simulate=True)
    put = lambda values: {**values, "half": ft.device_put(values["half"], ("fsdp", None), mesh)}  # noqa: E731
    step = ft.compile(rule.update, mesh=mesh)
    spread = ft.compile(rule.init, mesh=mesh)(put(params))
    found = tree.leaves(step(put(grads), spread, put(params)))
    for a, b in zip(found, tree.leaves(first), strict=True):
        torch.testing.assert_close(a.full() if isinstance(a, ft.Array) else a, b, rtol=1e-6, atol=1e-7)


def test_a_master_adds_up_what_bfloat16_rounds_away():
    params = {"half": torch.full((3,), 1.0, dtype=torch.bfloat16), "full": torch.ones(3)}
    grads = [{"half": torch.full((3,), 1.0, dtype=torch.bfloat16), "full": torch.ones(3)}] * 100
    mine, state = _steps(optim.with_master(optim.sgd(1e-3)), params, grads)
    plain, _ = _steps(optim.sgd(1e-3), params, grads)
    assert plain["half"].tolist() == [1.0] * 3  # every update was lost
    torch.testing.assert_close(mine["half"].float(), torch.full((3,), 0.9), rtol=4e-3, atol=0)
    torch.testing.assert_close(mine["full"], plain["full"])
    assert torch.equal(mine["half"], state.master["half"].to(torch.bfloat16)) and state.master["full"] is None
    assert mine["half"].dtype == torch.bfloat16 and state.master["half"].dtype == torch.float32


def test_a_master_steps_as_float32_parameters_do():
    params = {"w": _random(8, 8).to(torch.bfloat16)}
    grads = [{"w": _random(8, 8, seed=i).to(torch.bfloat16)} for i in range(10)]
    rule = optim.adamw(0.01)
    _, state = _steps(optim.with_master(rule), params, grads)
    wide, _ = _steps(rule, {"w": params["w"].float()}, [{"w": g["w"].float()} for g in grads])
    assert torch.equal(state.master["w"], wide["w"])


def test_the_average_follows_the_parameters():
    params, grads = {"w": torch.tensor([2.0])}, [{"w": torch.tensor([1.0])}] * 3
    mine, state = _steps(optim.with_ema(optim.sgd(0.5), 0.5), params, grads)
    assert mine["w"].tolist() == [0.5]
    # 2 -> (2 + 1.5)/2 -> (1.75 + 1)/2 -> (1.375 + 0.5)/2
    assert optim.ema_params(state, mine)["w"].tolist() == [0.9375]
    with pytest.raises(ArgumentError, match=r"decay=1.5"):
        optim.with_ema(optim.sgd(0.1), 1.5)


def test_schedules():
    at = lambda rate, steps: [round(float(rate(torch.tensor(i))), 6) for i in steps]  # noqa: E731
    assert at(optim.constant(2.0, warmup=2), (0, 1, 5)) == [1.0, 2.0, 2.0]
    cosine = optim.cosine(1.0, steps=10, warmup=2, min_factor=0.2)
    expected = [0.5, 1.0] + [0.2 + 0.4 * (1 + math.cos(math.pi * i / 8)) for i in range(9)]
    assert at(cosine, range(11)) == pytest.approx(expected, abs=1e-6)
    points = [(2, 1.0), (4, 3.0), (8, 1.0)]
    assert at(optim.piecewise(points), (0, 2, 3, 4, 6, 8, 20)) == [1, 1, 2, 3, 2, 1, 1]
    assert at(optim.piecewise(points, interpolate=False), (0, 2, 3, 4, 7, 8, 20)) == [1, 1, 1, 3, 3, 1, 1]
    assert optim.piecewise([(0, 0.5)])(torch.tensor(3)).dtype == torch.float32
    with pytest.raises(ConfigError, match="steps 2, 2"):
        optim.piecewise([(2, 1.0), (2, 3.0)])


def test_clip_by_value_keeps_what_is_not_finite_visible():
    rule = optim.clip_by_value(0.5)
    grads = {"w": torch.tensor([math.nan, math.inf, -2.0, 0.25])}
    clipped = rule.update(grads, rule.init(grads), grads)[0]["w"]
    assert clipped[0].isnan() and clipped[1:].tolist() == [0.5, -0.5, 0.25]
    with pytest.raises(ArgumentError, match="limit=0"):
        optim.clip_by_value(0)


def test_nesterov_needs_momentum():
    with pytest.raises(ArgumentError, match=r"Write momentum=0.9"):
        optim.sgd(0.1, nesterov=True)
