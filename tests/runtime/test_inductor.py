"""The backend "inductor": each graph compiled once, equal to eager."""

from __future__ import annotations

import threading

import pytest
import torch
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.exc import CppCompileError

import functitan as ft
from functitan import _torch, tree
from functitan.compiler.by_value import difference
from functitan.errors import ArgumentError
from functitan.runtime.inductor import BackendError

MESH = {"fsdp": 1}


def _step(layers: int) -> tuple:
    """A scanned model's train step with its arguments."""
    generator = torch.Generator().manual_seed(0)

    def block(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.tanh(x @ w), None

    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        y, _ = ft.scan(block, x, w)
        return (y * y).sum()

    def step(w: torch.Tensor, x: torch.Tensor, lr: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        value, g = ft.value_and_grad(loss)(w, x)
        return w - lr * g, value

    w = torch.randn(layers, 8, 8, generator=generator) / 3
    return step, (w, torch.randn(4, 8, generator=generator), torch.tensor(0.1))


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Notes every graph that is compiled."""
    found: list[str] = []
    real = _torch.compile_graph

    def noted(module: torch.fx.GraphModule, values: list[torch.Tensor]) -> object:
        found.append(module.code)
        return real(module, values)

    monkeypatch.setattr(_torch, "compile_graph", noted)
    return found


def test_equals_eager_and_compiles_each_graph_once(compiles: list[str]) -> None:
    """The same number of graphs whatever the depth, and none for a second step or another learning rate."""
    counts = []
    for layers in (2, 5):
        step, (w, x, lr) = _step(layers)
        mesh = ft.make_mesh(MESH)
        eager = ft.compile(step, mesh=mesh)(w, x, lr)
        compiled = ft.compile(step, mesh=mesh, backend="inductor", max_traces=1)
        before = len(compiles)
        found = compiled(w, x, lr)
        counts.append(len(compiles) - before)
        assert max(map(difference, tree.leaves(found), tree.leaves(eager))) < 1e-6
        compiled(found[0], x, torch.tensor(0.05))
        assert len(compiles) - before == counts[-1]
    assert counts[0] == counts[1]


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch, compiles: list[str]) -> list[int]:
    """For each wait for the kernels of a graph, how many graphs inductor had worked on by then."""
    found: list[int] = []
    real = AsyncCompile.wait

    def noted(self: AsyncCompile, scope: dict[str, object]) -> None:
        found.append(len(compiles))
        real(self, scope)

    monkeypatch.setattr(AsyncCompile, "wait", noted)
    return found


def test_kernels_of_all_graphs_are_built_together(
    waits: list[int], compiles: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    """The C++ compiler is at work on one graph's kernels beside inductor's work on the next."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    step, args = _step(2)
    ft.compile(step, mesh=ft.make_mesh(MESH), backend="inductor")(*args)
    assert len(compiles) > 2
    # A graph of extern calls alone has no kernel to wait for, or waits in vain.
    assert len(waits) > 1 and set(waits) == {len(compiles)}


def test_kernels_of_other_threads_are_waited_for_at_once(waits: list[int]) -> None:
    with _torch.kernels_built_together():
        AsyncCompile().wait({})
        assert waits == []
        other = threading.Thread(target=AsyncCompile().wait, args=({},))
        other.start()
        other.join()
        assert waits == [0]
    assert waits == [0, 0]


def test_a_compiler_that_fails_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(self: AsyncCompile, scope: dict[str, object]) -> None:
        raise CppCompileError(["g++", "main.cpp"], "main.cpp: No space left on device")

    monkeypatch.setattr(AsyncCompile, "wait", failing)
    step, args = _step(2)
    with pytest.raises(BackendError, match=r'(?s)failed on a kernel.*backend="eager".*g\+\+ main.cpp.*No space left'):
        ft.compile(step, mesh=ft.make_mesh(MESH), backend="inductor")(*args)


def test_no_compiler_is_named_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> object:
        raise _torch.MissingCompilerError("No working C++ compiler found")

    monkeypatch.setattr(_torch, "compile_graph", missing)
    step, args = _step(2)
    with pytest.raises(BackendError, match=r'needs a C\+\+ compiler.*use backend="eager"'):
        ft.compile(step, mesh=ft.make_mesh(MESH), backend="inductor")(*args)


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"backend='inductr' is not one of eager, inductor. Did you mean"):
        ft.compile(lambda x: x, mesh=ft.make_mesh(MESH), backend="inductr")
