"""Rules of functitan's own ops that belong to no other family."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from functitan import debug as _debug  # noqa: F401 (registers the ops)
from functitan.ops import grouped_mm as _grouped_mm  # noqa: F401
from functitan.ops import newton_schulz as _newton_schulz  # noqa: F401
from functitan.ops import threefry as _threefry  # noqa: F401
from functitan.sharding.layout import Layout
from functitan.sharding.op_rules.base import Call, Equation, Rule, parse, rule

aten = torch.ops.aten
_ops = torch.ops.functitan
_EACH = (frozenset({0}), frozenset({1}))


@rule(_ops.threefry.default)
def threefry(call: Call) -> Rule:
    """Bits are pointwise in the global index; the key is whole."""
    return parse("_,...->...", call)


@rule(_ops.grouped_mm.default)
def grouped_mm(call: Call) -> Rule:
    """Rows are sorted by group, so they stay whole, and so do the groups."""
    return parse("_k,_kf,_->_f", call, linear=_EACH)


@rule(_ops.grouped_mm_dw.default)
def grouped_mm_dw(call: Call) -> Rule:
    return parse("_k,_f,_->_kf", call, linear=_EACH)


@rule(_ops.newton_schulz.default)
def newton_schulz(call: Call) -> Rule:
    """Matrices are whole, a batch of them may be split."""
    return parse("...__->...__", call)


@rule(_ops.debug_print.default)
def debug_print(call: Call) -> Rule:
    """Values must be whole, so that what is printed is the global value; one rank prints."""

    def emit(e: Any, c: Call, local: Sequence[Any], ins: Sequence[Layout], outs: Sequence[Layout]) -> list[Any]:
        first: Any = None
        for coordinate in e.coordinates.values():
            own = e.call(aten.eq.Scalar, coordinate, 0)
            first = own if first is None else e.call(aten.logical_and.default, first, own)
        if first is None:
            return [e.call(c.op, list(local), c.args[1])]
        return [e.call(_ops.debug_print_where.default, first, list(local), c.args[1])]

    whole = tuple(tuple("_" if n != 1 else None for n in t.shape) for t in call.operands)
    return Equation(whole, (("_",),), emit=emit)
