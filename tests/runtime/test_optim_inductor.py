"""An optimizer's update compiled by inductor: once for a whole schedule, with its state in fewer bits."""

from __future__ import annotations

import pytest
import torch

import functitan as ft
from functitan import _torch, optim, tree


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.slow
def test_a_whole_schedule_is_one_compiled_graph_and_a_leaf_one_orthogonalisation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Stacks of three and of five matrices: two calls, however many matrices and steps. Bits are those of plain torch
    where rounding says how: Muon as torch rounds it, moments of any width between its steps."""
    graphs: list[str] = []
    real = _torch.compile_graph

    def noted(module: torch.fx.GraphModule, values: list[torch.Tensor]) -> object:
        graphs.append(module.code)
        return real(module, values)

    monkeypatch.setattr(_torch, "compile_graph", noted)
    rate = optim.warmup_stable_decay(0.1, steps=8, warmup=2)
    muon = optim.muon(rate, as_torch=True, ns_dtype=torch.float32)
    rules = {
        "int8": optim.with_low_bit_state(muon, "int8", block=4, min_size=0),
        "random": optim.with_low_bit_state(muon, "bfloat16", stochastic=True, min_size=0),
    }
    rule = optim.partition(rules, [("a", "int8"), ("b", "random")])
    params = {"a": _random(3, 8, 8), "b": _random(5, 4, 12, seed=1)}

    def step(grads: dict, state: object, params: dict) -> tuple:
        updates, state = rule.update(grads, state, params)
        return optim.apply_updates(params, updates), state

    compiled = ft.compile(step, mesh=ft.make_mesh({"fsdp": 1}), backend="inductor", max_traces=1)
    mine, state = params, rule.init(params)
    plain, own = params, rule.init(params)
    for i in range(8):
        grads = {k: _random(*p.shape, seed=10 + i) for k, p in params.items()}
        mine, state = compiled(grads, state, mine)
        plain, own = step(grads, own, plain)
    assert len(graphs) == 1 and graphs[0].count("functitan.newton_schulz") == 2
    for (path, a), b in zip(tree.flatten_with_paths((mine, state))[0], tree.leaves((plain, own)), strict=True):
        if path.endswith("lr"):  # a schedule in float32, whose products may be contracted
            torch.testing.assert_close(a, b, rtol=1e-6, atol=0)
        else:
            assert torch.equal(a, b), path
