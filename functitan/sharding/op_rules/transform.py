"""Fourier transforms and distances between rows: what is transformed or compared is whole, other dims split."""

from __future__ import annotations

import torch

from functitan.sharding.op_rules.base import Call, Rule, parse, rule
from functitan.sharding.op_rules.labels import all_whole, along

aten = torch.ops.aten
_FIRST = (frozenset({0}),)


@rule(aten._fft_c2c.default, aten._fft_r2c.default, aten._fft_c2r.default)
def fourier(call: Call) -> Rule:
    return along(call, call.argument("dim"), _FIRST)


@rule(aten._cdist_forward.default)
def distances(call: Call) -> Rule:
    """(..., rows, features) and (..., other rows, features) give (..., rows, other rows)."""
    return parse("...r_,...s_->...rs", call)


@rule(aten._cdist_backward.default)
def distances_backward(call: Call) -> Rule:
    """The gradient of the rows, summed over the other rows. Operands: cotangent, rows, other rows, distances."""
    return parse("...rs,...r_,...s_,...rs->...r_", call, linear=_FIRST)


@rule(aten._pdist_forward.default, aten._pdist_backward.default)
def pairs(call: Call) -> Rule:
    return all_whole(call)
