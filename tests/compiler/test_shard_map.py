"""shard_map: bodies of local tensors against the plain function of global ones, values, gradients and errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import spmd_types as spmd
import torch

import functitan as ft
from functitan import P, tree
from tests.compiler.placing import assert_same, randn, text_of
from tests.runtime.gloo import run_ranks

R, I, V, S = spmd.R, spmd.I, spmd.V, spmd.S
MESHES = [{"data": 1, "tensor": 1}, {"data": 1, "tensor": 2}, {"data": 2, "tensor": 2}]
on_meshes = pytest.mark.parametrize("axes", MESHES, ids=lambda a: "x".join(map(str, a.values())))


def mesh_of(axes: dict[str, int]) -> ft.Mesh:
    return ft.make_mesh(axes, simulate=True)


def agree(
    local: Callable[..., Any], whole: Callable[..., Any], args: tuple[torch.Tensor, ...], axes: Any
) -> ft.Program:
    """Outputs and gradients of all arguments, plain and on the mesh, equal those of a function of global tensors."""

    def derivative(f: Callable[..., Any]) -> Callable[..., Any]:
        def run(args: tuple[torch.Tensor, ...]) -> Any:
            def loss(args: tuple[torch.Tensor, ...]) -> Any:
                outs = tree.leaves(f(*args))
                # Weights that differ by place, so that gradients that land elsewhere differ.
                return sum((o * torch.arange(1.0, o.numel() + 1, dtype=o.dtype).reshape(o.shape)).sum() for o in outs)

            return ft.value_and_grad(loss)(args)

        return run

    expected = derivative(whole)(args)
    assert_same(derivative(local)(args), expected)
    assert_same(local(*args), whole(*args))
    compiled = ft.compile(derivative(local), mesh=mesh_of(axes))
    assert_same(compiled(args), expected)
    assert_same(ft.compile(local, mesh=mesh_of(axes))(*args), whole(*args))
    # Their collectives as they were lowered: passes join some.
    return ft.compile(derivative(local), mesh=mesh_of(axes), passes=ft.Passes.off()).lower(args)


def mlp(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """Column parallel, then row parallel."""
    return spmd.all_reduce(torch.relu(x @ up) @ down, "tensor", src=V, dst=I)


#: A call of a body each; of the module, because what a body closes over is part of its signature.
CALLS: list[int] = []
MLP = ft.shard_map(mlp, in_specs=(P("data", None), P(None, "tensor"), P("tensor", None)), out_specs=P("data", None))


def whole_mlp(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ up) @ down


def mlp_args() -> tuple[torch.Tensor, ...]:
    return randn(4, 6, seed=1), randn(6, 8, seed=2), randn(8, 6, seed=3)


SEVERAL = [{"data": 1, "tensor": 2}, {"data": 2, "tensor": 1}, {"data": 2, "tensor": 2}, {"data": 3, "tensor": 2}]


def over_both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Every collective over two axes at once."""
    full = spmd.all_gather(x, "data+tensor", src=S(0), dst=R)
    y = spmd.reduce_scatter(full * x.sum(), "data+tensor", src=V, dst=S(0))
    z = spmd.all_to_all(torch.tanh(y / 100), "data+tensor", src=S(0), dst=S(1))
    return z, spmd.all_reduce((y * y).sum(), "data+tensor", src=V, dst=I)


