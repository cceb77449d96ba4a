"""How a graph is cut into compiled pieces, and which of them may take an input's memory."""

from __future__ import annotations

from typing import Any

import torch

import functitan as ft
from functitan import tree
from functitan.compiler.donation import holders, overwritable, successors
from functitan.runtime.inductor import signature
from functitan.runtime.pieces import Piece, cut

MESH = ft.make_mesh({"data": 1})


def pieces(f: Any, *args: Any) -> tuple[list[Piece], ft.Program]:
    program = ft.compile(f, mesh=MESH, donate_argnums=0).lower(*args)
    views = holders(program)
    return [p for p in cut(program.graph, overwritable(program, views), views) if isinstance(p, Piece)], program


def clipped(state: Any, grads: Any) -> Any:
    norm = sum((g.square().sum() for g in grads.values()), torch.zeros(())).sqrt()
    return tree.map(lambda w, g: w - g / norm, state, grads)


def leaves(*shapes: tuple[int, ...]) -> Any:
    return {f"w{i}": torch.ones(shape) for i, shape in enumerate(shapes)}


def test_updates_and_norms_are_cut_by_leaf() -> None:
    shapes = [(3,), (4, 5), (6, 7, 8)]
    found, _ = pieces(clipped, leaves(*shapes), leaves(*shapes))
    kinds = [(p.flat, len(p.writes)) for p in found]
    assert kinds == [*[(True, 0)] * 3, (False, 0), *[(True, 1)] * 3]
    assert len({signature(p) for p in found}) == 3


def test_one_large_piece_where_nothing_is_donated_or_elementwise() -> None:
    found, _ = pieces(lambda state, x: (x @ state["w"]).tanh() @ state["w"], {"w": torch.ones(4, 4)}, torch.ones(2, 4))
    assert [(p.flat, p.writes) for p in found] == [(False, {})]


def test_another_constant_or_dtype_is_another_piece() -> None:
    def step(state: Any) -> Any:
        return {"a": state["a"] * 2, "b": state["b"] * 3, "c": state["c"] * 2}

    found, _ = pieces(step, {"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(2, dtype=torch.float64)})
    assert len({signature(p) for p in found}) == 3


def test_an_input_that_is_read_later_is_not_written_over() -> None:
    """The body call reads the old weight after the piece that computes the new one."""

    def step(state: Any, x: torch.Tensor) -> Any:
        new = state["w"] * 2
        y = ft.region(lambda w, x: x @ w)(state["w"], x * new.sum())
        return {"w": new}, y

    found, program = pieces(step, {"w": torch.ones(3, 3)}, torch.ones(2, 3))
    assert successors(program) == {0: 0}
    assert all(not p.writes for p in found)


def test_an_input_whose_view_a_body_hands_on_is_not_written_over() -> None:
    def step(state: Any) -> Any:
        view = ft.region(lambda w: w.reshape(-1))(state["w"])
        return {"w": state["w"] + 1}, view

    found, _ = pieces(step, {"w": torch.ones(3, 3)})
    assert all(not p.writes for p in found)


def test_leaves_are_replaced_by_path() -> None:
    """State that is returned in another order, among leaves of one shape."""
    _, program = pieces(lambda s: {"z": s["b"] + 1, "b": s["a"] + 1, "a": s["b"] * 2}, leaves_ab())
    assert [(program.outputs[j], program.inputs[i]) for j, i in sorted(successors(program).items())] == [
        ("a", "s/a"),
        ("b", "s/b"),
    ]


def leaves_ab() -> Any:
    return {"a": torch.ones(2), "b": torch.ones(2)}
