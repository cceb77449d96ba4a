"""One device against simulated meshes, in float64: every mesh, with and without sequence sharding, every policy."""

from __future__ import annotations

import pytest

import functitan as ft
from tests.compiler.llama import setup

MESHES = {
    "fsdp4": {"fsdp": 4},
    "tensor4": {"tensor": 4},
    "fsdp2-tensor2": {"fsdp": 2, "tensor": 2},
    "data2-fsdp2-tensor2": {"data": 2, "fsdp": 2, "tensor": 2},
}
POLICIES = {
    "nothing_saveable": ft.nothing_saveable,
    "everything_saveable": ft.everything_saveable,
    "dots_saveable": ft.dots_saveable,
    "save_only_these_names": ft.save_only_these_names("none_such"),
}


@pytest.mark.parametrize("sequence_sharding", [True, False], ids=["seq", "whole"])
@pytest.mark.parametrize("mesh", MESHES)
def test_train_step_equals_one_device(mesh: str, sequence_sharding: bool) -> None:
    """Loss, gradients, and updates from given gradients; every layout has a second opinion."""
    s = setup(MESHES[mesh], sequence_sharding=sequence_sharding)
    report = ft.check(s.step, (s.state, s.batch), s.mesh, s.rules)
    assert report, str(report)
    assert max(r.error for r in report.rows if r.kind != "plain") <= 1e-10
    assert {r.kind for r in report.rows} == {"plain", "output", "gradient", "update"}
    assert report.verification is not None
    assert report.verification.ok and not report.verification.unchecked


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("sequence_sharding", [True, False], ids=["seq", "whole"])
@pytest.mark.parametrize("mesh", MESHES)
def test_gradients_equal_with_every_policy(mesh: str, sequence_sharding: bool, policy: str) -> None:
    s = setup(MESHES[mesh], sequence_sharding=sequence_sharding, remat=POLICIES[policy], batch=4, seq=8)
    report = ft.check(s.loss_and_grad, (s.state.params, s.batch), s.mesh, s.rules, layouts=False)
    assert report, str(report)


@pytest.mark.parametrize("kv_heads", [2, 1])
def test_grouped_query_attention_on_tensor(kv_heads: int) -> None:
    """Query heads of one key-value head stay together; key-value heads that the axis divides are split with them."""
    s = setup({"fsdp": 2, "tensor": 2 if kv_heads == 2 else 1}, kv_heads=kv_heads, batch=4, seq=8)
    assert ft.check(s.loss_and_grad, (s.state.params, s.batch), s.mesh, s.rules)


def test_tied_embedding() -> None:
    s = setup({"fsdp": 2, "tensor": 2}, tied=True, batch=4, seq=8)
    assert ft.check(s.loss_and_grad, (s.state.params, s.batch), s.mesh, s.rules)


def test_bfloat16_compute() -> None:
    """Compute in bfloat16 on float32 parameters: the trace in float64 is the same function."""
    import torch

    s = setup({"fsdp": 2, "tensor": 2}, compute_dtype=torch.bfloat16, batch=4, seq=8)
    report = ft.check(s.loss_and_grad, (s.state.params, s.batch), s.mesh, s.rules)
    assert report, str(report)


def test_a_wrong_rule_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that cannot fail is none: break a sharding rule, and the first node that differs is named."""
    import torch

    from functitan.sharding.op_rules import base

    op = torch.ops.aten.silu.default

    def linear_silu(call: base.Call) -> base.Equation:
        return base.parse("...->...", call, linear=[frozenset({0})])

    monkeypatch.setitem(base._RULES, op, linear_silu)
    mesh = ft.make_mesh({"tensor": 2}, simulate=True)
    x = ft.device_put(torch.randn(4, 6), ft.P(None, "tensor"), mesh)
    w = ft.device_put(torch.randn(6, 3), ft.P("tensor", None), mesh)

    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(x @ w).sum()

    report = ft.check(f, (x, w), mesh, layouts=False)
    assert not report
    assert "silu" in report.first and "test_llama_meshes.py" in report.first
    with pytest.raises(ft.FunctitanError, match=r"silu.*differs"):
        ft.check(f, (x, w), mesh)
