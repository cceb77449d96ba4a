"""A step with donated state never holds the state twice: storages that are alive, counted op by op on a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import functitan as ft
from functitan import _torch, tree
from functitan.compiler.by_value import difference
from functitan.sharding.array import on_mesh
from tests.compiler.test_memory import Live

D, ROWS = 64, 8
LEAVES = 6
STATE = 3 * LEAVES * D * D * 4  # weights and two moments
GRADIENTS = LEAVES * D * D * 4
ACTIVATIONS = (LEAVES + 1) * ROWS * D * 4


def train_step(state: Any, x: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """A stack of matrices, not scanned, under AdamW with clipping."""
    rule = ft.optim.chain(ft.optim.clip_by_global_norm(1.0), ft.optim.adamw(1e-2))

    def loss_fn(params: Any) -> torch.Tensor:
        y = x
        for name in sorted(params):
            y = torch.tanh(y @ params[name])
        return (y * y).sum()

    loss, grads = ft.value_and_grad(loss_fn)(state["params"])
    updates, opt = rule.update(grads, state["opt"], state["params"])
    return {"params": ft.optim.apply_updates(state["params"], updates), "opt": opt}, loss


def first_state(dtype: torch.dtype = torch.float32) -> Any:
    generator = torch.Generator().manual_seed(0)
    params = {f"w{i}": torch.randn(D, D, generator=generator, dtype=dtype) / 8 for i in range(LEAVES)}
    rule = ft.optim.chain(ft.optim.clip_by_global_norm(1.0), ft.optim.adamw(1e-2))
    return {"params": params, "opt": rule.init(params)}


def peak(compiled: Callable[..., Any], state: Any, x: torch.Tensor) -> tuple[int, Any]:
    """The most bytes of a call, what it is given included; the arguments' own names die with the call."""
    given = [state]
    with Live([t for a in tree.leaves(state) for t in a.shards]) as live:
        out = compiled(given.pop(), x)
    return live.peak, out


@pytest.mark.parametrize("axes", [{"fsdp": 1}, {"fsdp": 2}], ids=str)
def test_no_second_copy_of_the_state(axes: dict[str, int]) -> None:
    """Op by op; on two simulated ranks the state is whole on each, so all is held twice and no more."""
    mesh = ft.make_mesh(axes, simulate=True)
    compiled = ft.compile(train_step, mesh=mesh, donate_argnums=0)
    x = torch.randn(ROWS, D)
    state = tree.map(lambda t: on_mesh(t, mesh), first_state())
    compiled.lower(state, x)
    state, _ = compiled(state, x)  # constants and functions are made
    found, _ = peak(compiled, state, x)
    scratch = 8 * D * D * 4  # a few values of the leaf at work, in float64 where its norm is taken
    assert found / mesh.size < STATE + GRADIENTS + ACTIVATIONS + scratch < 2 * STATE


def test_compiled_updates_are_written_in_place() -> None:
    """Every leaf of the new state is where the old one was, and equals the eager step's."""
    mesh = ft.make_mesh({"fsdp": 1})
    x = torch.randn(ROWS, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    plain, loss = ft.compile(train_step, mesh=mesh)(first_state(torch.float64), x)
    state = tree.map(lambda t: on_mesh(t, mesh), first_state(torch.float64))
    before = [a.shards[0].data_ptr() for a in tree.leaves(state) if a.ndim]
    compiled = ft.compile(train_step, mesh=mesh, donate_argnums=0, backend="inductor")
    after, found = compiled(state, x)
    assert [a.shards[0].data_ptr() for a in tree.leaves(after) if a.ndim] == before
    assert abs(found - loss) < 1e-10
    errors = [difference(a.full(), b) for a, b in zip(tree.leaves(after), tree.leaves(plain), strict=True)]
    assert max(errors) < 1e-6  # scalars of the optimizer are float32
    # The next step donates what this one returned.
    assert all(isinstance(a, ft.Array) for a in tree.leaves(compiled(after, x)[0]))


def test_leaves_of_any_shape_are_one_compiled_update(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    real = _torch.compile_graph

    def noted(module: torch.fx.GraphModule, values: list[torch.Tensor]) -> object:
        sizes.append(len(values))
        return real(module, values)

    monkeypatch.setattr(_torch, "compile_graph", noted)
    mesh = ft.make_mesh({"fsdp": 1})

    def step(state: Any, rate: torch.Tensor) -> Any:
        return tree.map(lambda w: w - rate * torch.sin(w), state)

    shapes = [(3,), (4, 5), (2, 3, 4), (7, 1)]
    values = {f"w{i}": torch.randn(*shape) for i, shape in enumerate(shapes)}
    rate = torch.tensor(0.5)
    state = tree.map(lambda t: on_mesh(t, mesh), values)
    after = ft.compile(step, mesh=mesh, donate_argnums=0, backend="inductor")(state, rate)
    assert sizes == [2]
    for name, value in values.items():
        torch.testing.assert_close(after[name].full(), value - 0.5 * torch.sin(value))


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_results_that_alias_or_cross_donated_inputs(backend: str) -> None:
    """Passed through, swapped, viewed beside an update, and returned twice: each result is its own and right."""
    mesh = ft.make_mesh({"fsdp": 1})

    def step(state: Any) -> Any:
        a, b, c, d = (state[k] for k in "abcd")
        return {"a": b * 2, "b": a * 3, "c": c + 1, "view": c.reshape(-1), "d": d, "again": d, "row": a[0]}

    values = {k: torch.arange(6.0).reshape(2, 3) + i for i, k in enumerate("abcd")}
    want = step({k: v.clone() for k, v in values.items()})
    state = tree.map(lambda t: on_mesh(t, mesh), values)
    out = ft.compile(step, mesh=mesh, donate_argnums=0, backend=backend)(state)
    found = tree.map(lambda v: v.full() if isinstance(v, ft.Array) else v, out)
    for name in want:
        torch.testing.assert_close(found[name], want[name], rtol=0, atol=0)
    places = [
        t.untyped_storage().data_ptr() for t in (v.shards[0] if isinstance(v, ft.Array) else v for v in out.values())
    ]
    assert len(set(places)) == len(places)


def test_a_plain_tensor_in_a_donated_argument_keeps_its_value() -> None:
    mesh = ft.make_mesh({"fsdp": 1})
    mine = torch.ones(4, 4)
    out = ft.compile(lambda s: {"w": s["w"] + 1}, mesh=mesh, donate_argnums=0, backend="inductor")({"w": mine})
    assert torch.equal(mine, torch.ones(4, 4))
    assert isinstance(out["w"], torch.Tensor) and torch.equal(out["w"], torch.full((4, 4), 2.0))
