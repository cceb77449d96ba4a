"""ft.scan inside ft.compile: carries, outputs per step, nesting, stacks of unlike layers, and what is refused."""

from __future__ import annotations

import pytest
import torch

import functitan as ft
from functitan import tree
from functitan.errors import ShardingError, TraceError, TreeError
from tests.compiler.placing import RULES, agree, mesh_of, on_meshes, place, randn, text_of

L, B, S, D, F = 4, 4, 4, 8, 16
X = randn(B, S, D, seed=1)
W = {"up": randn(L, D, F, seed=2) / 3, "down": randn(L, F, D, seed=3) / 3}
W_NAMES = {"up": "param layers embed mlp", "down": "param layers mlp embed"}
X_NAMES = "batch seq embed"
FSDP = {"fsdp": 2}


def layer(x, w):
    h = ft.constrain(x, ("batch", "whole_seq", "embed")) @ w["up"]
    return x + ft.constrain(torch.tanh(h) @ w["down"], ("batch", "seq", "embed"))


def block(x, w):
    return layer(x, w), None


def grads(loss):
    return ft.value_and_grad(loss, argnums=(0, 1))


def check(loss, axes, w=W, w_names=W_NAMES):
    return agree(grads(loss), (w, X), (w_names, X_NAMES), axes)


@on_meshes
def test_a_scan_is_its_loop(axes):
    def loss(w, x):
        y, ys = ft.scan(block, x, w)
        assert ys is None
        return y.square().sum()

    program, _ = check(loss, axes)
    assert len(program.bodies) == 1


@on_meshes
def test_outputs_per_step_are_stacked_and_differentiable(axes):
    def loss(w, x):
        def body(c, u):
            c = layer(c, u)
            return c, {"sum": c.sum(-1), "mean": (c.mean(), c * 2)}

        y, ys = ft.scan(body, x, w)
        scale = torch.arange(1.0, L + 1, dtype=torch.float64)
        assert ys["sum"].shape == (L, B, S)
        return y.sum() + (ys["sum"].square().sum((1, 2)) * scale).sum() + ys["mean"][0].sum() * ys["mean"][1].sum()

    check(loss, axes)


@on_meshes
def test_a_carry_of_several_leaves_and_integers(axes):
    def loss(w, x):
        def body(c, u):
            y = layer(c["y"], u)
            return {"y": y, "n": c["n"] + 1, "total": c["total"] + y.square().sum() * c["n"]}, c["n"]

        init = {"y": x, "n": torch.tensor(0), "total": torch.zeros((), dtype=x.dtype)}
        last, ns = ft.scan(body, init, w)
        return last["total"] + ns.sum() * last["y"].sum() + last["n"]

    check(loss, axes)


@on_meshes
def test_steps_without_xs(axes):
    def loss(w, x):
        y, steps = ft.scan(lambda c, _: (torch.sin(c) * w["up"].sum(), c.sum()), x, None, length=3)
        assert steps.shape == (3,)
        return y.sum() + steps.sum()

    check(loss, axes)


@on_meshes
def test_a_carry_that_the_body_cuts_off(axes):
    def loss(w, x):
        def body(c, u):
            y, kept = c
            y = layer(y, u)
            return (y, ft.stop_gradient(y)), (y * kept).sum()

        (y, kept), dots = ft.scan(body, (x, x * 2), w)
        return dots.sum() + (y * kept).sum()

    check(loss, axes)


@on_meshes
def test_a_carry_whose_gradient_starts_in_the_body(axes):
    def loss(w, x):
        zero = torch.zeros(B, S, D, dtype=x.dtype)
        total, _ = ft.scan(lambda c, u: (c + layer(x, u), None), ft.constrain(zero, ("batch", "seq", "embed")), w)
        return total.square().sum()

    check(loss, axes)


@on_meshes
def test_a_carry_without_any_gradient(axes):
    def loss(w, x):
        count, ys = ft.scan(lambda c, u: (c * 2.0, u["up"].sum() * c), torch.ones((), dtype=x.dtype), w)
        return ys.sum() * x.sum() + count

    check(loss, axes)


@on_meshes
def test_xs_that_are_not_read_get_zeros(axes):
    def loss(w, x):
        y, _ = ft.scan(lambda c, u: (c * u["up"].sum(), None), x, w)
        return y.sum()

    check(loss, axes)


@on_meshes
def test_xs_of_integers_and_flags(axes):
    def loss(w, x):
        flags = torch.tensor([True, False, True, True])

        def body(c, row):
            u, i, flag = row
            return torch.where(flag, layer(c, u), c) * (i + 1), i

        y, order = ft.scan(body, x, (w, torch.arange(L), flags))
        return y.sum() + order.sum()

    check(loss, axes)


