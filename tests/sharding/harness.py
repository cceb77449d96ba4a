"""Compare a compiled function on a simulated mesh with the plain one: values and gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

import functitan as ft
from functitan import tree
from functitan.sharding.layout import Layout

TOLERANCE = 1e-10


def weights(x: torch.Tensor, seed: int) -> torch.Tensor:
    """Fixed numbers, no two alike, that make a scalar of an output."""
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def with_gradients(
    f: Callable[..., Any], inputs: Sequence[torch.Tensor], constant: Sequence[int] = ()
) -> Callable[..., Any]:
    """f and, where it has float outputs and inputs, the gradients of a weighted sum of its outputs, but for some inputs."""
    plain = tree.leaves(f(*inputs))
    wanted = tuple(i for i, x in enumerate(inputs) if x.is_floating_point() and i not in constant)
    scored = [i for i, y in enumerate(plain) if y.is_floating_point()]
    cotangents = [weights(y, i) for i, y in enumerate(plain)]

    def loss(*xs: torch.Tensor) -> tuple[torch.Tensor, Any]:
        ys = tree.leaves(f(*xs))
        total = sum((ys[i] * cotangents[i]).sum() for i in scored)
        return total, ys

    if not wanted or not scored or not differentiable(loss, inputs, wanted):
        return lambda *xs: [returned(y) for y in tree.leaves(f(*xs))]

    def both(*xs: torch.Tensor) -> Any:
        (_, ys), grads = ft.value_and_grad(loss, argnums=wanted, has_aux=True)(*xs)
        return [returned(y) for y in ys], grads

    return both


def returned(y: torch.Tensor) -> torch.Tensor:
    """Whole: a result may have a joined layout, which no spec can say and no program returns."""
    return ft.constrain(y, ft.P(*[None] * y.ndim))


def differentiable(loss: Callable[..., Any], inputs: Sequence[torch.Tensor], wanted: Sequence[int]) -> bool:
    xs = [x.clone().requires_grad_(i in wanted) for i, x in enumerate(inputs)]
    try:
        torch.autograd.grad(loss(*xs)[0], [xs[i] for i in wanted], allow_unused=True)
        return True
    except RuntimeError as e:  # torch has no derivative for some ops, or for some operands
        if any(text in str(e) for text in ("derivative", "not differentiable", "does not require grad")):
            return False
        raise


def whole(x: Any) -> torch.Tensor:
    return x.full() if isinstance(x, ft.Array) else x


def difference(got: Any, want: Any) -> float:
    """The largest relative difference over leaves, by their largest element; exact for integers."""
    worst = 0.0
    pairs = list(zip(tree.leaves(got), tree.leaves(want), strict=True))
    for g, w in pairs:
        g = whole(g)
        assert g.shape == w.shape and g.dtype == w.dtype, (g.shape, w.shape, g.dtype, w.dtype)
        if not w.is_floating_point() and not w.is_complex():
            worst = max(worst, float(not torch.equal(g, w)))
        elif w.numel():
            assert torch.equal(g.isnan(), w.isnan()), "NaNs differ"
            g, w = g.nan_to_num(0.0, 0.0, 0.0), w.nan_to_num(0.0, 0.0, 0.0)
            worst = max(worst, float((g - w).abs().max() / w.abs().max().clamp_min(1e-3)))
    return worst


def compare(f: Callable[..., Any], mesh: ft.Mesh, inputs: Sequence[Any], want: Any) -> ft.Program:
    """Compile f for the mesh, run it on Arrays or tensors, and require the wanted results."""
    compiled = ft.compile(f, mesh=mesh, conflicts="auto")
    got = compiled(*inputs)
    worst = difference(got, want)
    assert worst < TOLERANCE, f"relative difference {worst} from one device"
    return compiled.lower(*inputs)


def one_axis_layouts(inputs: Sequence[torch.Tensor], axis: str, n: int) -> Iterator[list[Layout | None]]:
    """Every way to split one dim of one input."""
    for i, x in enumerate(inputs):
        for d, size in enumerate(x.shape):
            if size % n == 0:
                spec = [axis if j == d else None for j in range(x.ndim)]
                yield [spec if j == i else None for j in range(len(inputs))]  # type: ignore[misc]
