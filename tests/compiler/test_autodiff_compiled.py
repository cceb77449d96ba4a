"""Derivatives inside ft.compile: global semantics on every mesh, and gradients that lie as their parameters."""

from __future__ import annotations

import pytest
import torch

import functitan as ft
from functitan import tree
from functitan.errors import FunctitanError, ShardingError
from functitan.shapes import ShapeDtypeStruct
from tests.compiler.placing import RULES, agree, assert_same, mesh_of, on_meshes, place, randn, text_of

B, S, D, F = 4, 4, 8, 16
X = randn(B, S, D, seed=1)
W = {"up": randn(D, F, seed=2), "down": randn(F, D, seed=3)}
W_NAMES = {"up": "param embed mlp", "down": "param mlp embed"}
X_NAMES = "batch seq embed"
BOTH = {"fsdp": 2, "tensor": 2}


def mlp(x, w):
    h = ft.constrain(x, ("batch", "whole_seq", "embed")) @ w["up"]
    return ft.constrain(torch.tanh(h) @ w["down"], ("batch", "seq", "embed"))


def loss(w, x):
    return mlp(x, w).square().sum()


def check(f, axes, *more, names=(), **options):
    return agree(f, (W, X, *more), (W_NAMES, X_NAMES, *names), axes, **options)


# --- each derivative -----------------------------------------------------------------------------------------------


@on_meshes
def test_grad(axes):
    check(ft.grad(loss), axes)
    check(ft.grad(lambda w, x: loss(ft.use_params(w), x), argnums=1), axes)


@on_meshes
def test_value_and_grad_with_aux(axes):
    def with_aux(w, x):
        y = mlp(x, w)
        return y.square().sum(), {"y": y, "count": torch.tensor(y.numel())}

    check(ft.value_and_grad(with_aux, argnums=(1, 0), has_aux=True), axes)


@on_meshes
def test_vjp(axes):
    def f(w, x):
        y, pull = ft.vjp(lambda w, x: mlp(x, w), w, x)
        first, second = pull(y), pull(torch.ones_like(y))
        return y, first, second

    check(f, axes)


@on_meshes
def test_stop_gradient(axes):
    def f(w, x):
        y = mlp(x, w)
        return (y * ft.stop_gradient(y)).sum() + mlp(x, ft.stop_gradient(w)).sum()

    check(ft.value_and_grad(f, argnums=(0, 1)), axes)


@on_meshes
def test_custom_vjp_is_global(axes):
    """The rules see global values: a mean over the whole batch, and a gradient that is none of autograd's."""

    @ft.custom_vjp
    def centred(x, scale):
        return (x - x.mean(0)) * scale

    def fwd(x, scale):
        return centred(x, scale), (x.sum(), scale)

    def bwd(residuals, g):
        total, scale = residuals
        return g * scale + g.sum(0) * total, (g * total).sum()

    centred.defvjp(fwd, bwd)

    def f(w, x):
        return (centred(mlp(x, w), w["up"].mean()) ** 2).sum()

    check(ft.value_and_grad(f, argnums=(0, 1)), axes)
    inside = lambda w, x: ft.region(f)(w, x)  # noqa: E731
    check(ft.value_and_grad(inside, argnums=(0, 1)), axes)


@on_meshes
def test_eval_shape_inside(axes):
    def f(w, x):
        out = ft.eval_shape(mlp, x, w)
        assert out == ShapeDtypeStruct((B, S, D), torch.float64)
        return mlp(x, w) / out.numel()

    check(ft.value_and_grad(lambda w, x: f(w, x).sum()), axes)


@on_meshes
def test_vmap_outside_regions(axes):
    def f(w, x):
        per_row = ft.vmap(lambda row, u: torch.tanh(row @ u).square().sum(), in_axes=(0, None))(x, w["up"])
        return (per_row * torch.arange(1.0, B + 1, dtype=x.dtype)).sum()

    agree(ft.value_and_grad(f, argnums=(0, 1)), (W, X), (W_NAMES, "batch _ embed"), axes, RULES.replace(mlp=None))


@on_meshes
def test_gradients_per_example(axes):
    def f(w, x):
        w = ft.use_params(w)
        one = lambda u, row: (torch.tanh(row @ u) ** 2).sum()  # noqa: E731
        norms = ft.vmap(lambda row: ft.grad(one)(w["up"], row).square().sum())(x)
        return norms * torch.arange(1.0, B + 1, dtype=x.dtype)

    agree(f, (W, X), (W_NAMES, "batch _ embed"), axes, RULES.replace(mlp=None))


