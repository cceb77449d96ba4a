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
    aten.complex.default: _BOTH,
    aten._conj.default: _FIRST,
    aten.conj_physical.default: _FIRST,
    aten.deg2rad.default: _FIRST,
    aten.rad2deg.default: _FIRST,
    aten.positive.default: _FIRST,
    aten.real.default: _FIRST,
    aten.lerp.Scalar: _BOTH,
    aten.threshold_backward.default: _FIRST,
}

#: Linear in integers as well, which wrap around: the sum of wrapped addends is the wrapped sum.
_WRAPPING = {aten.neg.default, aten.add.Tensor, aten.sub.Tensor, aten.rsub.Tensor}

#: Pointwise ops that torch does not tag as such.
UNTAGGED = (
    aten.complex.default,
    aten.polar.default,
    aten.rsub.Tensor,
    aten.rsub.Scalar,
    aten.masked_fill.Tensor,
    aten.floor_divide.default,
    aten.floor_divide.Scalar,
    aten.hardswish.default,
    aten.hardswish_backward.default,
    aten.hardsigmoid_backward.default,
    aten.hardtanh.default,
    aten.hardtanh_backward.default,
    aten.hardshrink_backward.default,
    aten.softshrink_backward.default,
    aten.elu_backward.default,
    aten.leaky_relu_backward.default,
    aten.mish_backward.default,
    aten.softplus_backward.default,
    aten.rrelu_with_noise_backward.default,
    aten._prelu_kernel.default,
    aten._prelu_kernel_backward.default,
    aten._conj.default,
    aten.resolve_conj.default,
    aten.resolve_neg.default,
    aten._neg_view.default,
    aten.ldexp.Tensor,
    aten.isclose.default,
)


def pointwise(call: Call) -> Equation:
    """All operands and the output broadcast together.

    An operand list in the arguments (``aten.stack`` of scalars and the like) is not pointwise; those have rules.
    """
    n_in, n_out = len(call.operands), len(call.outputs)
    text = ",".join(["..."] * n_in) + "->" + ",".join(["..."] * n_out)
    # A number in the place of an operand is settled: added to every rank's addend, it would be counted once per rank.
    groups = tuple(g for g in LINEAR.get(call.op, ()) if max(g) < n_in)
    dtype = call.outputs[0].dtype
    one_integer = dtype != torch.bool and call.op in _WRAPPING and all(t.dtype == dtype for t in call.operands)
    passes = dtype.is_floating_point or dtype.is_complex or one_integer
    return parse(text, call, linear=groups if passes else ())


@rule(*UNTAGGED)
def untagged(call: Call) -> Rule:
    return pointwise(call)


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
    return Equation(eq.inputs, eq.outputs, _FIRST if widens else (), through_storage=True)