@on_meshes
def test_a_carry_that_is_a_constant(axes):
    """Nothing that enters the scan comes from an argument."""

    def f(w, x):
        one = ft.constrain(torch.tensor(1.0), ())
        return ft.scan(lambda c, _: (~c, c), torch.tensor(True), None, length=3), ft.region(torch.neg)(one), x

    agree(f, (W, X), (W_NAMES, X_NAMES), axes)


@on_meshes
def test_carries_that_change_places(axes):
    """The gradient of one carry reaches the other a step later."""

    def loss(w, x):
        zero = ft.constrain(torch.zeros(B, S, D, dtype=x.dtype), ("batch", "seq", "embed"))
        (a, b, _), _ = ft.scan(lambda c, u: ((c[1], c[2], c[2] * u["up"].sum()), None), (zero, zero * 1, x), w)
        return (a + b * 2).sum()

    check(loss, axes)


@on_meshes
def test_parameters_as_a_carry_and_as_rows_and_whole(axes):
    def loss(w, x):
        last, sums = ft.scan(lambda c, u: (torch.sin(c), c.sum() * u["up"].sum() * w["up"].sum()), w["down"], w)
        return sums.sum() * x.sum() + last.sum()

    check(loss, axes)


@on_meshes
def test_one_step_and_one_body(axes):
    first = tree.map(lambda u: u[:1], W)

    def loss(w, x):
        y, ys = ft.scan(lambda c, u: (layer(c, u), c.sum()), x, w)
        return y.sum() + ys.sum()

    check(loss, axes, first)


