"""vmap: axes over pytrees, sizes, and what it composes with."""

from __future__ import annotations

import pytest
import torch

from functitan import random, tree
from functitan.autodiff import grad
from functitan.batching import vmap
from functitan.errors import ArgumentError, TreeError

torch.set_num_threads(1)

X = torch.arange(6.0).view(2, 3)
W = torch.tensor([1.0, 2.0, 3.0])


@tree.dataclass
class Pair:
    a: torch.Tensor
    b: torch.Tensor


def test_pytrees_in_and_out():
    out = vmap(lambda p, s: {"sum": p.a + p.b, "s": p.a.sum() * s})(Pair(X, X + 1), torch.tensor([1.0, 2.0]))
    assert torch.equal(out["sum"], 2 * X + 1) and torch.equal(out["s"], X.sum(1) * torch.tensor([1.0, 2.0]))


def test_axes():
    f = lambda p, w, n: (p["x"] * w * n, p["y"])  # noqa: E731
    params = {"x": X.T, "y": X}
    product, y = vmap(f, in_axes=({"x": 1, "y": 0}, None, None), out_axes=(1, 0))(params, W, 2)
    assert torch.equal(product, (X * W * 2).T) and torch.equal(y, X)
    assert torch.equal(vmap(lambda x: x.sum(), in_axes=1)(X), X.sum(0))
    assert torch.equal(vmap(lambda x, y: x * y, in_axes=(0, {"k": None}["k"]))(X, W), X * W)
    assert torch.equal(vmap(lambda p: p["x"] * p["w"], in_axes=({"x": 0, "w": None},))({"x": X, "w": W}), X * W)
    assert torch.equal(vmap(lambda x, *, w: x * w, in_axes=0)(X, w=torch.ones(2)), X)


def test_constant_and_missing_outputs():
    out = vmap(lambda x: {"c": 1.0, "none": None, "x": x})(X)
    assert out["c"].tolist() == [1.0, 1.0] and out["none"] is None


def test_composes():
    per_example = vmap(grad(lambda w, x: (w * x).sum() ** 2), in_axes=(None, 0))(W, X)
    assert torch.equal(per_example, torch.stack([2 * (W * x).sum() * x for x in X]))
    assert torch.equal(grad(lambda w: vmap(lambda x: (w * x).sum())(X).sum())(W), X.sum(0))
    keys = random.split(random.key(0), 3)
    noise = vmap(lambda k: random.normal(k, (4,)))(keys)
    assert torch.equal(noise[2], random.normal(keys[2], (4,)))
    assert torch.equal(vmap(vmap(lambda x: x * 2))(X), X * 2)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: vmap(torch.add)(X, W), ArgumentError, "one size; found argument 0: 2, argument 1: 3"),
        (
            lambda: vmap(torch.sin)(torch.tensor(1.0)),
            ArgumentError,
            r"argument 0 has shape \(\) and no dim 0",
        ),
        (lambda: vmap(torch.sin, in_axes=None)(X), ArgumentError, "found no mapped tensors"),
        (lambda: vmap(torch.add, in_axes=(0,))(X, X), TreeError, "has 1 entries for 2 positional arguments"),
        (
            lambda: vmap(torch.sin, in_axes=((0, 0),))(X),
            TreeError,
            r"in_axes has \(0, 0\) where the value is a Tensor",
        ),
        (lambda: vmap(torch.sin, out_axes=None)(X), TreeError, "out_axes None holds None"),
    ],
)
def test_errors_say_what_to_write(call, kind, message):
    with pytest.raises(kind, match=message):
        call()