@on_meshes
def test_gradient_of_a_gradient_without_annotations(axes):
    def inner(x):
        return (torch.tanh(x) ** 2).sum()

    def f(w, x):
        return (ft.grad(inner)(x) ** 2).sum() * w["up"].sum()

    check(ft.value_and_grad(f, argnums=1), axes)


@on_meshes
def test_debug_print_shows_the_global_value_once(axes, capsys):
    mesh = mesh_of(axes)

    def f(x):
        ft.debug.print("sum {s:.6f} rows {r}", s=x.sum(), r=x.sum((1, 2))[:2].shape[0])
        ft.debug.print("whole {}", x.sum((1, 2)))
        return x * 2

    compiled = ft.compile(f, mesh=mesh, rules=RULES, conflicts="auto")
    x = torch.arange(float(B * S * D)).reshape(B, S, D)
    for _ in range(2):
        compiled(place(x, X_NAMES, mesh))
    one = f"sum {x.sum().item():.6f} rows 2\nwhole {x.sum((1, 2))}\n"
    assert capsys.readouterr().out == one * 2


def test_debug_print_in_a_scan_prints_each_step(capsys):
    mesh = mesh_of(BOTH)

    def f(w, x):
        def body(c, i):
            ft.debug.print("step {}", i)
            return c * w["up"].sum(), None

        return ft.scan(body, x, torch.arange(3))[0].sum()

    ft.compile(ft.value_and_grad(f), mesh=mesh, rules=RULES)(place(W, W_NAMES, mesh), place(X, X_NAMES, mesh))
    assert capsys.readouterr().out == "step 0\nstep 1\nstep 2\n"


# --- where gradients lie -------------------------------------------------------------------------------------------


@on_meshes
def test_gradients_lie_as_their_parameters(axes):
    mesh = mesh_of(axes)
    w = place({**W, "unused": randn(D, F, seed=9)}, {**W_NAMES, "unused": "param embed mlp"}, mesh)
    gradient = ft.compile(ft.grad(loss), mesh=mesh, rules=RULES)(w, place(X, X_NAMES, mesh))
    for name, g in gradient.items():
        if isinstance(g, ft.Array):
            assert g.layout == w[name].layout, name
        else:
            assert not w[name].layout.axes
    unused = gradient["unused"]
    assert not (unused.full() if isinstance(unused, ft.Array) else unused).any()


def test_updated_parameters_lie_as_they_did():
    mesh = mesh_of(BOTH)
    w = place(W, W_NAMES, mesh)

    def sgd(w, x):
        return tree.map(lambda p, g: p - 0.1 * g, w, ft.grad(loss)(w, x))

    step = ft.compile(sgd, mesh=mesh, rules=RULES, max_traces=1)
    new = step(w, place(X, X_NAMES, mesh))
    assert {k: a.layout for k, a in new.items()} == {k: a.layout for k, a in w.items()}
    step(new, place(X, X_NAMES, mesh))  # so the next step is the same program


@on_meshes
def test_tied_weights(axes):
    """One parameter used twice has one gradient, reduced once."""

    def tied(w, x):
        h = ft.constrain(x, ("batch", "whole_seq", "embed")) @ w["up"]
        y = ft.constrain(torch.tanh(h) @ w["up"].T, ("batch", "seq", "embed"))
        return y.square().sum()

    program, _ = agree(ft.value_and_grad(tied), ({"up": W["up"]}, X), ({"up": W_NAMES["up"]}, X_NAMES), axes)
    scatters = [c for c in program.collectives() if c.kind == "reduce_scatter" and c.param]
    assert [(c.param, c.count) for c in scatters] == ([("w/up", 1)] if axes else [])


def test_a_region_over_plain_parameters_reduces_each_gradient_once():
    program, _ = check(ft.value_and_grad(lambda w, x: ft.region(loss)(w, x)), BOTH, passes=ft.Passes.off())
    gradients = [c for c in program.collectives() if c.backward and c.kind == "reduce_scatter" and c.param]
    assert sorted((c.param, c.axes) for c in gradients) == [("w/down", ("fsdp",)), ("w/up", ("fsdp",))]


# --- pending sums kept on purpose ----------------------------------------------------------------------------------

