"""What happens between compiled pieces: operands in the order that code was compiled for, and little else."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import functitan as ft
from functitan import _torch, tree
from functitan.compiler.by_value import difference
from functitan.sharding.array import on_mesh

MESH = {"data": 1}


def run_op_by_op(monkeypatch: pytest.MonkeyPatch, *, turned: bool) -> None:
    """In place of a compiler: graphs run op by op, and insist on the order of their operands. Nothing of what they do is
    counted.

    Args:
        turned: matrices come back in another order than the graph gives them.
    """

    def compile_graph(module: torch.fx.GraphModule, values: list[torch.Tensor]) -> Callable[..., Any]:
        flat = any(isinstance(n, torch.SymInt) for v in values for n in v.shape)
        strides = [None if flat else v.stride() for v in values]

        def run(*operands: torch.Tensor) -> list[torch.Tensor]:
            profile = sys.getprofile()
            sys.setprofile(None)
            try:
                with _disable_current_modes():
                    for x, stride in zip(operands, strides, strict=True):
                        assert x.numel() <= 1 or (x.stride() == stride if stride is not None else x.ndim == 1)
                    found = module(*operands)
                    return [x.mT.contiguous().mT if turned and x.ndim > 1 else x for x in found]
            finally:
                sys.setprofile(profile)

        return run

    monkeypatch.setattr(_torch, "compile_graph", compile_graph)


@pytest.fixture
def turning_code(monkeypatch: pytest.MonkeyPatch) -> None:
    run_op_by_op(monkeypatch, turned=True)


@pytest.fixture
def plain_code(monkeypatch: pytest.MonkeyPatch) -> None:
    run_op_by_op(monkeypatch, turned=False)


def both(f: Any, *args: Any) -> None:
    """Compiled code and op by op give the same, twice."""
    mesh = ft.make_mesh(MESH)
    want = ft.compile(f, mesh=mesh)(*args)
    compiled = ft.compile(f, mesh=mesh, backend="inductor")
    for _ in range(2):
        errors = map(difference, tree.leaves(compiled(*args)), tree.leaves(want))
        assert max(errors) < 1e-12


def rows(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.usefixtures("turning_code")
@pytest.mark.parametrize("remat", [None, ft.nothing_saveable], ids=str)
def test_operands_in_any_order_reach_code_in_its_own(remat: Any) -> None:
    """A transposed argument, stack and carry, outputs per step and results in another order, within one step."""

    def block(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.tanh(x.mT @ w)
        return y.mT.sin().mT.mT, (x @ w).mT

    def loss(w: torch.Tensor, x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        first = ft.region(lambda a: (a.mT @ a).mT.cos().mT)(x + shift)
        last, ys = ft.scan(block, first.mT, w.mT, remat=remat)
        return (last * ys.sum(0)).sum() + (ys.mT @ w).square().sum()

    def step(w: torch.Tensor, x: torch.Tensor, shift: torch.Tensor) -> Any:
        value, (gw, gx) = ft.value_and_grad(loss, argnums=(0, 1))(w, x, shift)
        return w - 0.1 * gw, gx.mT, value

    w, x, shift = rows(3, 4, 4) / 4, rows(4, 4).mT, rows(4, 8)[:, ::2]
    both(step, w, x, shift)
    both(step, w.mT, x, shift.mT)  # the same program, arguments in another order


@pytest.mark.usefixtures("turning_code")
def test_an_argument_in_another_order_after_the_first_call() -> None:
    mesh = ft.make_mesh(MESH)
    compiled = ft.compile(lambda x, y: (x * 2 + y, (x @ y).sum(0)), mesh=mesh, backend="inductor", max_traces=1)
    x, y = rows(4, 4), rows(4, 4) + 1
    for a, b in ((x, y), (x.mT, y), (x, rows(8, 8)[::2, ::2])):
        total, product = compiled(a, b)
        assert torch.equal(total, a * 2 + b)
        assert difference(product, (a @ b).sum(0)) < 1e-12


class Counted(TorchDispatchMode):
    """Counts what is dispatched to aten."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops[func.__name__] += 1
        return func(*args, **(kwargs or {}))


def train_step(layers: int) -> Callable[[], None]:
    """A function that takes one step of a scanned stack of matrices under AdamW, with donated state."""
    mesh = ft.make_mesh(MESH)
    rule = ft.optim.chain(ft.optim.clip_by_global_norm(1.0), ft.optim.adamw(1e-3))

    def block(x: torch.Tensor, w: Any) -> tuple[torch.Tensor, None]:
        return x + torch.tanh(x @ w["up"]) @ w["down"], None

    def step(state: Any, x: torch.Tensor) -> Any:
        loss, grads = ft.value_and_grad(lambda params: ft.scan(block, x, params)[0].square().mean())(state[0])
        updates, opt = rule.update(grads, state[1], state[0])
        return (ft.optim.apply_updates(state[0], updates), opt), loss

    params = {"up": rows(layers, 4, 8), "down": rows(layers, 8, 4)}
    state = tree.map(lambda x: on_mesh(x, mesh), (params, rule.init(params)))
    x = rows(2, 4)
    compiled = ft.compile(step, mesh=mesh, donate_argnums=0, backend="inductor")

    def take() -> None:
        nonlocal state
        state, _ = compiled(state, x)

    take()
    return take


def dispatched(take: Callable[[], None]) -> Counter[str]:
    with Counted() as counted:
        take()
    return counted.ops


def called(take: Callable[[], None]) -> Counter[str]:
    """The Python functions that run outside of compiled code, by name."""
    found: Counter[str] = Counter()

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            found[frame.f_code.co_name] += 1

    sys.setprofile(note)
    try:
        take()
    finally:
        sys.setprofile(None)
    return found


@pytest.mark.usefixtures("plain_code")
def test_what_happens_between_graphs() -> None:
    """A layer costs one call of aten, which puts its gradients into their stacks, and few Python functions.

    Beside that a step takes stacks apart (two of parameters for each pass, two of gradients), makes room for those, and
    hands leaves flat to what updates them: their sums of squares, and parameters, gradients and both moments.
    """
    small, large = train_step(2), train_step(5)
    ops = dispatched(small)
    assert ops == {
        "unbind.int": 3 * 2,
        "new_empty.default": 2,
        "_foreach_copy_.default": 2,
        "view.default": 2 * (1 + 4),
        "detach.default": 1,  # of the argument that is no Array
    }
    assert dispatched(large) - ops == {"_foreach_copy_.default": 3}
    calls = called(large) - called(small)
    assert sum(calls.values()) == 3 * 16, calls
