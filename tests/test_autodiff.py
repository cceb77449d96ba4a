"""grad, value_and_grad, vjp, stop_gradient: values, nesting, tracing, and what results carry."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from functitan import random, tree
from functitan.annotations import activate
from functitan.autodiff import grad, stop_gradient, value_and_grad, vjp
from functitan.errors import FunctitanError, GradientError, TreeError

torch.set_num_threads(1)

X = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
W = torch.tensor([1.5, 0.25, -0.5], dtype=torch.float64)


@tree.dataclass
class Params:
    w: torch.Tensor
    layers: list


def _params() -> Params:
    return Params(W.clone(), [{"b": X.clone()}, {"b": X + 1, "unused": torch.ones(2, 2)}])


def _loss(p: Params, x: torch.Tensor) -> torch.Tensor:
    return (p.w * x + p.layers[0]["b"] ** 2 + p.layers[1]["b"].sin()).sum()


def _same(a, b):
    tree.map(lambda u, v: torch.testing.assert_close(u, v, rtol=1e-12, atol=0), a, b)


def test_gradients_of_a_pytree():
    params = _params()
    value, gradient = value_and_grad(_loss)(params, X)
    _same(value, _loss(params, X))
    expected = Params(X, [{"b": 2 * X}, {"b": (X + 1).cos(), "unused": torch.zeros(2, 2)}])
    _same(gradient, expected)
    assert [g.dtype for g in tree.leaves(gradient)] == [p.dtype for p in tree.leaves(params)]
    assert not any(v.requires_grad for v in tree.leaves((value, gradient, params)))


def test_argnums():
    f = lambda a, b, c=1.0: (a * b * c).sum()  # noqa: E731
    _same(grad(f, argnums=1)(X, W), X)
    _same(grad(f, argnums=(0, 1))(X, W), (W, X))
    _same(grad(f, argnums=(1,))(X, W, c=3.0), (3 * X,))
    _same(grad(f, argnums=-1)(X, W), X)
    _same(grad(lambda a, n: (a**n).sum())(X, 2), 2 * X)


def test_has_aux():
    def f(x):
        y = x * x
        return y.sum(), {"y": y, "n": 3}

    (value, aux), gradient = value_and_grad(f, has_aux=True)(X)
    _same(gradient, 2 * X)
    assert aux["n"] == 3 and not aux["y"].requires_grad and not value.requires_grad
    gradient, aux = grad(f, has_aux=True)(X)
    _same(aux["y"], X * X)


def test_the_ambient_grad_mode_does_not_matter():
    with torch.no_grad():
        _same(grad(lambda x: (x**2).sum())(X), 2 * X)
        _, pullback = vjp(lambda x: x**2, X)
        _same(pullback(torch.ones_like(X)), (2 * X,))
    assert torch.is_grad_enabled()


def test_leaves_that_require_grad_are_constants_at_the_top():
    w = W.clone().requires_grad_()
    value, gradient = value_and_grad(lambda x: (x * w).sum())(w * X)
    assert not value.requires_grad and not gradient.requires_grad and w.grad is None
    _same(gradient, W)


def test_constant_functions_have_zero_gradients():
    _same(grad(lambda x: torch.tensor(2.0))(X), torch.zeros_like(X))
    _same(grad(lambda p: torch.tensor(1.0))({"a": X, "none": None}), {"a": torch.zeros_like(X), "none": None})


def test_second_derivatives():
    cubic = lambda x: (W * x**3).sum()  # noqa: E731
    _same(grad(lambda x: grad(cubic)(x).sum())(X), 6 * W * X)
    _same(grad(lambda x: grad(lambda y: grad(cubic)(y).sum())(x).sum())(X), 6 * W)
    # through value, aux and a closure
    inner = lambda x: value_and_grad(lambda y: ((x * y).sum(), (y * x) ** 2), has_aux=True)(W)  # noqa: E731
    _same(grad(lambda x: inner(x)[0][0])(X), W)
    _same(grad(lambda x: inner(x)[0][1].sum())(X), 2 * X * W * W)
    _same(grad(lambda x: (inner(x)[1] ** 2).sum())(X), 2 * X)


def test_no_perturbation_confusion():
    # d/dx [x * d/dy (x + y)] = 1, the classic trap
    f = lambda x: x * grad(lambda y: x + y)(torch.tensor(1.0))  # noqa: E731
    assert grad(f)(torch.tensor(3.0)) == 1.0


def test_hessian_vector_product_by_vjp_of_grad():
    f = lambda x: (x.exp() * W).prod()  # noqa: E731
    _, pullback = vjp(grad(f), X)
    (hvp,) = pullback(W)
    dense = torch.autograd.functional.hessian(f, X)
    torch.testing.assert_close(hvp, dense @ W)


def test_a_derivative_inside_no_grad_is_a_constant():
    def f(x):
        with torch.no_grad():
            slope = grad(lambda y: (y**2).sum())(x)
        assert not slope.requires_grad
        return (x * slope).sum()

    _same(grad(f)(X), 2 * X)


def test_stop_gradient():
    f = lambda t: (t["a"] * stop_gradient(t)["a"]).sum()  # noqa: E731
    _same(grad(f)({"a": X}), {"a": X})
    assert stop_gradient({"n": 1, "x": X})["n"] == 1


def test_vjp():
    f = lambda p, y: {"a": p["w"] * y, "b": y.sum()}  # noqa: E731
    out, pullback = vjp(f, {"w": W}, X)
    _same(out, f({"w": W}, X))
    assert not out["a"].requires_grad
    ct = {"a": torch.ones_like(X), "b": torch.tensor(2.0, dtype=torch.float64)}
    for _ in range(2):  # may be called again
        _same(pullback(ct), ({"w": X}, W + 2.0))
    _, _, aux = vjp(lambda x: (x * 2, x + 1), X, has_aux=True)
    _same(aux, X + 1)
    assert not aux.requires_grad


def test_vjp_is_differentiable_in_the_cotangent_and_in_the_primal():
    def pulled(x, ct):
        return vjp(lambda y: y**3, x)[1](ct)[0].sum()

    _same(grad(pulled, argnums=(0, 1))(X, W), (6 * X * W, 3 * X**2))


def test_memory_of_forward_is_freed_during_backward():
    # value_and_grad pulls once, so autograd may free what it saved; a second pull is vjp's.
    seen = []

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x * 2)
            seen.append(ctx)
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return g * 2

    grad(lambda x: Probe.apply(x).sum())(X)
    with pytest.raises(RuntimeError, match="already been freed"):
        _ = seen[0].saved_tensors


def _model(params, key, x):
    hidden = torch.nn.functional.silu(x @ params["w"]) * random.bernoulli(key, 0.9, (4, 8))
    return (hidden @ params["v"]).pow(2).sum() / 4


def _train_step(params, key, x):
    loss, gradient = value_and_grad(_model)(params, key, x)
    second = grad(lambda p: sum(g.pow(2).sum() for g in tree.leaves(grad(_model)(p, key, x))))(params)
    return loss, gradient, second


@pytest.mark.parametrize("mode", ["real", "fake"])
def test_traces_by_make_fx(mode):
    k = random.key(0)
    params = {"w": random.normal(k, (3, 8)), "v": random.normal(random.fold_in(k, 1), (8, 2))}
    args = (params, k, random.normal(random.fold_in(k, 2), (4, 3)))
    leaves, treedef = tree.flatten(args)
    flat = lambda *v: tree.leaves(_train_step(*tree.unflatten(treedef, v)))  # noqa: E731
    graph = make_fx(flat, tracing_mode=mode)(*leaves)
    for traced, plain in zip(graph(*leaves), flat(*leaves), strict=True):
        torch.testing.assert_close(traced, plain, rtol=1e-6, atol=1e-6)
    assert not any(v.requires_grad for v in flat(*leaves))
    # and at other values than those it was traced on
    others = [v * 2 if v.dtype.is_floating_point else v + 1 for v in leaves]
    for traced, plain in zip(graph(*others), flat(*others), strict=True):
        torch.testing.assert_close(traced, plain, rtol=1e-5, atol=1e-5)


def test_use_params_sees_the_differentiated_argument():
    class Recorder:
        seen: list

        def use_params(self, params, pending):
            self.seen.append(params)
            return tree.map(lambda v: v * 2, params)

    recorder = Recorder()
    recorder.seen = []
    with activate(recorder):
        gradient = grad(lambda p, x: (p["w"] * x).sum())({"w": W}, X)
    assert len(recorder.seen) == 1 and set(recorder.seen[0]) == {"w"}
    _same(gradient, {"w": 2 * X})


def test_composes_with_torch_vmap():
    per_example = torch.func.vmap(grad(lambda w, x: (w * x).sum() ** 2), in_dims=(None, 0))
    xs = torch.stack([X, W])
    _same(per_example(W, xs), torch.stack([2 * (W * x).sum() * x for x in xs]))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: grad(_loss)({"layers": {"step": torch.tensor(3)}, "w": X}, X),
            "asked for argument 0, leaf layers/step, which is int64 of shape .*only floating tensors",
        ),
        (lambda: grad(lambda x: x.sum())(2), "argument 0, which is 2 of type int"),
        (lambda: grad(lambda x: x * 2)(X), r"returned float64 of shape \(3,\);.*divided by their count"),
        (lambda: grad(lambda x: 1.0)(X), "returned 1.0 of type float"),
        (lambda: grad(lambda x: (x.sum(), x))(X), "returned a tuple of 2.*Write has_aux=True"),
        (
            lambda: grad(lambda x: x.sum(), has_aux=True)(X),
            r"returned float64 of shape \(\); with has_aux=True",
        ),
        (
            lambda: grad(lambda x: x.sum(), argnums=1)(X),
            "positional argument 1, and the call has 1 positional",
        ),
        (lambda: vjp(lambda x: x.argmax(), X), "the output is int64 of shape"),
        (
            lambda: vjp(lambda x: x * 2, X)[1](torch.ones(4)),
            r"is float32 of shape \(4,\), and its output is float64",
        ),
    ],
)
def test_errors_say_what_to_write(call, message):
    with pytest.raises(GradientError, match=message):
        call()


def test_a_cotangent_of_another_structure():
    with pytest.raises(TreeError, match="the cotangents and the output must have the same structure"):
        vjp(lambda x: {"a": x}, X)[1]({"b": X})
    assert issubclass(TreeError, FunctitanError)
