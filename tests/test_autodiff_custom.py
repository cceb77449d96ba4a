"""custom_vjp: hand-written rules over pytrees, second derivatives, tracing, vmap, errors."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from functitan import tree
from functitan.annotations import activate, region
from functitan.autodiff import grad, value_and_grad
from functitan.autodiff_custom import custom_vjp
from functitan.compiler.trace import trace
from functitan.errors import GradientError

torch.set_num_threads(1)

X = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
Y = torch.tensor([1.5, 0.25, -0.5], dtype=torch.float64)


def _make(scale=1.0):
    """sin(x) * y; the rule's gradient in x is multiplied, to see whether the rule ran."""

    @custom_vjp
    def f(x, y):
        return torch.sin(x) * y

    def fwd(x, y):
        return f(x, y), (torch.cos(x), x, y)

    def bwd(residuals, g):
        cos, x, y = residuals
        return scale * g * cos * y, g * torch.sin(x)

    f.defvjp(fwd, bwd)
    return f


def _same(a, b):
    tree.map(lambda u, v: torch.testing.assert_close(u, v, rtol=1e-12, atol=0), a, b)


def test_the_rule_is_used():
    f = _make(2.0)
    _same(f(X, Y), torch.sin(X) * Y)
    gx, gy = grad(lambda x, y: f(x, y).sum(), argnums=(0, 1))(X, Y)
    _same(gx, 2 * torch.cos(X) * Y)
    _same(gy, torch.sin(X))


def test_plain_autograd_uses_it_too():
    x = X.clone().requires_grad_()
    _make(3.0)(x, Y).sum().backward()
    _same(x.grad, 3 * torch.cos(X) * Y)


def test_without_a_derivative_the_function_runs():
    calls = []

    @custom_vjp
    def f(x):
        calls.append("f")
        return x

    f.defvjp(lambda x: (calls.append("fwd") or x, None), lambda r, g: (g,))
    f(X)
    with torch.no_grad():
        f(X.clone().requires_grad_())
    assert calls == ["f", "f"]


def test_second_derivatives_differentiate_the_rules():
    for scale in (1.0, 2.0):
        f = _make(scale)
        first = lambda x, f=f: grad(lambda x: f(x, Y).sum())(x).sum()  # noqa: E731
        _same(grad(first)(X), -scale * torch.sin(X) * Y)
    f = _make()
    mixed = grad(lambda y: grad(lambda x: f(x, y).sum())(X).sum())(Y)
    _same(mixed, torch.cos(X))
    third = grad(lambda x: grad(first)(x).sum())(X)
    _same(third, -2 * torch.cos(X) * Y)


def test_second_derivative_by_autograd_itself_is_refused():
    x = X.clone().requires_grad_()
    out = _make()(x, Y).sum()
    with pytest.raises(GradientError, match=r"autograd itself was asked for a second derivative.*Nest ft.grad"):
        torch.autograd.grad(out, x, create_graph=True)


def test_pytrees_static_values_and_none():
    @custom_vjp
    def f(params, x, n):
        return {"out": params["w"] * x, "n": n, "int": x.argmax()}

    def fwd(params, x, n):
        return f(params, x, n), {"w": params["w"], "x": x, "n": n}

    def bwd(r, g):
        assert r["n"] == 4 and g["n"] is None and g["int"] is None
        return {"w": g["out"] * r["x"], "step": None}, None, None

    f.defvjp(fwd, bwd)

    def loss(params, x):
        out = f(params, x, 4)
        assert out["n"] == 4 and out["int"] == 2
        return out["out"].sum()

    params = {"w": Y, "step": Y}
    _same(grad(loss, argnums=(0, 1))(params, X), ({"w": X, "step": torch.zeros_like(Y)}, torch.zeros_like(X)))


def test_unused_outputs_have_zero_cotangents():
    @custom_vjp
    def f(x):
        return x * 2, x * 3

    f.defvjp(lambda x: (f(x), None), lambda _, g: (2 * g[0] + 3 * g[1],))
    _same(grad(lambda x: f(x)[1].sum())(X), torch.full_like(X, 3.0))


def test_nondiff_argnums_and_keywords():
    @custom_vjp
    def plain(x):
        return x

    def power(x, n, eps=0.0):
        return x**n + eps

    f = custom_vjp(power, nondiff_argnums=(1,))

    def fwd(x, n, eps):
        return f(x, n, eps), x

    def bwd(n, x, g):
        return g * n * x ** (n - 1), None

    f.defvjp(fwd, bwd)
    _same(grad(lambda x: f(x, 3).sum())(X), 3 * X**2)
    _same(grad(lambda x: f(x=x, n=2, eps=1.0).sum())(X), 2 * X)


