"""debug.print: at once on plain tensors, at each run in a graph, once per example under vmap."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from functitan import debug
from functitan.autodiff import grad
from functitan.errors import ArgumentError
from functitan.shapes import ShapeDtypeStruct, eval_shape

torch.set_num_threads(1)


def test_prints_at_once(capsys):
    debug.print("loss {l:.3f} of {} {{braces}} {x.shape} {n:>3}", "it", l=torch.tensor(0.5), x=torch.ones(2), n=7)
    assert capsys.readouterr().out == "loss 0.500 of it {braces} torch.Size([2])   7\n"
    debug.print("{0} {1} {0}", torch.tensor(1), {"b": "{}"})
    assert capsys.readouterr().out == "1 {'b': '{}'} 1\n"
    debug.print("plain")
    assert capsys.readouterr().out == "plain\n"


def test_inside_a_derivative(capsys):
    def f(x):
        debug.print("x {}", x)
        return x**2

    assert grad(f)(torch.tensor(3.0)) == 6.0
    assert capsys.readouterr().out == "x 3.0\n"


def test_in_a_graph_each_run_prints(capsys):
    def f(x, name):
        debug.print("{name}: {v}", name=name, v=x.sum())
        return x + 1

    graph = make_fx(lambda x: f(x, "step"), tracing_mode="fake")(torch.ones(2))
    eval_shape(f, ShapeDtypeStruct((2,), torch.float32), "shapes")
    assert capsys.readouterr().out == ""
    assert "functitan.debug_print" in graph.code
    graph(torch.ones(2))
    graph(torch.ones(3))
    assert capsys.readouterr().out == "step: 2.0\nstep: 3.0\n"


def test_under_vmap_each_example_prints(capsys):
    def f(x, w):
        debug.print("{} {}", x, w)
        return x

    torch.func.vmap(f, in_dims=(0, None))(torch.arange(2), torch.tensor(9))
    assert capsys.readouterr().out == "0 9\n1 9\n"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: debug.print(torch.ones(1)), "takes a format string first; found Tensor"),
        (lambda: debug.print("{} {}", 1), r"has a field without a value .*given are \{0\}"),
        (lambda: debug.print("{y}", x=1), r"given are \{x\}"),
        (
            lambda: debug.print("{x:.2f}", x=torch.ones(2)),
            r"'.2f' of field x is for one number.*shape \(2,\)",
        ),
    ],
)
def test_errors_say_what_to_write(call, message):
    with pytest.raises(ArgumentError, match=message):
        call()
