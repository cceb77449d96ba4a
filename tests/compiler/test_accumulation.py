"""Microbatches on meshes: gradients equal those of one big batch, and the collectives are those of the formula."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch

import functitan as ft
from functitan import tree
from functitan.compiler.by_value import difference
from functitan.nn.models import llama3
from functitan.sharding.array import Array
from tests.compiler.llama import Setup, param_bytes, setup

LAYERS, MICROBATCHES = 2, 2
PENDING = ("data", "fsdp", "tensor")
MESHES = {
    "data2": {"data": 2},
    "fsdp4": {"fsdp": 4},
    "data2-fsdp2": {"data": 2, "fsdp": 2},
    "tensor2": {"tensor": 2},
    "fsdp2-tensor2": {"fsdp": 2, "tensor": 2},
}


def means(s: Setup, pending: Any, n: int = MICROBATCHES, remat: Any = None) -> Any:
    """(params, batch) -> loss and gradient, of means over the whole batch."""

    def loss(params: Any, batch: Any) -> Any:
        return llama3.loss(params, batch, s.config, remat=remat)

    def function(params: Any, batch: Any) -> Any:
        (total, count), grads = ft.accumulate_grads(loss, n, pending=pending)(params, batch)
        return total / count, tree.map(lambda g: g / count, grads)

    return function


def wide(s: Setup) -> Any:
    """The parameters in float64."""
    declared = tree.map(lambda p: dataclasses.replace(p, dtype=torch.float64), llama3.declare(s.config))
    return ft.init(ft.random.key(0), declared, s.mesh, s.rules)


QUICK = {("data2-fsdp2", "pending"), ("fsdp2-tensor2", "sharded")}


@pytest.mark.parametrize(
    ("mesh", "kept"),
    [
        pytest.param(mesh, kept, marks=[] if (mesh, kept) in QUICK else pytest.mark.slow)
        for mesh in MESHES
        for kept in ("sharded", "pending")
    ],
)
def test_equal_to_one_device(mesh: str, kept: str) -> None:
    """Rows have unequal numbers of labels; layers are computed again in backward."""
    s = setup(MESHES[mesh], layers=LAYERS, dim=16, mlp_dim=16, heads=2, kv_heads=2, vocab=32, seq=8)
    f = means(s, PENDING if kept == "pending" else None, remat=ft.nothing_saveable)
    report = ft.check(f, (s.state.params, s.batch), s.mesh, s.rules)
    assert report, str(report)
    assert {r.kind for r in report.rows} == {"plain", "output", "gradient", "update"}


@pytest.mark.parametrize(
    "pending",
    [pytest.param(None, marks=pytest.mark.slow), pytest.param(("data",), marks=pytest.mark.slow), PENDING],
    ids=str,
)
def test_equal_to_one_big_batch(pending: Any) -> None:
    """The loss and gradient of the whole batch at once, in float64 on the same mesh."""
    s = setup({"data": 2, "fsdp": 2}, layers=LAYERS, dim=16, mlp_dim=16, vocab=32, seq=8, compute_dtype=torch.float64)
    params = wide(s)

    def at_once(params: Any, batch: Any) -> Any:
        total, count = llama3.loss(params, batch, s.config)
        return total / count

    want = ft.compile(ft.value_and_grad(at_once), mesh=s.mesh, rules=s.rules)(params, s.batch)
    found = ft.compile(means(s, pending), mesh=s.mesh, rules=s.rules)(params, s.batch)
    for a, b in zip(tree.leaves(found), tree.leaves(want), strict=True):
        a, b = (x.full() if isinstance(x, Array) else x for x in (a, b))
        assert a.dtype == torch.float64 and difference(a, b) <= 1e-10


# --- what is sent ------------------------------------------------------------------------------------------------


def sent(s: Setup, pending: Any) -> Counter:
    step = ft.compile(means(s, pending), mesh=s.mesh, rules=s.rules, passes=ft.Passes.off())
    program = step.lower(s.state.params, s.batch)
    found: Counter = Counter()
    for c in program.collectives():
        found[(c.kind, "+".join(c.axes), c.param.removeprefix("params/"), c.nbytes)] += c.count
    return found


def ring(nbytes: float, n: int) -> int:
    return int(nbytes * (n - 1) / n)


def reduce(nbytes: float, n: int) -> int:
    return int(-(-2 * nbytes * (n - 1) // n))


def gathers(s: Setup, n: int) -> Counter:
    """Each microbatch gathers each parameter forward and backward, the table forward only."""
    want: Counter = Counter()
    for path, nbytes in param_bytes(s).items():
        uses = 1 if path == "tok_embeddings" else 2
        want[("all_gather", "fsdp", path, ring(nbytes, n))] += uses * times(path) * MICROBATCHES
    return want


def times(path: str) -> int:
    return LAYERS if path.startswith("layers/") else 1


def stacked(path: str) -> int:
    """A sum over microbatches is of all layers of a parameter together."""
    return LAYERS if path.startswith("layers/") else 1


def scalars(axes: str, n: int) -> Counter:
    """Loss and count are added up once, however many microbatches there are."""
    return Counter({("all_reduce", axes, "", reduce(4, n)): 1, ("all_reduce", axes, "", reduce(8, n)): 1})


def test_sharded_gradients_are_scattered_in_every_microbatch() -> None:
    s = setup({"fsdp": 4}, layers=LAYERS)
    want = gathers(s, 4) + scalars("fsdp", 4)
    for path, nbytes in param_bytes(s).items():
        want[("reduce_scatter", "fsdp", path, ring(nbytes, 4))] += times(path) * MICROBATCHES
    assert sent(s, None) == want


def test_pending_gradients_are_scattered_once() -> None:
    s = setup({"fsdp": 4}, layers=LAYERS)
    want = gathers(s, 4) + scalars("fsdp", 4)
    for path, nbytes in param_bytes(s).items():
        want[("reduce_scatter", "fsdp", path, ring(nbytes * stacked(path), 4))] += 1
    assert sent(s, PENDING) == want


@pytest.mark.parametrize("pending", [None, "data"], ids=["sharded", "pending"])
def test_data_parallel(pending: Any) -> None:
    s = setup({"data": 4}, layers=LAYERS)
    want = scalars("data", 4)
    for path, nbytes in param_bytes(s).items():
        if pending:
            want[("all_reduce", "data", path, reduce(nbytes * stacked(path), 4))] += 1
        else:
            want[("all_reduce", "data", path, reduce(nbytes, 4))] += times(path) * MICROBATCHES
    assert sent(s, pending) == want


@pytest.mark.parametrize("pending", [None, "data", PENDING], ids=["sharded", "data", "pending"])
def test_hybrid_sharding(pending: Any) -> None:
    """Pending over data alone: scattered over fsdp in each microbatch, added up over data once, on the shard."""
    s = setup({"data": 2, "fsdp": 2}, layers=LAYERS)
    want = gathers(s, 2) + scalars("data+fsdp", 4)
    for path, nbytes in param_bytes(s).items():
        if pending == PENDING:
            want[("reduce_scatter", "fsdp", path, ring(nbytes * stacked(path), 2))] += 1
        else:
            want[("reduce_scatter", "fsdp", path, ring(nbytes, 2))] += times(path) * MICROBATCHES
        if pending:
            want[("all_reduce", "data", path, reduce(nbytes * stacked(path) / 2, 2))] += 1
        else:
            want[("all_reduce", "data", path, reduce(nbytes / 2, 2))] += times(path) * MICROBATCHES
    assert sent(s, pending) == want


def test_norm_scales_over_a_split_sequence_wait_as_well() -> None:
    """Under sequence sharding a norm's scale meets other rows on each rank of "tensor"."""
    s = setup({"tensor": 2}, layers=LAYERS)
    for pending, count in ((None, MICROBATCHES * (2 * LAYERS + 1)), ("tensor", 3)):
        found = sent(s, pending)
        norms = {k: n for k, n in found.items() if "norm" in k[2]}
        assert sum(norms.values()) == count
        assert {k[0] for k in norms} == {"all_reduce"}