@pytest.mark.parametrize("axes", SEVERAL, ids=lambda a: "x".join(map(str, a.values())))
def test_collectives_over_several_axes_at_once(axes: dict[str, int]) -> None:
    both = ("data", "tensor")
    f = ft.shard_map(over_both, in_specs=P(both, None), out_specs=(P(None, both), P()))

    def whole(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x * x.sum()
        return torch.tanh(y / 100), (y * y).sum()

    program = agree(f, whole, (randn(6, 12, seed=1) if 3 in axes.values() else randn(4, 8, seed=1),), axes)
    live = tuple(a for a, n in axes.items() if n > 1)
    inside = [c for c in program.collectives() if c.why == "shard_map(over_both)"]
    assert {c.axes for c in inside} == {live}
    assert sorted(c.kind for c in inside if not c.backward) == [
        "all_gather",
        "all_reduce",
        "all_to_all",
        "reduce_scatter",
    ]


def test_the_place_of_a_rank_on_several_axes() -> None:
    """Major to minor, in the order of the mesh; convert cuts by it."""

    def body(x: torch.Tensor) -> torch.Tensor:
        total = spmd.all_reduce(x.sum(), "data+tensor", src=V, dst=R)
        part = spmd.convert(total * torch.ones(8), "data+tensor", src=R, dst=S(0))
        return part * (1 + ft.axis_index("data+tensor")) * ft.axis_size("data+tensor")

    spec = P(("data", "tensor"))
    f = ft.shard_map(body, in_specs=spec, out_specs=spec)
    out = ft.compile(f, mesh=mesh_of({"data": 2, "tensor": 2}))(torch.ones(8)).full()
    assert out.tolist() == [8 * 4 * i for i in (1, 1, 2, 2, 3, 3, 4, 4)]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("tensor+data", 'the order of the mesh is "data\\+tensor".*Write "data\\+tensor"'),
        ("data+data", "names an axis of .* twice"),
        ("data+tensr", 'unknown mesh axis "tensr".*Did you mean "tensor"'),
    ],
)
def test_axes_that_cannot_be_taken_together(name: str, said: str) -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        return spmd.all_reduce(x.sum(), name, src=V, dst=I)

    f = ft.shard_map(body, in_specs=P(("data", "tensor")), out_specs=P())
    with pytest.raises(ft.FunctitanError, match=said):
        ft.compile(f, mesh=mesh_of({"data": 2, "tensor": 2}))(torch.ones(8))


@on_meshes
def test_column_and_row_parallel(axes: dict[str, int]) -> None:
    program = agree(MLP, whole_mlp, mlp_args(), axes)
    inside = [c for c in program.collectives() if c.why == "shard_map(mlp)"]
    if axes["tensor"] == 1:
        assert not inside
    else:
        (only,) = inside
        assert (only.kind, only.axes, only.count, only.backward) == ("all_reduce", ("tensor",), 1, False)
        assert only.nbytes == 4 // axes["data"] * 6 * 8  # 2 (n-1)/n = 1 of float64[4, 6], split over data
        assert "test_shard_map.py" in only.line


@on_meshes
def test_a_replicated_input_leaves_a_pending_gradient(axes: dict[str, int]) -> None:
    """x is R over tensor: its gradient is added up once, outside; the loss's axes likewise."""
    program = agree(MLP, whole_mlp, mlp_args(), axes)
    backward = [c for c in program.collectives() if c.backward and "tensor" in c.axes]
    kinds = sorted(c.kind for c in backward)
    assert kinds == ([] if axes["tensor"] == 1 else ["all_gather", "all_gather", "all_reduce"])