REPLICATED = ft.Rules(batch="data", embed=None, mlp=None)


def accumulate(pending):
    """The sum of the gradients of two microbatches; ``pending`` keeps each unreduced until they are added."""

    def total(w, x):
        grads = []
        for rows in x.unbind(0):
            inner = ft.grad(lambda u: (torch.tanh(rows @ u) ** 2).sum(), pending=pending)  # noqa: B023
            grads.append(ft.constrain(inner(w), ("embed", "mlp"), pending=pending))
        return grads[0] + grads[1]

    return total


@pytest.mark.parametrize(("pending", "reductions"), [("data", 1), (None, 2)])
def test_pending_gradients_are_reduced_once(pending, reductions):
    x = randn(2, B, D, seed=5)
    program, _ = agree(
        accumulate(pending), (W["up"], x), (None, "_ batch embed"), {"data": 2}, REPLICATED, passes=ft.Passes.off()
    )
    assert [c.kind for c in program.collectives()] == ["all_reduce"] * reductions


@pytest.mark.parametrize("pending", ["fsdp", None])
def test_pending_over_the_storage_axis(pending):
    """Kept pending over fsdp, gradients are whole addends; the sum is scattered where it meets the parameter."""

    def step(w, x):
        g = [ft.grad(loss, pending=pending)(w, ft.constrain(r, ("batch", "seq", "embed"))) for r in x.unbind(0)]
        return tree.map(lambda p, a, b: p - 0.1 * (a + b), w, *g)

    x = randn(2, B, S, D, seed=5)
    program, new = agree(step, (W, x), (W_NAMES, "_ batch seq embed"), BOTH, passes=ft.Passes.off())
    scatters = [c for c in program.collectives() if (c.kind, c.axes) == ("reduce_scatter", ("fsdp",))]
    assert len(scatters) == (2 if pending else 4)
    assert new["up"].spec == ft.P("fsdp", "tensor")


def test_pending_over_an_axis_that_the_mesh_lacks():
    mesh = mesh_of(BOTH)
    with pytest.raises(ShardingError, match=r'unknown mesh axis "dat" in pending=.*Did you mean "data"'):
        ft.compile(ft.grad(loss, pending="dat"), mesh=mesh, rules=RULES).lower(
            place(W, W_NAMES, mesh), place(X, X_NAMES, mesh)
        )


# --- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("f", "message"),
    [
        (lambda w, x: ft.vmap(lambda r: ft.constrain(r, ("seq", "embed")))(x).sum(), "vmap over a function with ft."),
        (lambda w, x: ft.vmap(ft.region(torch.sin))(x).sum(), "vmap over a function with ft.constrain, ft.region"),
        (lambda w, x: ft.vmap(lambda r: ft.scan(lambda c, u: (c + u, None), r[0], r)[0])(x).sum(), "vmap over"),
        (
            lambda w, x: ft.grad(lambda y: ft.grad(lambda z: ft.region(torch.sin)(z).sum())(y).sum())(x),
            "second derivative",
        ),
        (
            lambda w, x: ft.grad(
                lambda y: ft.grad(lambda z: ft.scan(lambda c, u: (c * u, None), z[0], z)[0].sum())(y).sum()
            )(x),
            "second derivative",
        ),
    ],
)
def test_no_batched_form_and_no_second_derivative(f, message):
    mesh = mesh_of({"fsdp": 2})
    with pytest.raises(FunctitanError, match=message) as e:
        ft.compile(f, mesh=mesh, rules=RULES).lower(place(W, W_NAMES, mesh), place(X, X_NAMES, mesh))
    assert "test_autodiff_compiled.py:N (" in text_of(e.value)
    assert e.value.__cause__ is None


def test_a_second_derivative_through_constrain_is_right():
    def f(w, x):
        inner = lambda y: torch.sin(ft.constrain(y, ("batch", "seq", "embed"))).sum()  # noqa: E731
        return (ft.grad(inner)(x) ** 2).sum()

    check(ft.value_and_grad(f, argnums=1), BOTH)


def test_the_plain_function_is_the_same_function():
    """Nothing of a trace stays behind: the function runs on plain tensors afterwards, with the same result."""
    before = ft.value_and_grad(loss)(W, X)
    check(ft.value_and_grad(loss), BOTH)
    assert_same(ft.value_and_grad(loss)(W, X), before)
