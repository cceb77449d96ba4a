"""ft.region inside ft.compile: closures, statics, integers, nesting, and one body for like calls."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch

import functitan as ft
from functitan import tree
from functitan.annotations import use_params
from functitan.errors import TraceError
from tests.compiler.placing import agree, body_calls, mesh_of, on_meshes, randn

B, S, D, F = 4, 4, 8, 16
X = randn(B, S, D, seed=1)
W = {"up": randn(D, F, seed=2), "down": randn(F, D, seed=3)}
W_NAMES = {"up": "param embed mlp", "down": "param mlp embed"}
X_NAMES = "batch seq embed"


def mlp(x, w):
    h = ft.constrain(x, ("batch", "whole_seq", "embed")) @ w["up"]
    return ft.constrain(torch.tanh(h) @ w["down"], ("batch", "seq", "embed"))


def grads(loss):
    """Value and gradients of a loss of (params, x) with respect to both."""
    return ft.value_and_grad(loss, argnums=(0, 1))


@on_meshes
def test_a_region_is_its_function(axes):
    def loss(w, x):
        return (x + ft.region(mlp)(x, w)).square().sum()

    program, _ = agree(grads(loss), (W, X), (W_NAMES, X_NAMES), axes)
    assert len(program.bodies) == 1 and len(body_calls(program)) == 2


@on_meshes
def test_like_calls_are_one_body(axes):
    def loss(w, x):
        block = ft.region(mlp)
        for _ in range(3):
            x = x + block(x, w)
        return x.square().sum()

    program, _ = agree(grads(loss), (W, X), (W_NAMES, X_NAMES), axes)
    assert len(program.bodies) == 1 and len(body_calls(program)) == 6


@on_meshes
def test_like_closures_over_other_tensors_are_one_body(axes):
    def loss(w, x):
        for scale in (w["down"].sum(), w["up"].mean(), x.sum()):
            x = ft.region(lambda y: torch.tanh(y * scale))(x)  # noqa: B023
        return x.square().sum()

    program, _ = agree(grads(loss), (W, X), (W_NAMES, X_NAMES), axes)
    assert len(program.bodies) == 1


@on_meshes
def test_captured_tensors_get_gradients(axes):
    """Captured straight, in a dict, in a dataclass, by a function that the body closes over, as a default."""

    @dataclasses.dataclass
    class Box:  # not a pytree: found by reading, not by flattening
        w: torch.Tensor

    def loss(w, x):
        box, halves, bias = Box(w["up"]), {"down": w["down"] * 0.5}, w["down"].mean(0)
        inner = lambda y: y * bias  # noqa: E731

        def body(y, scale=w["up"].mean()):  # noqa: B008
            y = ft.constrain(y, ("batch", "whole_seq", "embed"))
            y = torch.tanh(y @ box.w) @ halves["down"]
            return inner(ft.constrain(y, ("batch", "seq", "embed"))) * scale

        return ft.region(body)(x).square().sum()

    agree(grads(loss), (W, X), (W_NAMES, X_NAMES), axes)


@on_meshes
def test_a_captured_dataclass_of_the_pytree_kind(axes):
    @tree.dataclass
    class Weights:
        up: torch.Tensor
        down: torch.Tensor

    def loss(w, x):
        own = Weights(**w)
        return ft.region(lambda y: mlp(y, {"up": own.up, "down": own.down}))(x).square().sum()

    agree(grads(loss), (W, X), (W_NAMES, X_NAMES), axes)


@on_meshes
def test_a_tensor_both_captured_and_given_counts_twice(axes):
    def loss(w, x):
        return ft.region(lambda y, u: torch.tanh(y * x.sum() + u.sum() * w["up"].sum()))(x, w["up"]).square().sum()

    agree(grads(loss), (W, X), (W_NAMES, X_NAMES), axes)


@on_meshes
def test_regions_nest_and_inner_ones_capture_from_all_levels(axes):
    def loss(w, x):
        scale = w["down"].sum()

        def outer(y):
            shift = y.mean()

            def inner(z):
                return torch.sin(z * scale + shift) * x

            return ft.region(inner)(y) + ft.region(inner)(y * 2)

        return ft.region(outer)(x).square().sum()

    program, _ = agree(grads(loss), (W, X), (W_NAMES, X_NAMES), axes)
    assert len(program.bodies) == 2


@on_meshes
def test_integers_and_outputs_without_gradients(axes):
    ids = torch.arange(B * S).reshape(B, S) % 3

    def loss(w, x):
        def body(y, i):
            keep = i > 0
            return torch.where(keep[..., None], y * w["up"].sum(), 0.0), i + 1, keep.sum()

        y, more, kept = ft.region(body)(x, ids_of(x))
        return (y * more[..., None]).square().sum() / kept

    def ids_of(x):
        return given["ids"]

    def step(w, x, i):
        given["ids"] = i
        return grads(loss)(w, x)

    given = {}
    agree(step, (W, X, ids), (W_NAMES, X_NAMES, "batch seq"), axes)


@on_meshes
def test_outside_a_derivative_there_is_no_backward(axes):
    program, _ = agree(lambda w, x: ft.region(mlp)(x, use_params(w)), (W, X), (W_NAMES, X_NAMES), axes)
    (body,) = program.bodies.values()
    assert body.backward is None and not body.saved_values


@on_meshes
def test_static_arguments_choose_the_body(axes):
    def power(y, n, flip=False):
        return (-y if flip else y) ** n

    def loss(w, x):
        block = ft.region(power)
        return (block(x, 2) + block(x, 3, True) + block(x, 2)).sum() * w["up"].sum()

    program, _ = agree(grads(loss), (W, X), (W_NAMES, X_NAMES), axes)
    assert len(program.bodies) == 2


def test_static_closure_values_choose_the_body():
    def loss(w, x):
        for n in (1, 2, 1):
            x = ft.region(functools.partial(lambda k, y: torch.sin(y * k), n))(x)
        for n in (1, 2, 1):
            x = ft.region(lambda y: torch.cos(y * n))(x)  # noqa: B023
        return x.sum() * w["up"].sum()

    program, _ = agree(grads(loss), (W, X), (W_NAMES, X_NAMES), {"fsdp": 2})
    assert len(program.bodies) == 4


def test_equal_numbers_of_other_types_are_other_statics():
    """1, 1.0 and True are equal and hash alike; int tensors divided by them are not alike."""
    i = torch.arange(4)

    def f(x):
        return [ft.region(lambda y: y * n)(x) for n in (1, 1.0, True)] + [  # noqa: B023
            ft.region(lambda y, n: y * n)(x, n) for n in (1, 1.0)
        ]

    agree(f, (i,), ("batch",), {"fsdp": 2})


@on_meshes
def test_an_output_that_is_an_input_or_a_captured_tensor(axes):
    def loss(w, x):
        a, b, c = ft.region(lambda y, z: (y, z, w["down"]))(x, x * 2)
        return (a * b).sum() * c.sum()

    agree(grads(loss), (W, X), (W_NAMES, X_NAMES), axes)


@on_meshes
def test_one_output_that_nothing_reads_and_an_input_that_nothing_reads(axes):
    def loss(w, x):
        y, _ = ft.region(lambda y, unused: (torch.sin(y), y.square()))(x, w["up"])
        return y.sum() + 0.0 * w["down"].sum()

    agree(grads(loss), (W, X), (W_NAMES, X_NAMES), axes)


@on_meshes
def test_one_body_lowered_for_two_layouts(axes):
    def loss(w, x):
        whole = ft.constrain(x, (None, None, None))
        return (ft.region(torch.sin)(x).square().sum() + ft.region(torch.sin)(whole).sum()) * w["up"].sum()

    program, _ = agree(grads(loss), (W, X), (W_NAMES, X_NAMES), axes)
    assert len(program.bodies) == (2 if axes else 1)
    assert len({b.label for b in program.bodies.values()}) == 1


def test_two_names_for_one_tensor_are_another_closure_than_two_tensors():
    def loss(w, x):
        total = 0.0
        for a, b in ((x, x), (x, x * 2), (x * 3, x)):
            total = total + ft.region(lambda y: y * a * 2 + b)(x).sum()  # noqa: B023
        return total * w["up"].sum()

    program, _ = agree(grads(loss), (W, X), (W_NAMES, X_NAMES), {"fsdp": 2})
    assert len(program.bodies) == 2


def test_a_function_that_closes_over_itself():
    def loss(w, x):
        def power(y, n=3):
            return y if n == 0 else y * power(y, n - 1)

        return ft.region(power)(x).sum() * w["up"].sum()

    agree(grads(loss), (W, X), (W_NAMES, X_NAMES), {"fsdp": 2})


def test_one_body_for_equal_calls_of_a_method():
    class Model:
        def block(self, x, w):
            return mlp(x, w)

    model = Model()

    def loss(w, x):
        for _ in range(2):
            x = ft.region(model.block)(x, w)
        return x.sum()

    program, _ = agree(grads(loss), (W, X), (W_NAMES, X_NAMES), {"fsdp": 2})
    assert len(program.bodies) == 1


def test_an_output_that_is_no_tensor():
    f = ft.compile(lambda x: ft.region(lambda y: {"y": y, "n": 3})(x)["y"], mesh=mesh_of({}))
    with pytest.raises(TraceError, match="<lambda>: output n is 3; the outputs of a region or scan body are tensors"):
        f(X)
