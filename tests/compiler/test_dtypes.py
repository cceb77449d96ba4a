"""The dtype of every collective: parameters are gathered in the compute dtype, gradients reduced in reduce_dtype."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from typing import Any

import pytest
import spmd_types as spmd
import torch

import functitan as ft
from functitan import P, tree
from functitan.nn.models import llama3
from tests.compiler.llama import Setup, setup

BF16 = torch.bfloat16
STANDARD = {
    "DDP": (dict(data=2), True),
    "FSDP": (dict(fsdp=2), True),
    "HSDP": (dict(data=2, fsdp=2), True),
    "TP": (dict(tensor=2), False),
    "TP+SP": (dict(tensor=2), True),
    "FSDP x TP+SP": (dict(fsdp=2, tensor=2), True),
    "HSDP x TP+SP": (dict(data=2, fsdp=2, tensor=2), True),
    "HSDP x TP": (dict(data=2, fsdp=2, tensor=2), False),
}


def dtypes(program: ft.Program) -> dict[str, set[str]]:
    """The dtypes of collectives by what they are for."""
    found: dict[str, set[str]] = defaultdict(set)
    for c in program.collectives():
        if c.param:
            found["gather" if c.kind == "all_gather" else "gradient"].add(c.dtype)
        elif c.line.startswith("model.py"):
            found["activation"].add(c.dtype)
        else:  # of the loss, its count and the clip norm
            found["scalar"].add(c.dtype)
    return found


def lowered(s: Setup, **options: Any) -> ft.Program:
    return ft.compile(s.step, mesh=s.mesh, rules=s.rules, **options).lower(s.state, s.batch)


def kinds(program: ft.Program) -> set[tuple[str, str]]:
    return {(c.kind, c.dtype) for c in program.collectives()}


QUICK = ("FSDP", "TP+SP", "HSDP x TP+SP")


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in STANDARD])
def test_standard_parallelisms_in_bfloat16(name: str) -> None:
    """Parameters in float32, compute in bfloat16: what is gathered is cast first; what is reduced is not rounded."""
    axes, sequence_sharding = STANDARD[name]
    s = setup(axes, sequence_sharding=sequence_sharding, compute_dtype=BF16, layers=1)
    step = ft.compile(s.loss_and_grad, mesh=s.mesh, rules=s.rules, passes=ft.Passes.off())
    found = dtypes(step.lower(s.state.params, s.batch))
    if "fsdp" in axes:
        assert found["gather"] == {"bfloat16"}
    if {"data", "fsdp"} & set(axes) or sequence_sharding:
        assert found["gradient"] == {"float32"}
    if "tensor" in axes:
        assert found["activation"] == {"bfloat16"}
    assert found["scalar"] <= {"float32", "int64"}


def test_a_whole_step_and_its_passes() -> None:
    """The clip norm is of float64; buckets and prefetch change no dtype."""
    s = setup({"data": 2, "fsdp": 2, "tensor": 2}, compute_dtype=BF16, layers=1)
    program = lowered(s, passes=ft.Passes.off())
    assert dtypes(program)["scalar"] == {"float32", "float64", "int64"}
    assert kinds(lowered(s)) == kinds(program)


@pytest.mark.parametrize("reduce_dtype", [torch.float32, BF16], ids=["float32", "bfloat16"])
def test_parameters_in_bfloat16(reduce_dtype: torch.dtype) -> None:
    """Stored in bfloat16: gradients are raised to reduce_dtype before they are added up, and rounded once after."""
    s = setup({"data": 2, "fsdp": 2, "tensor": 2}, compute_dtype=BF16, layers=1)
    declared = tree.map(lambda p: dataclasses.replace(p, dtype=BF16), llama3.declare(s.config))
    params = ft.init(ft.random.key(0), declared, s.mesh, s.rules)
    program = ft.compile(
        s.loss_and_grad, mesh=s.mesh, rules=s.rules, reduce_dtype=reduce_dtype, passes=ft.Passes.off()
    ).lower(params, s.batch)
    found = dtypes(program)
    assert found["gather"] == {"bfloat16"}
    assert found["gradient"] == {str(reduce_dtype).removeprefix("torch.")}


@pytest.mark.parametrize("pending", [None, ("data", "fsdp")], ids=["sharded", "pending"])
def test_microbatches_in_bfloat16(pending: Any) -> None:
    s = setup({"data": 2, "fsdp": 2}, compute_dtype=BF16, layers=1)

    def f(params: Any, batch: Any) -> Any:
        return ft.accumulate_grads(lambda p, b: llama3.loss(p, b, s.config), 2, pending=pending)(params, batch)

    found = dtypes(ft.compile(f, mesh=s.mesh, rules=s.rules, passes=ft.Passes.off()).lower(s.state.params, s.batch))
    assert found["gather"] == {"bfloat16"} and found["gradient"] == {"float32"}


def test_the_sum_over_a_split_sequence_keeps_small_terms() -> None:
    """Gradients 1 and 2^-9 of two ranks: in bfloat16 their sum would be 1."""
    mesh = ft.make_mesh({"tensor": 2}, simulate=True)
    x = ft.device_put(torch.tensor([1.0, 2.0**-9], dtype=BF16), P("tensor"), mesh)
    grad = ft.grad(lambda w, x: (x * w.to(BF16)).float().sum())
    step = ft.compile(grad, mesh=mesh)
    (only,) = step.lower(torch.ones(1), x).collectives()
    assert (only.kind, only.dtype) == ("all_reduce", "float32")
    assert step(torch.ones(1), x).tolist() == [1 + 2.0**-9]


# --- bodies of shard_map -----------------------------------------------------------------------------------------


def gathered(options: Any) -> Any:
    """A column-parallel product of gathered rows; the gradient of the rows is a reduce-scatter."""

    def rows_times_columns(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return spmd.all_gather(x, "tensor", src=spmd.S(0), dst=spmd.R, backward_options=options) @ w

    specs = (P("tensor", None), P(None, "tensor"))
    return ft.shard_map(rows_times_columns, in_specs=specs, out_specs=P(None, "tensor"))


@pytest.mark.parametrize(
    ("reduce_dtype", "options", "expected"),
    [
        (torch.float32, None, "float32"),
        (BF16, None, "bfloat16"),
        (torch.float32, {"op_dtype": torch.float64}, "float64"),
        (torch.float32, {"out_dtype": BF16}, "float32"),
    ],
)
def test_a_body_in_bfloat16_reduces_its_gradients_in_reduce_dtype(
    reduce_dtype: torch.dtype, options: Any, expected: str
) -> None:
    """spmd_types asks for a dtype of backward's sums: reduce_dtype, unless the body says another."""
    mesh = ft.make_mesh({"tensor": 2}, simulate=True)
    g = torch.Generator().manual_seed(0)
    x, w = torch.randn(4, 6, generator=g, dtype=BF16), torch.randn(6, 8, generator=g, dtype=BF16)
    f = gathered(options)
    step = ft.compile(ft.value_and_grad(lambda x: f(x, w).float().square().sum()), mesh=mesh, reduce_dtype=reduce_dtype)
    found = {(c.kind, c.backward): c.dtype for c in step.lower(x).collectives() if c.why.startswith("shard_map")}
    assert found == {("all_gather", False): "bfloat16", ("reduce_scatter", True): expected}
    gradient = step(x)[1]
    whole = ft.grad(lambda x: (x @ w).float().square().sum())(x)
    assert gradient.dtype == BF16
    # One rounding to bfloat16 apart, of the largest element.
    assert (gradient.double() - whole.double()).abs().max() <= 2.0**-8 * whole.double().abs().max()