def test_the_bytes_of_a_batch_do_not_move() -> None:
    """A batch that is split over ranks is cut into microbatches where it lies."""
    mesh = ft.make_mesh({"data": 2}, simulate=True)
    batch = ft.device_put(torch.arange(16.0).reshape(8, 2), ft.P("data", None), mesh)

    def f(w: torch.Tensor, x: torch.Tensor) -> Any:
        return ft.accumulate_grads(lambda w, x: ((x @ w).square().sum(), (x > 0).sum()), 2, pending="data")(w, x)

    w = torch.tensor([1.0, -1.0])
    step = ft.compile(f, mesh=mesh, passes=ft.Passes.off())
    kinds = Counter((c.kind, c.count) for c in step.lower(w, batch).collectives())
    assert kinds == {("all_reduce", 1): 3}  # loss, count, gradient, after the loop
    want = ft.accumulate_grads(lambda w, x: ((x @ w).square().sum(), (x > 0).sum()), 2)(w, batch.full())
    for a, b in zip(tree.leaves(step(w, batch)), tree.leaves(want), strict=True):
        torch.testing.assert_close(a, b)


def test_an_axis_that_the_mesh_lacks() -> None:
    s = setup({"fsdp": 2}, layers=LAYERS)
    with pytest.raises(ft.FunctitanError, match=r'unknown mesh axis "dat" in pending=.*Did you mean "data"'):
        ft.compile(means(s, "dat"), mesh=s.mesh, rules=s.rules).lower(s.state.params, s.batch)


