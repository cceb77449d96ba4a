"""Gradient scales that depended on the mesh in other libraries: context and expert parallel bodies against one device.

Each case is a body of local tensors beside the plain function of global ones, on meshes with axes of size 1 as well.
"""

from __future__ import annotations

from typing import Any

import pytest
import spmd_types as spmd
import torch

import functitan as ft
from functitan import P
from tests.compiler.placing import randn
from tests.compiler.test_shard_map import agree, mesh_of

I, R, S, V = spmd.I, spmd.R, spmd.S, spmd.V
by_sizes = {"ids": lambda a: "-".join(f"{k}{v}" for k, v in a.items())}

CONTEXT = [
    {"data": 1, "context": 1},
    {"data": 2, "context": 1},
    {"data": 1, "context": 2},
    {"data": 1, "context": 4},
    {"data": 2, "context": 2},
]


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: Any) -> torch.Tensor:
    """Causal attention of queries whose first one stands at a place of the sequence."""
    rows = torch.arange(q.shape[1]) + first
    seen = torch.arange(k.shape[1]) <= rows[:, None]
    scores = (q @ k.transpose(1, 2)).masked_fill(~seen, -1e9)
    return torch.softmax(scores, -1) @ v


def ring_less(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Queries stay where they are; keys and values of all parts of the sequence are gathered."""
    q = x @ w
    k = spmd.all_gather(torch.tanh(x), "context", src=S(1), dst=R)
    v = spmd.all_gather(x, "context", src=S(1), dst=R)
    return attention(q, k, v, ft.axis_index("context") * x.shape[1])


@pytest.mark.parametrize("axes", CONTEXT, **by_sizes)
def test_gradients_do_not_depend_on_the_context_axis(axes: dict[str, int]) -> None:
    """Raw gradients of activations and of a weight that every rank holds (Megatron-LM 906)."""
    spec = P("data", "context", None)
    f = ft.shard_map(ring_less, in_specs=(spec, P(None, None)), out_specs=spec)
    agree(f, lambda x, w: attention(x @ w, torch.tanh(x), x, 0), (randn(2, 8, 4, seed=1), randn(4, 4, seed=2)), axes)


EXPERT = [
    {"data": 1, "expert": 1},
    {"data": 1, "expert": 2},
    {"data": 2, "expert": 1},
    {"data": 2, "expert": 2},
    {"data": 1, "expert": 4},
]


def experts(x: torch.Tensor, gates: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Each expert sees every token, weighted by its gate."""
    return torch.einsum("te,ted->td", gates, torch.tanh(torch.einsum("td,edf->tef", x, w)))


def on_owners(x: torch.Tensor, gates: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Tokens of all ranks go to the experts of each; what these give is added up and goes back."""
    x = spmd.all_gather(x, "expert", src=S(0), dst=R)
    gates = spmd.all_to_all(gates, "expert", src=S(0), dst=S(1))
    return spmd.reduce_scatter(experts(x, gates, w), "expert", src=V, dst=S(0))


ON_OWNERS = ft.shard_map(
    on_owners,
    in_specs=(P(("data", "expert"), None), P(("data", "expert"), None), P("expert", None, None)),
    out_specs=P(("data", "expert"), None),
)


def expert_args() -> tuple[torch.Tensor, ...]:
    """Two experts of four for each token; the dense gates hold zeros for the others."""
    chosen = torch.zeros(8, 4, dtype=torch.float64)
    chosen.scatter_(1, torch.topk(randn(8, 4, seed=2), 2, dim=1).indices, 1.0)
    return randn(8, 3, seed=1), chosen * (1 + randn(8, 4, seed=3) ** 2), randn(4, 3, 3, seed=4)


@pytest.mark.parametrize("axes", EXPERT, **by_sizes)
def test_gradients_of_experts_are_counted_once(axes: dict[str, int]) -> None:
    """Of experts, gates and tokens, whatever axis the tokens borrow, of size 1 too (PyTorch 160285)."""
    agree(ON_OWNERS, experts, expert_args(), axes)


@pytest.mark.parametrize("axes", EXPERT, **by_sizes)
@pytest.mark.parametrize(
    "given", [P(None, None), P("data", None), P("expert", None), P(("data", "expert"), None)], ids=str
)
def test_the_layout_that_tokens_come_in_changes_nothing(axes: dict[str, int], given: Any) -> None:
    """A batch that is whole over the expert axis is not handled once per rank (marin 7932)."""
    x, _, w = expert_args()

    def gradient(f: Any, place: Any) -> Any:
        def loss(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return torch.sin(f(place(x), place(gates_of(x)), w)).sum()

        def gates_of(x: torch.Tensor) -> torch.Tensor:
            return torch.softmax(x @ x.T, -1)[:, :4]

        return ft.value_and_grad(loss, argnums=(0, 1))

    want, (want_x, want_w) = gradient(experts, lambda x: x)(x, w)
    step = ft.compile(gradient(ON_OWNERS, lambda x: ft.constrain(x, given)), mesh=mesh_of(axes))
    found, (found_x, found_w) = step(x, w)
    for a, b in ((found, want), (found_x, want_x), (found_w, want_w)):
        a = a.full() if isinstance(a, ft.Array) else a
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@spmd.register_local_autograd_function
class Scaled(torch.autograd.Function):
    """The identity, with a gradient that is too large by the size of an axis."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, n: int) -> torch.Tensor:
        ctx.n = n
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        return g * ctx.n, None


def test_a_body_with_a_wrong_gradient_is_found_by_check() -> None:
    """Right in value and in type; the gradient is compared with that of the global function."""

    def body(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return Scaled.apply(x @ w, ft.axis_size("tensor"))

    mesh = mesh_of({"tensor": 2})
    f = ft.shard_map(body, in_specs=(P(None, None), P(None, "tensor")), out_specs=P(None, "tensor"))
    args = (randn(6, 4, seed=2), randn(4, 6, seed=1))
    report = ft.check(ft.value_and_grad(lambda w, x: f(x, w).square().sum()), args[::-1], mesh)
    assert not report
    assert [r.ok for r in report.rows if r.kind == "output"] == [True]
    (row,) = (r for r in report.rows if r.kind == "gradient")
    assert row.error == pytest.approx(1.0)  # twice the gradient
    right = ft.shard_map(lambda x, w: x @ w, in_specs=(P(None, None), P(None, "tensor")), out_specs=P(None, "tensor"))
    assert ft.check(ft.value_and_grad(lambda w, x: right(x, w).square().sum()), args[::-1], mesh)
