"""Donation: what a call gives up, what it refuses, and results that share memory with nothing."""

from __future__ import annotations

import pytest
import torch

import functitan as ft
from functitan import tree
from functitan.errors import ArgumentError, ShardingError, TraceError
from tests.compiler.placing import mesh_of, on_meshes, randn

MESH = mesh_of({"fsdp": 2})
ROWS = ft.P("fsdp", None)


def put(seed=0, spec=ROWS, mesh=MESH):
    return ft.device_put(randn(4, 4, seed=seed), spec, mesh)


def memory(value):
    """Where all parts of all leaves lie."""
    leaves = tree.leaves(value)
    return [t.untyped_storage().data_ptr() for x in leaves for t in (x.shards if isinstance(x, ft.Array) else [x])]


def step(state, x):
    return {k: v + x for k, v in state.items()}


def test_a_donated_array_is_gone():
    compiled = ft.compile(step, mesh=MESH, donate_argnums=0)
    state, x = {"w": put(1)}, put(2)
    new = compiled(state, x)
    torch.testing.assert_close(new["w"].full(), randn(4, 4, seed=1) + randn(4, 4, seed=2))
    assert x.full() is not None and state["w"].shape == (4, 4)  # what it was can still be read
    with pytest.raises(ShardingError) as e:
        state["w"].full()
    assert str(e.value) == (
        "Array(float64[4, 4], (fsdp, None), mesh data=1, fsdp=2, tensor=1 (simulated)) was donated to step and holds "
        "no "
        "value any more. Use what that call returned, or leave the argument out of donate_argnums."
    )
    with pytest.raises(ShardingError) as e:
        compiled(state, x)
    assert str(e.value) == (
        "state/w of step is an Array that was donated to step and holds no value any more. Pass what that call "
        "returned, or "
        "leave the argument out of donate_argnums."
    )
    compiled(new, x)


def test_all_that_is_gone_is_named_at_once():
    compiled = ft.compile(step, mesh=MESH, donate_argnums=0)
    state = {"a": put(1), "b": put(2)}
    compiled(state, put())
    with pytest.raises(ShardingError, match=r"2 problems in the arguments of step:\n  1\. state/a.*\n  2\. state/b"):
        compiled(state, put())


def test_nothing_is_given_up_when_the_call_is_refused():
    compiled = ft.compile(step, mesh=MESH, donate_argnums=0)
    gone, kept = put(1), put(2)
    compiled({"w": gone}, put())
    with pytest.raises(ShardingError):
        compiled({"a": kept, "b": gone}, put())
    assert kept.full().shape == (4, 4)


def test_plain_tensors_are_not_donated():
    compiled = ft.compile(step, mesh=MESH, donate_argnums=0)
    w = randn(4, 4)
    for _ in range(2):
        assert compiled({"w": w}, put())["w"].spec == ROWS
    assert w.sum()


@pytest.mark.parametrize("other", ["the same Array", "another Array of the same memory"])
def test_donated_leaves_that_share_memory(other):
    a = put(1)
    b = a if other == "the same Array" else ft.Array(a.shape, a.dtype, a.layout, a.mesh, a.shards)
    with pytest.raises(ShardingError) as e:
        ft.compile(step, mesh=MESH, donate_argnums=0)({"a": a, "b": b}, put())
    assert str(e.value) == (
        "state/a and state/b of step share memory, and state/a is donated: its memory may be written over while the "
        "other is "
        "read. Give state/b its own copy, x.reshard(x.spec), or leave the argument out of donate_argnums."
    )
    ft.compile(step, mesh=MESH, donate_argnums=0)({"a": a, "b": b.reshard(b.spec)}, put())
    ft.compile(step, mesh=MESH)({"a": (c := put()), "b": c}, c)  # without donation there is nothing to fear


def test_a_donated_leaf_that_is_also_given_elsewhere():
    a = put(1)
    with pytest.raises(ShardingError, match="state/w and x of step share memory, and state/w is donated"):
        ft.compile(step, mesh=MESH, donate_argnums=0)({"w": a}, a)
    with pytest.raises(ShardingError, match="state/w and x of step share memory, and x is donated"):
        ft.compile(step, mesh=MESH, donate_argnums=1)({"w": a}, a)


CONSTANT = randn(4, 4, seed=9)


@on_meshes
@pytest.mark.parametrize("donate", [(), 0])
def test_results_own_their_memory(axes, donate):
    """Results that are inputs, views of them, constants, parts of one tensor, or one value twice."""

    def f(state, x):
        y = x * 2
        return {
            "input": state["w"],
            "transposed": state["w"].T,
            "row": x[0],
            "again": [y, y, y.T],
            "halves": ft.tree.map(lambda v: v, torch.sin(x).chunk(2, 1)),
            "expanded": x.sum(0, keepdim=True).expand(4, 4),
            "constant": CONSTANT,
            "scalar": x.sum(),
        }

    mesh = mesh_of(axes)
    state, x = {"w": put(1, mesh=mesh)}, randn(4, 4, seed=2)
    kept = (x,) if donate == 0 else (state, x)  # what is given up is the results' to take
    inputs = set(memory(kept)) | {CONSTANT.untyped_storage().data_ptr()}
    out = ft.compile(f, mesh=mesh, donate_argnums=donate)(state, x)
    places = memory(out)
    assert len(places) == len(set(places)) and not inputs & set(places)
    for leaf in tree.leaves(out):
        for t in leaf.shards if isinstance(leaf, ft.Array) else [leaf]:
            assert t.is_contiguous() and t.untyped_storage().nbytes() == t.numel() * t.element_size()
    back = ft.compile(lambda s: tree.map(lambda v: v + 1, s), mesh=mesh, donate_argnums=0)(out)
    torch.testing.assert_close(tree.leaves(back["constant"])[0], CONSTANT + 1)


