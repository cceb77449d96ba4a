"""Pointwise ops: every dim is a broadcasting label; only linear ones let pending sums pass."""

from __future__ import annotations

from typing import Any

import torch

from functitan.sharding.op_rules.base import Call, Equation, Rule, parse, rule

aten = torch.ops.aten

_EACH = (frozenset({0}), frozenset({1}))
_FIRST = (frozenset({0}),)
_BOTH = (frozenset({0, 1}),)

#: Groups of operands through which a pending sum passes; ops that are not here are nonlinear.
LINEAR: dict[Any, tuple[frozenset[int], ...]] = {
    aten.neg.default: _FIRST,
    aten.mul.Scalar: _FIRST,
    aten.mul.Tensor: _EACH,
    aten.div.Scalar: _FIRST,
    aten.div.Tensor: _FIRST,
    aten.add.Tensor: _BOTH,
    aten.sub.Tensor: _BOTH,
    aten.rsub.Tensor: _BOTH,
    aten.where.self: (frozenset({1, 2}),),
    aten.masked_fill.Scalar: (),
}


def pointwise(call: Call) -> Equation:
    """All operands and the output broadcast together.

    An operand list in the arguments (``aten.stack`` of scalars and the like) is not pointwise; those have rules.
    """
    n_in, n_out = len(call.operands), len(call.outputs)
    text = ",".join(["..."] * n_in) + "->" + ",".join(["..."] * n_out)
    tensors = tuple(frozenset(i for i in g if i < n_in) for g in LINEAR.get(call.op, ()))
    real = call.outputs[0].dtype.is_floating_point or call.outputs[0].dtype.is_complex
    return parse(text, call, linear=tuple(g for g in tensors if g) if real else ())


def is_pointwise(op: Any) -> bool:
    """Whether torch says of an op that it works element by element."""
    return torch.Tag.pointwise in getattr(op, "tags", ())


@rule(aten._to_copy.default, aten.clone.default, aten.detach.default, aten.alias.default,
      aten.lift_fresh_copy.default, aten.contiguous.default, torch.ops.prims.convert_element_type.default)  # fmt: skip
def copy(call: Call) -> Rule:
    """Casts and copies act on stored parameters as they are; only widening casts let a pending sum pass.

    Rounding the addends of a sum is not rounding the sum, so a narrowing cast settles it first.
    """
    src, dst = call.operands[0].dtype, call.outputs[0].dtype
    widens = src == dst or (src.is_floating_point and torch.promote_types(src, dst) == dst)
    eq = pointwise(call)
    return Equation(
        eq.inputs, eq.outputs, _FIRST if widens else (), through_storage=True
    )
