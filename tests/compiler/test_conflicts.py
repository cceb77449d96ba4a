"""Operands that disagree: an error that asks, or with conflicts="auto" a choice that the Program lists."""

from __future__ import annotations

import pytest
import torch

import functitan as ft

MESH = ft.make_mesh({"data": 2, "tensor": 2}, simulate=True)


def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x + y


def operands() -> tuple[ft.Array, ft.Array]:
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    return ft.device_put(x, ft.P("data", None), MESH), ft.device_put(y, ft.P("tensor", None), MESH)


def test_asked() -> None:
    with pytest.raises(
        ft.FunctitanError, match=r"(?s)split over data in one operand.*would become.*Write ft.constrain"
    ):
        ft.compile(add, mesh=MESH)(*operands())


def test_settled_by_choice() -> None:
    """The choice says what becomes of the operand and what that sends; it gives no advice."""
    compiled = ft.compile(add, mesh=MESH, conflicts="auto")
    x, y = operands()
    ((line, text),) = compiled.lower(x, y).choices
    assert line.startswith("test_conflicts.py:")
    assert "becomes (data, None) (64 B sent per rank)" in text and "Write" not in text
    assert torch.equal(compiled(x, y).full(), x.full() + y.full())
