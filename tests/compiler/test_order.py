"""Results are computed one after the other; collectives and bodies stay where they are."""

from __future__ import annotations

import torch

import functitan as ft
from functitan import tree
from tests.compiler.mlp import lowered


def names(program: ft.Program) -> list[str]:
    return [str(n.target).split(".")[1] for n in program.graph.nodes if n.op == "call_function"]


def test_result_by_result() -> None:
    """Written as all sines, then all products; computed leaf by leaf."""

    def step(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        waves = tree.map(torch.sin, state)
        return tree.map(lambda w: w * 2, waves)

    mesh = ft.make_mesh({"data": 1})
    program = ft.compile(step, mesh=mesh).lower({k: torch.ones(2) for k in "abc"})
    assert names(program) == ["sin", "mul"] * 3


def test_what_all_results_need_comes_once_and_first() -> None:
    def step(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        total = sum((w.sum() for w in state.values()), torch.zeros(()))
        return tree.map(lambda w: w - total, state)

    program = ft.compile(step, mesh=ft.make_mesh({"data": 1})).lower({k: torch.ones(2) for k in "ab"})
    assert [n for n in names(program) if n in ("sum", "sub")] == ["sum", "sum", "sub", "sub"]
    program.graph.lint()


def test_the_order_of_collectives_is_that_of_the_trace() -> None:
    program = lowered(fsdp=2, tensor=2)
    program.graph.lint()
    moves = [n for n in program.graph.nodes if "collective" in n.meta]
    assert moves and all(next(iter(n.users)) is n.next for n in moves), "each is waited for where it is started"