# --- sums that a scan carries ------------------------------------------------------------------------------------

MESH = ft.make_mesh({"data": 4}, simulate=True)
X = ft.device_put(torch.arange(24.0).reshape(3, 8), ft.P(None, "data"), MESH)


def reductions(f: Any) -> int:
    step = ft.compile(f, mesh=MESH, passes=ft.Passes.off())
    torch.testing.assert_close(step(X), f(X.full()))
    return sum(c.count for c in step.lower(X).collectives())


def test_a_sum_from_zero_is_reduced_after_the_loop() -> None:
    assert reductions(lambda x: ft.scan(lambda c, r: (c + r.sum(), None), torch.zeros(()), x)[0]) == 1


def test_a_sum_of_integers_too() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return ft.scan(lambda c, r: (c + (r > 2).sum(), None), torch.zeros((), dtype=torch.int64), x)[0]

    assert reductions(f) == 1


def test_a_sum_that_each_step_reads_is_reduced_in_each() -> None:
    assert reductions(lambda x: ft.scan(lambda c, r: (torch.tanh(c) + r.sum(), None), torch.zeros(()), x)[0]) == 3


def test_a_sum_that_is_scaled_on_the_way() -> None:
    """Linear in the carry: still one reduction."""
    assert reductions(lambda x: ft.scan(lambda c, r: (c * 0.5 + r.sum(), None), torch.zeros(()), x)[0]) == 1


def test_a_sum_from_a_given_value_is_reduced_in_each_step() -> None:
    """Only a zero is a pending sum on all ranks alike."""
    assert reductions(lambda x: ft.scan(lambda c, r: (c + r.sum(), None), torch.ones(()), x)[0]) == 3


def test_the_gradient_through_a_pending_carry() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(ft.scan(lambda c, r: (c + (r * r).sum(), None), torch.zeros((), dtype=x.dtype), x)[0])

    x = ft.device_put(torch.rand(3, 8, dtype=torch.float64), ft.P(None, "data"), MESH)
    report = ft.check(ft.value_and_grad(f), (x,), MESH)
    assert report, str(report)