@on_meshes
def test_a_scan_in_a_scan(axes):
    """A period of two layers, scanned; each period ends with a gate that it captures from outside."""
    twice = tree.map(lambda u: u.reshape(L // 2, 2, *u.shape[1:]), W)
    names = {"up": "param layers layers embed mlp", "down": "param layers layers mlp embed"}

    def loss(w, x):
        gate = x.mean()

        def period(c, u):
            c, sums = ft.scan(lambda c, v: (layer(c, v), (c * gate).sum()), c, u)
            return c * torch.sigmoid(gate), sums

        y, sums = ft.scan(period, x, w)
        assert sums.shape == (L // 2, 2)
        return y.square().sum() + sums.square().sum()

    program, _ = check(loss, axes, twice, names)
    assert len(program.bodies) == 2


@on_meshes
def test_a_period_of_unlike_layers_with_regions(axes):
    """Two local layers and one full one per period; the local ones are calls of one region."""
    w = {"local": {k: torch.stack([v[:2], v[2:]], 1) for k, v in W.items()}, "full": tree.map(lambda v: v[:2] * 2, W)}
    names = {"full": W_NAMES, "local": {k: f"param layers {n[6:]}" for k, n in W_NAMES.items()}}

    def loss(w, x):
        local = ft.region(lambda c, u: torch.sin(layer(c, u)), name="local")
        full = ft.region(layer, name="full")

        def period(c, u):
            for i in range(2):
                c = local(c, tree.map(lambda v: v[i], u["local"]))  # noqa: B023
            return full(c, u["full"]), None

        return ft.scan(period, x, w)[0].square().sum()

    program, _ = check(loss, axes, w, names)
    assert sorted(b.label for b in program.bodies.values()) == ["full", "local", "period"]


@on_meshes
def test_segments_of_unlike_layers(axes):
    """One layer of another kind first, then a scan: the first layers of a mixture of experts are dense."""
    w = {"first": randn(D, D, seed=8), "rest": W}
    names = {"first": "param embed _", "rest": W_NAMES}

    def loss(w, x):
        x = ft.region(lambda c, u: c + ft.constrain(c @ u, ("batch", "seq", "embed")), name="dense")(x, w["first"])
        return ft.scan(block, x, w["rest"])[0].square().sum()

    program, _ = check(loss, axes, w, names)
    assert sorted(b.label for b in program.bodies.values()) == ["block", "dense"]


@on_meshes
def test_two_scans_of_one_body(axes):
    def loss(w, x):
        y, _ = ft.scan(block, x, w)
        return ft.scan(block, y, tree.map(lambda u: u * 0.5, w))[0].square().sum()

    check(loss, axes)


@on_meshes
def test_gradients_taken_inside_a_scan(axes):
    """Gradient accumulation: each step differentiates one microbatch, the carry is the sum of gradients."""

    def step(w, x):
        micro = x.reshape(2, 2, S, D)

        def one(carry, rows):
            value, g = ft.value_and_grad(lambda u: ft.scan(block, rows, u)[0].square().sum())(w)
            return (carry[0] + value, tree.map(torch.add, carry[1], g)), None

        zero = (torch.zeros((), dtype=x.dtype), tree.map(torch.zeros_like, w))
        return ft.scan(one, zero, micro)[0]

    agree(step, (W, X), (W_NAMES, "_ seq embed"), axes)


@on_meshes
def test_no_derivative_no_backward(axes):
    def forward(w, x):
        return ft.scan(lambda c, u: (torch.sin(c) * u["up"].sum(), c.sum()), x, w)

    program, _ = agree(forward, (W, X), (W_NAMES, X_NAMES), axes)
    (body,) = program.bodies.values()
    assert body.backward is None and not body.saved_values


# --- node counts ---------------------------------------------------------------------------------------------------


def program_of_depth(depth, remat=None):
    def loss(w, x):
        return ft.scan(block, x, w, remat=remat)[0].square().sum()

    mesh = mesh_of({"fsdp": 2, "tensor": 2})
    w = {"up": torch.ones(depth, D, F), "down": torch.ones(depth, F, D)}
    compiled = ft.compile(ft.value_and_grad(loss), mesh=mesh, rules=RULES)
    program = compiled.lower(place(w, W_NAMES, mesh), place(X.float(), X_NAMES, mesh))
    return program, next(iter(compiled._traces.values()))


def test_depth_adds_no_nodes():
    few, traced_few = program_of_depth(6)
    many, traced_many = program_of_depth(126)
    assert few.nodes() == many.nodes()
    assert len(traced_few.graph.nodes) == len(traced_many.graph.nodes)
    # Collectives of the body happen once per layer, those around the scan once.
    few_counts, many_counts = ([c.count for c in p.collectives()] for p in (few, many))
    assert {6, 1} >= set(few_counts) and many_counts == [126 if n == 6 else 1 for n in few_counts]


# --- what is refused -----------------------------------------------------------------------------------------------


def refused(loss, w=W, w_names=W_NAMES, axes=FSDP):
    mesh = mesh_of(axes)
    return ft.compile(grads(loss), mesh=mesh, rules=RULES).lower(place(w, w_names, mesh), place(X, X_NAMES, mesh))


def test_a_carry_that_changes_its_layout():
    def loss(w, x):
        def body(c, u):
            return ft.constrain(layer(c, u), (None, None, "batch")), None

        return ft.scan(body, x, w)[0].sum()

    with pytest.raises(ShardingError) as e:
        refused(loss)
    assert text_of(e.value) == (
        "test_scan.py:N (return ft.scan(body, x, w)[0].sum()): scan of body: carry 0 enters with spec (fsdp, None, "
        "None) "
        "and leaves the body with (None, None, fsdp); it keeps its spec. Write ft.constrain(carry, P('fsdp', None, "
        "None)) "
        "at the end of the body, or ft.constrain(carry, P(None, None, 'fsdp')) before the scan."
    )


def test_a_carry_is_named_by_its_path():
    def loss(w, x):
        def body(c, u):
            return {"h": ft.constrain(layer(c["h"], u), (None, None, "batch")), "n": c["n"] + 1}, None

        return ft.scan(body, {"h": x, "n": torch.tensor(0)}, w)[0]["h"].sum()

    with pytest.raises(ShardingError, match="scan of body: carry h enters with spec"):
        refused(loss)


def test_a_carry_may_enter_more_split_than_it_comes():
    """A slice is free, so a whole carry that the body splits is split on entry."""

    def loss(w, x):
        whole = ft.constrain(x, (None, None, None))
        return ft.scan(block, whole, w)[0].square().sum()

    check(loss, FSDP)


def test_a_scanned_dim_that_is_split():
    names = {"up": "param mlp embed _", "down": "param layers mlp embed"}
    with pytest.raises(ShardingError) as e:
        refused(lambda w, x: ft.scan(block, x, w)[0].sum(), w_names=names, axes={"tensor": 2})
    assert text_of(e.value) == (
        'test_scan.py:N (refused(lambda w, x: ft.scan(block, x, w)[0].sum(), w_names=names, axes={"tensor": 2})): '
        "scan of "
        "block: the scanned dim 0 of w/up with spec (tensor, None, None) is split; every rank runs all steps. Leave "
        "the "
        "leading dim whole (a rule such as layers=None)."
    )


def test_no_steps():
    with pytest.raises(TreeError, match="scan over 0 steps: the results of its body have no shape"):
        refused(lambda w, x: ft.scan(block, x, tree.map(lambda v: v[:0], w))[0].sum())


@pytest.mark.parametrize(
    ("body", "init", "message"),
    [
        (lambda c, u: c, X, "the body returned a tensor of shape .4, 4, 8.; it returns a pair"),
        (lambda c, u: ({"y": c}, None), X, "only the carry out has: y"),
        (
            lambda c, u: (c.float(), None),
            X,
            r"carry comes in as torch.float64 \(4, 4, 8\) and leaves the body as torch.float32",
        ),
        (lambda c, u: (c, None), 3, "scan: a leaf of init is 3"),
        (lambda c, u: (c, 3), X, "output 1 is 3; the outputs of a region or scan body are tensors"),
    ],
)
def test_bodies_that_are_no_scan_bodies(body, init, message):
    with pytest.raises((TraceError, TreeError), match=message):
        refused(lambda w, x: ft.scan(body, init, w)[0].sum())
