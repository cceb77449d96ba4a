"""Every op family by value: each single split of each operand, and each operand as a pending sum, forward and backward.

The error messages of ops without a rule stand here too, and a rule that a user registers.
"""

from __future__ import annotations

import pytest
import torch

import functitan as ft
from functitan.sharding import covered, register_rule
from tests.sharding.harness import difference, with_gradients
from tests.sharding.op_cases import CASES, Case

P = ft.P
MESH = ft.make_mesh({"a": 2}, simulate=True)


def _summed(case: Case):
    """The case on operands that are sums of two addends, so that a split of the addends is a pending sum."""
    return lambda *xs: case.f(*(x.sum(0) if x.is_floating_point() else x for x in xs))


def _addends(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x * 0.25, x * 0.75]) if x.is_floating_point() else x


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_split_equals_one_device(case):
    inputs = [_addends(x) for x in case.inputs]
    f = with_gradients(_summed(case), inputs, case.constant)
    want = f(*inputs)
    compiled = ft.compile(f, mesh=MESH, conflicts="auto")
    assert difference(compiled(*inputs), want) < 1e-10
    for i, x in enumerate(inputs):
        for d, n in enumerate(x.shape):
            if n % 2 == 0:
                spec = P(*("a" if j == d else None for j in range(x.ndim)))
                given = [ft.device_put(x, spec, MESH) if j == i else y for j, y in enumerate(inputs)]
                worst = difference(compiled(*given), want)
                assert worst < 1e-10, f"operand {i} as {spec} (dim 0 of a float is its addends): differs by {worst}"


# --- communication that must not happen ------------------------------------------------------------------------


def moves(f, *arrays, conflicts="error"):
    program = ft.compile(f, mesh=MESH, conflicts=conflicts, passes=ft.Passes.off()).lower(*arrays)
    return [(c.kind, c.nbytes) for c in program.collectives()]


def test_a_split_vocabulary_gathers_no_logits():
    """Per row: a maximum, a sum of exponentials and the target's logit; backward adds the sum of the gradient."""
    logits = ft.device_put(torch.randn(8, 32), P(None, "a"), MESH)
    target = torch.randint(0, 32, (8,))

    def loss(x):
        return torch.nn.functional.cross_entropy(x, target, reduction="sum")

    found = moves(ft.value_and_grad(loss), logits)
    assert {kind for kind, _ in found} == {"all_reduce"}
    assert max(nbytes for _, nbytes in found) == 8 * 4  # one float per row, over two ranks
    assert len(found) <= 4


def test_a_split_vocabulary_looks_up_where_it_lies():
    table = ft.device_put(torch.randn(32, 4), P("a", None), MESH)
    tokens = torch.randint(0, 32, (8,))
    found = moves(lambda w: torch.nn.functional.embedding(tokens, w), table)
    assert found == [("all_reduce", 8 * 4 * 4)]
    backward = moves(ft.grad(lambda w: torch.nn.functional.embedding(tokens, w).sum()), table)
    assert backward == []


def test_a_flatten_of_batch_and_sequence_moves_nothing():
    mesh = ft.make_mesh({"data": 2, "tensor": 2}, simulate=True)
    x = ft.device_put(torch.randn(4, 8, 6), P("data", "tensor", None), mesh)

    def f(x, w):
        return ((x.reshape(-1, 6) @ w).tanh() * 2).reshape(4, 8, 3)

    assert ft.compile(f, mesh=mesh).lower(x, torch.randn(6, 3)).collectives() == ()


# --- errors and user rules -------------------------------------------------------------------------------------

torch.library.define("functitan_test::scaled_softmax", "(Tensor x, Tensor s) -> Tensor")


@torch.library.impl("functitan_test::scaled_softmax", "CompositeExplicitAutograd")
def _scaled_softmax(x, s):
    return torch.softmax(x * s, -1)


@torch.library.register_fake("functitan_test::scaled_softmax")
def _(x, s):
    return torch.empty_like(x)


def test_an_op_without_a_rule_and_then_with_one():
    op = torch.ops.functitan_test.scaled_softmax

    def f(x, s):
        return op(x, s)

    x, s = torch.randn(4, 6), torch.randn(6)
    with pytest.raises(ft.FunctitanError) as e:
        ft.compile(f, mesh=MESH).lower(x, s)
    text = str(e.value)
    place, told = text.split(": ", 1)
    assert place.startswith("test_op_rules.py:") and place.endswith("(return op(x, s))")
    assert told == (
        "no sharding rule for functitan_test.scaled_softmax.default. If all its dims must be whole, register one with\n"
        '    ft.sharding.register_rule(torch.ops.functitan_test.scaled_softmax, "__,_->__")\n'
        'and use letters for dims that may be split, such as "b_->b_".'
    )
    register_rule(op, "..._,_->..._")
    y = ft.compile(f, mesh=MESH)(ft.device_put(x, P("a", None), MESH), s)
    assert y.spec == P("a", None)
    torch.testing.assert_close(y.full(), f(x, s))
    with pytest.raises(ft.FunctitanError, match="needs a dim whole that is split over a"):
        ft.compile(f, mesh=MESH).lower(ft.device_put(x, P(None, "a"), MESH), s)


def test_covered_lists_families():
    families = covered()
    assert {"pointwise", "reduction", "matmul", "attention", "lookup"} <= set(families)
    assert "refused" not in families and "aten.mm.default" in families["matmul"]


def test_ops_about_memory_are_refused_with_what_to_write():
    with pytest.raises(ft.FunctitanError, match=r"(?s)as_strided.*cannot be sharded.*Write reshape, slices"):
        ft.compile(lambda x: torch.as_strided(x, (2, 2), (1, 2)), mesh=MESH).lower(torch.randn(4, 4))


def test_a_bool_index_says_where():
    with pytest.raises(ft.FunctitanError, match=r"torch\.where"):
        ft.compile(lambda x: x[x > 0], mesh=MESH).lower(torch.randn(4, 4))


def test_debug_print_prints_the_whole_value_once(capsys):
    x = ft.device_put(torch.arange(4.0), P("a"), MESH)
    ft.compile(lambda x: (ft.debug.print("sum {s:.1f}", s=x.sum()), x * 2)[1], mesh=MESH)(x)
    assert capsys.readouterr().out == "sum 6.0\n"
    with pytest.raises(ft.FunctitanError, match=r"debug_print.*needs a dim whole"):
        ft.compile(lambda x: (ft.debug.print("{}", x), x)[1], mesh=MESH).lower(x)


# --- found by the property tests -------------------------------------------------------------------------------


def test_a_dim_that_an_op_makes_whole_is_not_made_split_on_demand():
    """The gradient of x[1] of a cotangent that can be made in any layout; the sum with a split gradient asked for one."""
    x = torch.arange(6.0, dtype=torch.float64)

    def f(x):
        return (x * x).sum() + x.select(0, 1) * 3

    got = ft.compile(ft.grad(f), mesh=MESH, conflicts="auto")(ft.device_put(x, P("a"), MESH))
    torch.testing.assert_close(got.full(), ft.grad(f)(x))


def test_a_number_is_not_added_once_per_rank():
    x = ft.device_put(torch.arange(8.0).reshape(2, 4), P("a", None), MESH)
    y = ft.compile(lambda x: x.sum(0) + 2, mesh=MESH)(x)
    torch.testing.assert_close(y, x.full().sum(0) + 2)
