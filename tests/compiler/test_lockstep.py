"""Collectives of the simulator: programs that differ between ranks are refused, strided operands are right."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import fx

import functitan as ft
from functitan.errors import ArgumentError
from functitan.runtime.collectives import CollectiveMismatch
from functitan.runtime.programs import run_programs
from tests.compiler.placing import agree, mesh_of, randn

c10d = torch.ops._c10d_functional
PAIR = ft.make_mesh({"data": 2}, simulate=True)
GRID = ft.make_mesh({"data": 2, "tensor": 2}, simulate=True)


def all_reduce(group="data", how="sum"):
    return lambda g, x: g.call_function(c10d.all_reduce.default, (x, how, group))


def all_gather(group="data"):
    return lambda g, x: g.call_function(c10d.all_gather_into_tensor.default, (x, 2, group))


def reduce_scatter(group="data"):
    return lambda g, x: g.call_function(c10d.reduce_scatter_tensor.default, (x, "sum", 2, group))


def all_to_all(group="data", rows=(2, 2)):
    return lambda g, x: g.call_function(c10d.all_to_all_single.default, (x, [*rows], [*rows], group))


def program(*steps):
    """A rank's graph: the steps one after the other on one input."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    for step in steps:
        x = step(graph, x)
        if x.target in {c10d.all_reduce.default, c10d.all_gather_into_tensor.default}:
            x = graph.call_function(c10d.wait_tensor.default, (x,))
    graph.output([x])
    return graph


def op(target, *args):
    return lambda g, x: g.call_function(target, (x, *args))


def run(programs, mesh=PAIR, inputs=None):
    inputs = inputs or [[randn(4, 4, seed=r)] for r in range(mesh.size)]
    return [out[0] for out in run_programs(programs, inputs, mesh)]


def refused(programs, mesh=PAIR, inputs=None):
    with pytest.raises(CollectiveMismatch) as e:
        run(programs, mesh, inputs)
    return str(e.value)


def test_equal_programs_run():
    a, b = randn(4, 4, seed=0), randn(4, 4, seed=1)
    out = run([program(all_reduce(), op(torch.mul, 2), all_gather())] * 2)
    for x in out:
        torch.testing.assert_close(x, torch.cat([2 * (a + b)] * 2))


def test_programs_may_differ_between_collectives():
    out = run([program(op(torch.neg), all_reduce()), program(op(torch.mul, 3), op(torch.neg), all_reduce())])
    torch.testing.assert_close(out[0], -randn(4, 4, seed=0) - 3 * randn(4, 4, seed=1))


def test_groups_go_on_by_themselves():
    """Ranks 0 and 1 reduce twice over tensor where 2 and 3 do it once: nothing binds the two groups."""
    once, twice = program(all_reduce("tensor")), program(all_reduce("tensor"), all_reduce("tensor"))
    out = run([twice, twice, once, once], GRID)
    torch.testing.assert_close(out[0], 2 * out[1] / 2)
    torch.testing.assert_close(out[2], randn(4, 4, seed=2) + randn(4, 4, seed=3))


def test_coordinates_are_given():
    graph = fx.Graph()
    place = graph.placeholder("coord")
    place.meta["coordinate"] = "data"
    graph.output([graph.call_function(c10d.all_reduce.default, (place, "sum", "data"))])
    assert run_programs([graph, graph], [[], []], PAIR) == [[1], [1]]


def test_another_order():
    text = refused([program(all_reduce(), all_gather()), program(all_gather(), all_reduce())])
    assert text == (
        "ranks 0 and 1 differ in the operation of a collective:\n"
        '    rank 0, collective 0: all_reduce(sum) over "data" of float64[4, 4] (node all_reduce_default)\n'
        '    rank 1, collective 0: all_gather_into_tensor(2) over "data" of float64[4, 4] (node '
        "all_gather_into_tensor_default)\n"
        "All ranks of a group call the same collectives in the same order, with one shape and dtype."
    )


def test_another_order_later_on():
    a = program(all_reduce(), all_reduce(), all_gather())
    text = refused([a, program(all_reduce(), all_gather(), all_reduce())])
    assert "rank 0, collective 1: all_reduce(sum)" in text and "rank 1, collective 1: all_gather" in text


def test_another_axis():
    a, b = program(all_reduce("data")), program(all_reduce("tensor"))
    assert refused([a, a, a, b], GRID) == (
        "no collective can go on, because ranks wait for different ones:\n"
        "    rank 0: has finished\n"
        '    rank 1, collective 0: all_reduce(sum) over "data" of float64[4, 4] (node all_reduce_default), with ranks '
        "1, 3\n"
        "    rank 2: has finished\n"
        '    rank 3, collective 0: all_reduce(sum) over "tensor" of float64[4, 4] (node all_reduce_default), with '
        "ranks 2, 3\n"
        "All ranks of a group call the same collectives in the same order."
    )


