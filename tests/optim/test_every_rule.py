"""What holds for every rule: the numbers of one device on a mesh, one structure from init on, and no input written."""

import pytest
import torch

import functitan as ft
from functitan import optim, tree
from functitan.optim import Blocks

SHAPES = {"wq": (4, 8, 16), "wk": (4, 8, 8), "conv": (4, 8, 2, 3), "norm": (16,), "scalar": ()}
SPECS = {
    "wq": ft.P(None, "fsdp", "tensor"), "wk": ft.P(None, "fsdp", "tensor"), "norm": ft.P("fsdp"),
    "conv": ft.P(None, ("fsdp", "tensor"), None, None),
}  # fmt: skip
STEPS = optim.warmup_stable_decay(0.1, steps=10, warmup=2)


def _matrices(rule):
    return optim.partition(
        {"matrices": rule, "rest": optim.sgd(0.1)}, [("w?", "matrices"), ("conv", "matrices"), ("*", "rest")]
    )


def _wide(factory, layout, **settings):
    axes = () if layout == "gathered" else ("fsdp", "tensor")
    return _matrices(
        factory(
            STEPS, layout=layout, axes=axes, convs={"conv": 1}, blocks={"wq": Blocks(-1, (4, 12))}, ns_dtype=torch.float64,
            **settings,
        )
    )  # fmt: skip


RULES = {
    "sgd": lambda: optim.sgd(STEPS, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adamw": lambda: optim.adamw(STEPS, weight_decay=0.5),
    "lion": lambda: optim.lion(STEPS, weight_decay=0.1),
    "schedule-free": lambda: optim.schedule_free_adamw(STEPS, weight_decay=0.1),
    "injected": lambda: optim.inject_hyperparams(optim.adamw)(lr=STEPS, b1=optim.constant(0.9, warmup=3)),
    "muon stacked": lambda: _wide(optim.muon, "stacked"),
    "muon owned": lambda: _wide(optim.muon, "owned", momentum_form="sum"),
    "muon gathered": lambda: _wide(optim.muon, "gathered", nesterov=False),
    "normuon stacked": lambda: _wide(optim.normuon, "stacked", momentum_form="sum"),
    "normuon owned": lambda: _wide(optim.normuon, "owned"),
    "guarded average of a clip": lambda: optim.skip_nonfinite(
        optim.with_ema(optim.chain(optim.clip_by_value(0.5), optim.adamw(STEPS), optim.qk_clip(1.0)), 0.5), max_norm=1.0
    ),
}
LOGITS = {"": torch.tensor([[2.0, 0.5, 4.0, 1.0]] * 4, dtype=torch.float64)}


def _tree(i):
    gen = torch.Generator().manual_seed(i)
    return {k: torch.randn(s, generator=gen, dtype=torch.float64) for k, s in SHAPES.items()}


def _stepped(rule):
    extra = {"max_logits": LOGITS} if rule.extra else {}

    def step(grads, state, params):
        updates, state = rule.update(grads, state, params, **extra)
        return optim.apply_updates(params, updates), state

    return step


@pytest.mark.parametrize("name", list(RULES))
def test_a_mesh_gives_the_numbers_of_one_device_from_one_structure(name):
    rule, mesh = RULES[name](), ft.make_mesh({"fsdp": 2, "tensor": 2}, simulate=True)
    params, grads = _tree(0), [_tree(i) for i in (1, 2, 3)]
    put = lambda values: {k: ft.device_put(x, SPECS[k], mesh) if k in SPECS else x for k, x in values.items()}  # noqa: E731
    spread = put(params)
    spread_state = ft.compile(rule.init, mesh=mesh)(spread)
    state = rule.init(params)
    assert tree.structure(spread_state) == tree.structure(state)
    laid = lambda t: [(x.shape, x.dtype, getattr(x, "spec", None)) for x in tree.leaves(t)]  # noqa: E731
    before, plain = laid(spread_state), _stepped(rule)
    step = ft.compile(plain, mesh=mesh)
    for g in grads:
        params, state = plain(g, state, params)
        spread, spread_state = step(put(g), spread_state, spread)
        assert laid(spread_state) == before
    assert tree.structure(spread_state) == tree.structure(state)
    found = tree.map(lambda x: x.full() if isinstance(x, ft.Array) else x, (spread, spread_state))
    for (path, a), b in zip(tree.flatten_with_paths(found)[0], tree.leaves((params, state)), strict=True):
        assert (a - b).abs().max() <= 1e-10 * max(1.0, float(b.abs().max())), path


@pytest.mark.parametrize("name", list(RULES))
def test_update_is_a_function_and_writes_no_input(name):
    rule, params, grads = RULES[name](), _tree(0), _tree(1)
    state = rule.init(params)
    step = _stepped(rule)
    _, state = step(grads, state, params)
    before = [t.clone() for t in tree.leaves((params, grads, state))]
    first, second = step(grads, state, params), step(grads, state, params)
    assert all(torch.equal(a, b) for a, b in zip(before, tree.leaves((params, grads, state)), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(first), tree.leaves(second), strict=True))
    assert tree.structure(first[1]) == tree.structure(state)
