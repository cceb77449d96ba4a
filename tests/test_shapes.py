"""eval_shape: types without values, alone and inside a trace."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from functitan import random
from functitan.annotations import activate, constrain
from functitan.autodiff import value_and_grad
from functitan.errors import TraceError
from functitan.shapes import ShapeDtypeStruct, eval_shape

torch.set_num_threads(1)


def test_types_of_a_train_step():
    def init(key):
        return {"w": random.normal(key, (10**6, 10**6), torch.bfloat16), "n": 3}

    params = eval_shape(init, random.key(0))
    assert params == {"w": ShapeDtypeStruct((10**6, 10**6), torch.bfloat16), "n": 3}

    def loss(p, x):
        return (x @ p["w"]).sum() / p["n"]

    x = torch.ones(2, 10**6, dtype=torch.bfloat16)
    value, gradient = eval_shape(value_and_grad(lambda w, x: loss({"w": w, "n": 3}, x)), params["w"], x)
    assert value == ShapeDtypeStruct((), torch.bfloat16) and gradient == params["w"]
    assert hash(value) == hash(ShapeDtypeStruct((), torch.bfloat16)) and gradient.numel() == 10**12


def test_captured_tensors_and_keywords():
    w = torch.ones(3, 4)
    out = eval_shape(lambda x, scale: (x @ w) * scale, torch.ones(2, 3), scale=2.0)
    assert out == ShapeDtypeStruct((2, 4), torch.float32)


def test_inside_a_trace_nothing_is_traced():
    def f(x):
        shape = eval_shape(lambda y: y.repeat(2) + x.sum(), x).shape
        return torch.zeros(shape) + x.sum()

    for mode in ("real", "fake"):
        graph = make_fx(f, tracing_mode=mode)(torch.ones(3))
        assert "repeat" not in graph.code
        assert graph(torch.ones(3)).tolist() == [3.0] * 6


def test_annotations_are_identities():
    class Refuses:
        def constrain(self, *args):
            raise AssertionError

    with activate(Refuses()):
        assert eval_shape(lambda x: constrain(x, ("a",)), torch.ones(2)).shape == (2,)


def test_values_are_refused():
    def f(x):
        return x if x.sum() > 0 else -x

    with pytest.raises(TraceError, match=r"eval_shape of f: the function needs the value.*torch.where"):
        eval_shape(f, torch.ones(2))