def test_results_carry_no_autograd_graph():
    w = randn(4, 4).requires_grad_()
    out = ft.compile(lambda x: x * w, mesh=mesh_of({}))(w)
    assert not out.requires_grad


# --- calls that do not fit ------------------------------------------------------------------------------------------


def test_arguments_may_be_named():
    compiled = ft.compile(step, mesh=MESH, donate_argnums=0)
    assert compiled(x=put(), state={"w": put()})["w"].shape == (4, 4)
    assert compiled.lower({"w": put()}, x=put()).inputs == ["state/w", "x"]


def test_a_default_stays():
    compiled = ft.compile(lambda x, power=2: x**power, mesh=MESH)
    torch.testing.assert_close(compiled(put()).full(), randn(4, 4) ** 2)


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        (
            (1,),
            {},
            "step(state, x) was called with 1 positional arguments: missing a required argument: 'x'. Give each "
            "parameter one "
            "argument.",
        ),
        (
            (1, 2, 3),
            {},
            "step(state, x) was called with 3 positional arguments: too many positional arguments. Give each parameter "
            "one "
            "argument.",
        ),
        (
            (1,),
            {"y": 2},
            "step(state, x) was called with 1 positional arguments and y: missing a required argument: 'x'. Give each "
            "parameter one argument.",
        ),
    ],
)
def test_a_wrong_number_of_arguments(args, kwargs, message):
    with pytest.raises(ArgumentError) as e:
        ft.compile(step, mesh=MESH)(*args, **kwargs)
    assert str(e.value) == message and e.value.__cause__ is None


def test_arguments_by_keyword_only():
    with pytest.raises(ArgumentError, match=r"f takes y by keyword only; .* Make them positional, or close over them"):

        def f(x, *, y):
            return x + y

        ft.compile(f, mesh=MESH)(put(), y=put())


def test_donated_positions_that_are_not_there():
    with pytest.raises(
        ArgumentError, match=r"donate_argnums=\(2,\) and called with 2 arguments; there is no argument 2"
    ):
        ft.compile(step, mesh=MESH, donate_argnums=2)({"w": put()}, put())
    with pytest.raises(ArgumentError, match="count arguments from 0"):
        ft.compile(step, mesh=MESH, donate_argnums=-1)


def test_leaves_that_are_no_tensors_are_named_at_once():
    with pytest.raises(TraceError) as e:
        ft.compile(lambda state, x: x, mesh=MESH)({"lr": 0.1, "name": "run"}, put())
    assert str(e.value) == (
        "2 problems in the arguments of <lambda>:\n"
        "  1. argument state/lr of <lambda> is 0.1 of type float; the leaves of a compiled function's arguments are "
        "tensors or "
        "Arrays. Write torch.tensor(...) for a number that changes between calls, or close over one that does not.\n"
        "  2. argument state/name of <lambda> is 'run' of type str; the leaves of a compiled function's arguments are "
        "tensors "
        "or Arrays. Write torch.tensor(...) for a number that changes between calls, or close over one that does not."
    )


def test_another_structure_is_another_trace_unless_traces_are_limited():
    compiled = ft.compile(step, mesh=MESH, max_traces=2)
    compiled({"w": put()}, put())
    compiled({"w": put(), "b": put()}, put())
    with pytest.raises(TraceError) as e:
        compiled({"w": put(), "bias": put()}, put())
    assert str(e.value) == (
        "step would be compiled for signature number 3, and max_traces=2. What changed since the last: state/bias is "
        "new; "
        "state/b is gone. Keep structure, shapes, dtypes and specs equal between calls, or raise max_traces."
    )
    with pytest.raises(TraceError, match=r"x: spec \(fsdp, None\) -> \(None, fsdp\)"):
        compiled({"w": put(), "b": put()}, put(spec=ft.P(None, "fsdp")))
    with pytest.raises(TraceError, match=r"x: float64\[4, 4\] -> float32\[1, 4\]\. Keep"):
        compiled({"w": put(), "b": put()}, torch.ones(1, 4))


def test_an_array_of_another_mesh():
    with pytest.raises(ShardingError) as e:
        ft.compile(step, mesh=MESH)({"w": put(mesh=mesh_of({"fsdp": 4}))}, put())
    assert str(e.value) == (
        "state/w is on mesh data=1, fsdp=4, tensor=1 (simulated), step is compiled for data=1, fsdp=2, tensor=1 "
        "(simulated); "
        "put it there with ft.device_put(x.full(), spec, mesh)."
    )


def test_an_abstract_mesh_does_not_run():
    mesh = ft.abstract_mesh({"fsdp": 2})
    x = ft.device_put(randn(4, 4), ROWS, mesh)
    compiled = ft.compile(lambda x: x + 1, mesh=mesh)
    assert compiled.lower(x).out_layouts[0] == x.layout
    with pytest.raises(ShardingError, match=r"compiled for fsdp=2 \(abstract\), on which nothing runs. Use .lower"):
        compiled(x)
