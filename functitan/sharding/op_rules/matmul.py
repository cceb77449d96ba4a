"""Matrix products: the contracted dim leaves a pending sum where it is split."""

from __future__ import annotations

import torch

from functitan.sharding.op_rules.base import Call, Rule, parse, rule

aten = torch.ops.aten
_EACH = (frozenset({0}), frozenset({1}))


@rule(aten.mm.default)
def mm(call: Call) -> Rule:
    return parse("mk,kn->mn", call, linear=_EACH)


@rule(aten.bmm.default)
def bmm(call: Call) -> Rule:
    return parse("bmk,bkn->bmn", call, linear=_EACH)


@rule(aten._grouped_mm.default)
def grouped_mm(call: Call) -> Rule:
    """torch's own grouped product, in its four forms; the dim that the offsets cut is whole."""
    forms = {(2, 3): "_k,gkn,_->_n", (3, 3): "gmk,gkn->gmn", (2, 2): "m_,_n,_->_mn", (3, 2): "_mk,k_,_->m_"}
    text = forms[call.operands[0].ndim, call.operands[1].ndim].replace("g", "_" if len(call.operands) > 2 else "g")
    return parse(text, call, linear=_EACH)