def test_axes_in_another_order():
    a = program(all_reduce("data"), all_reduce("tensor"))
    b = program(all_reduce("tensor"), all_reduce("data"))
    text = refused([a, b, b, a], GRID)
    assert all(f"rank {r}, collective 0" in text for r in range(4))
    text = refused([program(all_reduce("data+tensor"))] * 3 + [program(all_reduce("tensor+data"))], GRID)
    assert '"tensor+data"' in text


def test_an_axis_that_the_mesh_lacks():
    assert 'no axis "expert" (it has data)' in refused([program(all_reduce("expert"))] * 2)


def test_another_dtype():
    text = refused([program(all_reduce()), program(op(torch.Tensor.float), all_reduce())])
    assert text.startswith("ranks 0 and 1 differ in the dtype of a collective:")
    assert "float64[4, 4]" in text and "float32[4, 4]" in text


def test_another_shape():
    text = refused([program(all_gather()), program(op(torch.Tensor.narrow, 0, 0, 2), all_gather())])
    assert text.startswith("ranks 0 and 1 differ in the shape of a collective:") and "float64[2, 4]" in text
    text = refused([program(all_gather()), program(op(torch.Tensor.reshape, (2, 8)), all_gather())])
    assert "differ in the shape" in text


def test_another_reduction_and_other_splits():
    text = refused([program(all_reduce()), program(all_reduce(how="max"))])
    assert "differ in the operation" in text and "all_reduce(max)" in text
    text = refused([program(all_to_all()), program(all_to_all(rows=(1, 3)))])
    assert "all_to_all_single([1, 3], [1, 3])" in text


def test_a_rank_that_ends_early():
    text = refused([program(all_reduce()), program(op(torch.neg))])
    assert 'rank 0, collective 0: all_reduce(sum) over "data"' in text and "rank 1: has finished" in text


def test_one_graph_and_one_row_per_rank():
    with pytest.raises(ArgumentError, match="given 1 graphs and 2 rows of inputs for the 2 ranks of data=2"):
        run_programs([program(all_reduce())], [[X], [X]], PAIR)


# --- strided operands (report B50) ---------------------------------------------------------------------------------

X = randn(8, 8, seed=3)
STRIDED = {
    "columns": lambda x: x[:, 1:5],
    "transpose": lambda x: x.t(),
    "expanded": lambda x: x[:, :1].expand(8, 4),
    "rows from the end": lambda x: x[4:].t(),
}


@pytest.mark.parametrize("view", STRIDED)
@pytest.mark.parametrize("collective", [all_reduce, all_gather, reduce_scatter, lambda: all_to_all(rows=(2, 2))])
def test_collectives_read_strided_operands_as_copies(view, collective):
    inputs = [[randn(8, 8, seed=r)] for r in range(2)]
    views = [[STRIDED[view](row[0])[:4]] for row in inputs]
    assert not views[0][0].is_contiguous()
    copies = [[row[0].contiguous()] for row in views]
    for a, b in zip(
        run([program(collective())] * 2, PAIR, views), run([program(collective())] * 2, PAIR, copies), strict=True
    ):
        assert torch.equal(a, b)


@pytest.mark.parametrize("view", STRIDED)
@pytest.mark.parametrize(
    ("first", "second"), list(itertools.permutations([(None, None), ("fsdp", None), (None, "fsdp")], 2))
)
def test_moves_of_strided_values_forward_and_backward(view, first, second):
    """Every move between layouts, of a value that is a strided view, and of its gradient."""

    def f(x):
        y = ft.constrain(STRIDED[view](ft.constrain(x, ft.P(None, None))), ft.P(*first))
        weights = torch.arange(1.0, y.numel() + 1, dtype=y.dtype).reshape(y.shape)
        return (ft.constrain(y, ft.P(*second)) * weights).sum(), y

    agree(ft.value_and_grad(f, has_aux=True), (X,), (None,), {"fsdp": 2})


def test_an_expanded_gradient():
    """sum().backward() hands on an expanded tensor; the sum over ranks must read it as a whole one."""

    def f(w, x):
        return ft.constrain(x @ w, ("batch", "embed")).sum()

    agree(ft.grad(f, argnums=(0, 1)), (X, X), ("param embed _", "batch _"), {"fsdp": 2, "data": 2})


def test_lockstep_refuses_unequal_operands():
    """One graph for all ranks can only differ through its inputs."""
    from functitan.runtime.lockstep import Lockstep

    runner = Lockstep(PAIR, {})
    with pytest.raises(CollectiveMismatch, match=r"rank 0 gives torch.float64 \(4, 4\) and rank 1 gives torch.float32"):
        runner.graph("step", program(all_reduce()), [[randn(4, 4), randn(4, 4).float()]])
    assert mesh_of({}).size == 1