def gather_scatter(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Sequence parallel in and out of a sharded matmul."""
    full = spmd.all_gather(x, "tensor", src=S(0), dst=R)
    return spmd.reduce_scatter(torch.tanh(full @ w) @ w.T, "tensor", src=V, dst=S(0))


@on_meshes
def test_all_gather_and_reduce_scatter(axes: dict[str, int]) -> None:
    f = ft.shard_map(gather_scatter, in_specs=(P("tensor", None), P(None, "tensor")), out_specs=P("tensor", None))
    program = agree(f, lambda x, w: torch.tanh(x @ w) @ w.T, (randn(4, 3, seed=4), randn(3, 4, seed=5)), axes)
    kinds = sorted(c.kind for c in program.collectives() if c.why == "shard_map(gather_scatter)")
    assert kinds == ([] if axes["tensor"] == 1 else ["all_gather", "all_gather", "reduce_scatter", "reduce_scatter"])


@on_meshes
def test_all_to_all(axes: dict[str, int]) -> None:
    """Heads to sequence and back, with an op between that needs whole rows."""

    def body(x: torch.Tensor) -> torch.Tensor:
        rows = spmd.all_to_all(x, "tensor", src=S(1), dst=S(0))
        return spmd.all_to_all(torch.softmax(rows, 0), "tensor", src=S(0), dst=S(1))

    def columns(x: torch.Tensor) -> torch.Tensor:
        columns = spmd.all_to_all(x, "tensor", src=S(0), dst=S(1))
        return spmd.all_to_all(torch.softmax(columns, 0), "tensor", src=S(1), dst=S(0))

    f = ft.shard_map(columns, in_specs=P("tensor", None), out_specs=P("tensor", None))
    agree(f, lambda x: torch.softmax(x, 0), (randn(4, 6, seed=6),), axes)
    g = ft.shard_map(body, in_specs=P(None, "tensor"), out_specs=P(None, "tensor"))
    agree(g, lambda x: torch.softmax(x, 0), (randn(4, 6, seed=7),), {"data": 1, "tensor": 1})


@on_meshes
def test_converts_take_the_rank_as_a_coordinate(axes: dict[str, int]) -> None:
    """R -> S and R -> P and back; the lowered text is one for all ranks."""

    def body(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mine = spmd.convert(x, "tensor", src=R, dst=S(1))
        once = spmd.convert(torch.sin(x), "tensor", src=R, dst=spmd.P)
        total = spmd.all_reduce(once, "tensor", src=spmd.P, dst=I)
        padded = spmd.convert(torch.cos(mine), "tensor", src=S(1), dst=spmd.P, expert_mode=True)
        return mine * 2, total + spmd.all_reduce(padded, "tensor", src=spmd.P, dst=I)

    f = ft.shard_map(body, in_specs=P(None, None), out_specs=(P(None, "tensor"), P(None, None)))
    agree(f, lambda x: (x * 2, torch.sin(x) + torch.cos(x)), (randn(3, 4, seed=8),), axes)


@on_meshes
def test_an_invariant_input_and_a_pending_output(axes: dict[str, int]) -> None:
    """Types other than the usual ones at a boundary are written with SpmdType."""

    def body(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return spmd.convert(x, "tensor", src=I, dst=R) @ w

    f = ft.shard_map(
        body,
        in_specs=(spmd.SpmdType({"tensor": I}, P(None, None)), P(None, None)),
        out_specs=spmd.SpmdType({"tensor": spmd.P}, P(None, None)),
    )
    mesh = mesh_of({"data": 1, "tensor": 2})
    with pytest.raises(ft.FunctitanError, match="would count it once per rank"):
        ft.compile(f, mesh=mesh).lower(randn(2, 3), randn(3, 2))

    def parts(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return spmd.convert(x, "tensor", src=I, dst=S(1)) @ w

    g = ft.shard_map(
        parts,
        in_specs=(spmd.SpmdType({"tensor": I}, P(None, None)), P("tensor", None)),
        out_specs=spmd.SpmdType({"tensor": spmd.P}, P(None, None)),
    )
    agree(g, lambda x, w: x @ w, (randn(2, 4, seed=1), randn(4, 2, seed=2)), axes)


@on_meshes
def test_place_on_the_mesh(axes: dict[str, int]) -> None:
    """A ring of shifts is not needed to know the place: each rank masks its part of a triangle."""

    def causal(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        first = ft.axis_index("tensor") * q.shape[0]
        keys = spmd.all_gather(k, "tensor", src=S(0), dst=R)
        seen = torch.arange(q.shape[0])[:, None] + first >= torch.arange(keys.shape[0])[None, :]
        assert keys.shape[0] == k.shape[0] * ft.axis_size("tensor")
        return torch.where(seen, q @ keys.T, 0.0)

    f = ft.shard_map(causal, in_specs=P("tensor", None), out_specs=P("tensor", None))
    agree(f, lambda q, k: (q @ k.T).tril(), (randn(4, 3, seed=1), randn(4, 3, seed=2)), axes)


@pytest.mark.parametrize("remat", [None, ft.nothing_saveable], ids=["default", "nothing_saveable"])
@on_meshes
def test_inside_scan(axes: dict[str, int], remat: Any) -> None:
    """A body in a scan's body: one trace for all layers, one collective per layer, repeated only by remat."""

    def model(f: Callable[..., Any]) -> Callable[..., Any]:
        def run(x: torch.Tensor, ups: torch.Tensor, downs: torch.Tensor) -> torch.Tensor:
            step = lambda h, w: (h + f(torch.tanh(h), *w), None)  # noqa: E731
            return ft.scan(step, x, (ups, downs), remat=remat)[0]

        return run

    args = randn(4, 6, seed=1), randn(3, 6, 8, seed=2) / 3, randn(3, 8, 6, seed=3) / 3
    program = agree(model(MLP), model(whole_mlp), args, axes)
    inside = [c for c in program.collectives() if c.why == "shard_map(mlp)" and c.kind == "all_reduce"]
    assert sum(c.count for c in inside) == (0 if axes["tensor"] == 1 else 3)


def test_check_in_float64() -> None:
    """ft.check takes a body of float32 as the rest: rewritten to float64, on one device and on the mesh."""

    def step(params: list[torch.Tensor], x: torch.Tensor) -> Any:
        def loss(params: list[torch.Tensor]) -> torch.Tensor:
            return (MLP(x, *params).float() ** 2).sum()

        return ft.value_and_grad(loss)(params)

    x, up, down = (a.float() for a in mlp_args())
    report = ft.check(step, ([up, down], x), mesh_of({"data": 2, "tensor": 2}))
    assert report, report


def test_a_body_is_traced_once_for_equal_calls() -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        CALLS.append(1)
        return torch.sin(x)

    CALLS.clear()
    f = ft.shard_map(body, in_specs=P("tensor"), out_specs=P("tensor"))
    ft.compile(lambda x: f(f(f(x))), mesh=mesh_of({"tensor": 2})).lower(randn(4))
    thrice = len(CALLS)
    ft.compile(lambda x: f(x), mesh=mesh_of({"tensor": 2})).lower(randn(4))
    assert len(CALLS) == 2 * thrice


# --- errors ----------------------------------------------------------------------------------------------------


def refused(body: Callable[..., Any], out_specs: Any, in_specs: Any = None, shape: Any = (2, 4)) -> str:
    f = ft.shard_map(body, in_specs=in_specs or P(None, "tensor"), out_specs=out_specs)
    with pytest.raises(ft.FunctitanError) as e:
        ft.compile(lambda x: f(x), mesh=mesh_of({"data": 2, "tensor": 2})).lower(randn(*shape))
    return text_of(e.value)


def test_r_where_an_output_must_be_i() -> None:
    text = refused(lambda x: spmd.all_reduce(x.sum(1), "tensor", src=V, dst=R), P(None))
    assert 'output value with out_specs P(None): over "tensor" it is R' in text
    assert 'Write dst=spmd.I in the collective over "tensor"' in text
    assert text.startswith("test_shard_map.py:N")


def test_a_missing_reduction() -> None:
    text = refused(lambda x: x.sum(1), P(None))
    assert 'over "tensor" it differs between ranks (V)' in text and 'a reduction over "tensor" is missing' in text
    assert 'spmd.all_reduce(y, "tensor", src=spmd.V, dst=spmd.I)' in text


def test_a_pending_sum_where_none_is_said() -> None:
    text = refused(lambda x: spmd.reinterpret(x.sum(1), "tensor", src=V, dst=spmd.P), P(None))
    assert 'over "tensor" it is a pending sum (P)' in text and 'spmd.SpmdType({"tensor": spmd.P}, P(None))' in text


def test_a_spec_that_splits_what_is_whole() -> None:
    text = refused(lambda x: spmd.all_reduce(x, "tensor", src=V, dst=I), P(None, "tensor"))
    assert "the same on all ranks, and the spec splits dim 1" in text
    assert 'spmd.convert(y, "tensor", src=spmd.I, dst=spmd.S(1))' in text


def test_a_nonlinear_op_of_a_pending_sum_names_the_axis() -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        y = spmd.reinterpret(x, "tensor", src=V, dst=spmd.P)
        return torch.relu(y)

    text = refused(body, P(None, None))
    assert text.startswith("test_shard_map.py:N (return torch.relu(y)): shard_map(body)")
    assert "axis tensor" in text and "all_reduce(tensor, tensor, src=P, dst=I)" in text


def test_an_invariant_that_needs_a_gradient_does_not_mix_with_varying() -> None:
    """Its gradient would miss the other ranks' parts; without a derivative the same body is fine."""

    def body(x: torch.Tensor) -> torch.Tensor:
        return x * spmd.all_reduce(x.sum(), "tensor", src=V, dst=I)

    f = ft.shard_map(body, in_specs=P("tensor"), out_specs=P("tensor"))
    mesh = mesh_of({"tensor": 2})
    assert_same(ft.compile(f, mesh=mesh)(randn(4)), f(randn(4)))
    with pytest.raises(ft.FunctitanError, match="Invariant type on axis tensor cannot mix"):
        ft.compile(ft.grad(lambda x: f(x).sum()), mesh=mesh).lower(randn(4))


def test_an_unknown_axis() -> None:
    text = refused(lambda x: spmd.all_reduce(x, "tensr", src=V, dst=I), P(None, None))
    assert 'unknown mesh axis "tensr"' in text and 'Did you mean "tensor"?' in text
    text = refused(lambda x: spmd.all_reduce(x, "data", src=V, dst=I), P(None, None))
    assert 'uses axis "data", and no spec of it does (they name tensor)' in text
    text = refused(lambda x: x, P(None, "tensor"), in_specs=P(None, "tensr"))
    assert 'unknown mesh axis "tensr"' in text and "in_specs of input 0" in text


def test_sizes_written_as_numbers() -> None:
    text = refused(lambda x: x[:, :2], P(None, "tensor"))
    assert "the body gives local shape (2, 2)" in text and "never as numbers" in text

    text = refused(lambda x: x.reshape(2, 4), P(None, "tensor"))
    assert "cannot run on local shapes" in text and "ft.axis_size" in text


def test_factories_in_a_body() -> None:
    """What every rank makes alike is R and needs no type."""

    def body(x: torch.Tensor) -> torch.Tensor:
        return x * torch.arange(4) + torch.zeros(4) + torch.ones_like(x) - torch.full((4,), 2.0)

    f = ft.shard_map(body, in_specs=P("tensor", None), out_specs=P("tensor", None))
    assert_same(ft.compile(f, mesh=mesh_of({"tensor": 2}))(randn(4, 4)), f(randn(4, 4)))


def test_closing_over_a_tensor() -> None:
    w = randn(4)

    def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return ft.shard_map(lambda x: x * w, in_specs=P("tensor"), out_specs=P("tensor"))(x)

    with pytest.raises(ft.FunctitanError, match=r"closes over a tensor of shape \(4,\)"):
        ft.compile(step, mesh=mesh_of({"tensor": 2})).lower(randn(4), w)


def test_constrain_inside_and_index_outside() -> None:
    text = refused(lambda x: ft.constrain(x, P(None, None)), P(None, "tensor"))
    assert "constrain in the shard_map body" in text
    with pytest.raises(ft.FunctitanError, match="outside a shard_map body"):
        ft.axis_index("tensor")


def test_specs_that_do_not_fit_the_arguments() -> None:
    f = ft.shard_map(lambda x, y: x, in_specs=(P(None),), out_specs=P(None))
    with pytest.raises(ft.FunctitanError, match="in_specs of shard_map"):
        f(randn(2), randn(2))


def test_two_processes_equal_the_simulated_mesh_bit_for_bit() -> None:
    run_ranks(2, "tests.runtime.ranks_shard_map", "tensor=2", "0")


def test_four_processes_over_two_axes_at_once() -> None:
    """Gloo adds up four parts in another order than the simulated mesh."""
    run_ranks(4, "tests.runtime.ranks_shard_map", "data=2,tensor=2", "1e-12")
