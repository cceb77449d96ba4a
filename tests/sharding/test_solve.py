"""What an equation makes of its operands' layouts: splits, contractions, pending sums, conflicts."""

import pytest
import torch

from functitan.errors import ShardingError
from functitan.sharding.layout import Layout
from functitan.sharding.op_rules.base import Call, TensorType, parse
from functitan.sharding.solve import operand_layouts, solve

SIZES = {"x": 2, "y": 2}
EACH = (frozenset({0}), frozenset({1}))
BOTH = (frozenset({0, 1}),)


def call(shapes, out, dtype=torch.float32):
    return Call("op", (), {}, tuple(TensorType(s, dtype) for s in shapes), (TensorType(out, dtype),))


def L(*dims, pending=()):
    return Layout(tuple(dims), pending)


def mm(a, b, linear=EACH):
    c = call([(8, 4), (4, 8)], (8, 8))
    return solve(parse("mk,kn->mn", c, linear=linear), c, [a, b], SIZES)


def test_free_labels_go_through():
    s = mm(L(("x", 4), (4,)), L((4,), ("y", 4)))
    assert s.outputs == [L(("x", 4), ("y", 4))] and not s.conflicts


def test_a_split_contraction_is_pending_and_splits_the_other_operand():
    s = mm(L((8,), ("x", 2)), L((4,), (8,)))
    assert s.operands[1] == L(("x", 2), (8,))
    assert s.outputs == [L((8,), (8,), pending=("x",))] and not s.conflicts


def test_one_label_on_two_axes_is_a_conflict_and_the_larger_operand_wins():
    c = call([(8, 4), (4, 32)], (8, 32))
    s = solve(parse("mk,kn->mn", c), c, [L((8,), ("x", 2)), L(("y", 2), (32,))], SIZES)
    assert len(s.conflicts) == 1 and s.conflicts[0].operands == (1, 0)
    assert s.operands[0] == L((8,), ("y", 2))


def test_one_axis_on_two_labels_is_a_conflict():
    s = mm(L(("x", 4), (4,)), L((4,), ("x", 4)))
    assert 'axis "x" splits two different dims' in s.conflicts[0].what
    assert sum("x" in dim for dim in s.outputs[0].dims) == 1


def test_pending_through_a_product_but_not_through_two():
    one = mm(L((8,), (4,), pending=("x",)), L((4,), (8,)))
    assert one.outputs[0].pending == ("x",) and one.operands[0].pending == ("x",)
    both = mm(L((8,), (4,), pending=("x",)), L((4,), (8,), pending=("x",)))
    assert both.outputs[0].pending == () and both.operands[0].pending == both.operands[1].pending == ()


def test_pending_is_settled_where_the_axis_splits_a_label():
    s = mm(L((8,), (4,), pending=("x",)), L((4,), ("x", 4)))
    assert s.operands[0].pending == () and s.outputs == [L((8,), ("x", 4))]


def test_a_sum_needs_all_addends_pending_but_masks_a_scalar():
    c = call([(8,), (8,)], (8,))
    add = parse("...,...->...", c, linear=BOTH)
    assert solve(add, c, [L((8,), pending=("x",)), L((8,))], SIZES).outputs[0].pending == ()
    assert solve(add, c, [L((8,), pending=("x",))] * 2, SIZES).outputs[0].pending == ("x",)
    c = call([(), ()], ())
    s = solve(parse("...,...->...", c, linear=BOTH), c, [L(pending=("x",)), L()], SIZES)
    assert s.outputs[0].pending == ("x",) and s.masked == {(1, "x")}


def test_whole_dims_are_gathered_with_a_conflict():
    c = call([(8, 4)], (8, 4))
    s = solve(parse("b_->b_", c), c, [L(("x", 4), ("y", 2))], SIZES)
    assert s.outputs == [L(("x", 4), (4,))] and "whole" in s.conflicts[0].what


def test_joined_dims_are_carried_whole_and_cut():
    joined = ("x", 2, "y", 2)
    c = call([(16, 4), (4, 4)], (16, 4))
    s = solve(parse("mk,kn->mn", c), c, [L(joined, (4,)), L((4,), (4,))], SIZES)
    assert s.outputs == [L(joined, (4,))]
    c = call([(8, 6), (4, 6)], (8, 6))
    s = solve(parse("(gr)_,g_->(gr)_", c), c, [L(("x", 4), (6,)), L((4,), (6,))], SIZES)
    assert s.operands[1] == L(("x", 2), (6,))


def test_size_one_has_no_label():
    c = call([(8, 1), (1, 4)], (8, 4))
    s = solve(parse("...,...->...", c), c, [L(("x", 4), ()), L((), ("y", 2))], SIZES)
    assert s.outputs == [L(("x", 4), ("y", 2))] and not s.conflicts


def test_a_reference_only_proposes():
    c = call([(8, 4), (8, 4)], (8, 4))
    eq = parse("bd,bd->bd", c, refs=frozenset({1}))
    free = solve(eq, c, [L((8,), (4,)), L(("x", 4), (4,))], SIZES)
    assert free.outputs == [L(("x", 4), (4,))]
    overruled = solve(eq, c, [L((8,), ("x", 2)), L(("x", 4), (4,))], SIZES)
    assert overruled.outputs == [L((8,), ("x", 2))] and not overruled.conflicts


def test_operands_for_a_wanted_output():
    c = call([(8, 4), (4,)], (8, 4))
    eq = parse("...,...->...", c)
    assert operand_layouts(eq, c, L(("x", 4), ("y", 2)), SIZES) == [L(("x", 4), ("y", 2)), L(("y", 2))]


def test_an_equation_that_does_not_fit():
    c = call([(8, 4)], (8, 4))
    with pytest.raises(ShardingError, match=r'the rule "a->a" of op gives 1 labels to a tensor of 2 dims'):
        parse("a->a", c)
    with pytest.raises(ShardingError, match=r"names 2 operands; the call has 1 tensors"):
        parse("ab,ab->ab", c)
