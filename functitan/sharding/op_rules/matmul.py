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