def test_an_output_and_an_input_as_residuals_are_saved_once():
    @custom_vjp
    def f(x):
        return torch.exp(x)

    f.defvjp(lambda x: ((out := torch.exp(x)), (out, x)), lambda r, g: (g * r[0] + 0 * r[1],))
    x = X.clone().requires_grad_()
    out = f(x)
    assert len(out.grad_fn.saved_tensors) == 2
    assert out.grad_fn.saved_tensors[1].data_ptr() == x.data_ptr()
    _same(grad(lambda x: f(x).sum())(X), X.exp())


def test_inputs_that_are_not_residuals_are_freed():
    f = custom_vjp(lambda x: x * 2)
    f.defvjp(lambda x: (x * 2, None), lambda _, g: (g * 2,))
    x = X.clone().requires_grad_()
    hidden = x + 1
    alive = weakref.ref(hidden.untyped_storage())
    out = f(hidden)
    del hidden
    gc.collect()
    assert alive() is None
    _same(torch.autograd.grad(out.sum(), x)[0], torch.full_like(X, 2.0))


@pytest.mark.parametrize("mode", ["real", "fake"])
def test_traces_by_make_fx(mode):
    f = _make(2.0)
    step = lambda x, y: grad(lambda x: grad(lambda x: f(x, y).sum())(x).pow(2).sum())(x)  # noqa: E731
    both = lambda x, y: (*value_and_grad(lambda x: f(x, y).sum())(x), step(x, y))  # noqa: E731
    graph = make_fx(both, tracing_mode=mode)(X, Y)
    _same(list(graph(Y, X)), list(both(Y, X)))


def test_a_call_while_annotations_are_active():
    f = _make(2.0)
    with activate(_Identity()):
        _same(grad(lambda x: f(x, Y).sum())(X), 2 * torch.cos(X) * Y)


class _Identity:
    def use_params(self, params, pending):
        return params


def test_a_tensor_captured_by_a_region_gets_its_gradient():
    f = _make(2.0)

    def step(w, x):
        return grad(lambda w: region(lambda x: f(w, x))(x).sum())(w)

    (body,) = trace(step, [Y, X]).bodies.values()
    assert body.n_inputs == 2 and body.gradient_of == [1]


def test_composes_with_vmap():
    f = _make(2.0)
    xs, ys = torch.stack([X, Y]), torch.stack([Y, X])
    _same(torch.func.vmap(f)(xs, ys), torch.sin(xs) * ys)
    _same(torch.func.vmap(grad(lambda x, y: f(x, y).sum()))(xs, ys), 2 * torch.cos(xs) * ys)
    _same(grad(lambda x: torch.func.vmap(f)(x, ys).sum())(xs), 2 * torch.cos(xs) * ys)


def _with(fwd, bwd):
    f = custom_vjp(lambda x, w: x * w["a"])
    f.defvjp(fwd, bwd)
    return lambda: grad(lambda x, w: f(x, w).sum(), argnums=(0, 1))(X, {"a": Y})


def _good(x, w):
    return x * w["a"], None


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: custom_vjp(torch.sin)(X), "called before its rules were given. Write sin.defvjp"),
        (
            _with(lambda x, w: x, lambda r, g: (g, None)),
            "forward rule returned a Tensor; return .out, residuals",
        ),
        (_with(_good, lambda r, g: g), "backward rule returned a Tensor for 2 differentiated arguments"),
        (_with(_good, lambda r, g: (g,)), "backward rule returned 1 for 2"),
        (_with(_good, lambda r, g: (g, {"b": g})), "argument 1 has a leaf b, which the argument has not"),
        (_with(_good, lambda r, g: (g, {"a": g[:2]})), r"argument 1, leaf a has shape \(2,\).*has \(3,\)"),
        (_with(_good, lambda r, g: (g.sum(), None)), r"argument 0 has shape \(\)"),
    ],
)
def test_errors_say_what_to_write(call, message):
    with pytest.raises(GradientError, match=message):
        call()


def test_keyword_only_parameters_are_refused():
    def f(x, *, n):
        return x

    made = custom_vjp(f)
    made.defvjp(lambda x: (x, None), lambda r, g: (g,))
    with pytest.raises(GradientError, match=r"keyword-only parameters \(n\)"):
        made(X, n=1)
