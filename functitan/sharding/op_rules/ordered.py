"""Ops that go along a dim in order, or sort it: the dim is whole."""

from __future__ import annotations

import torch

from functitan.sharding.op_rules.base import Call, Equation, Rule, rule
from functitan.sharding.op_rules.labels import all_whole, along, labels

aten = torch.ops.aten
_FIRST = (frozenset({0}),)


@rule(aten.cumsum.default)
def cumsum(call: Call) -> Rule:
    return along(call, call.argument("dim"), _FIRST if call.outputs[0].dtype.is_floating_point else ())


@rule(aten.cumprod.default, aten.logcumsumexp.default, aten._logcumsumexp.default, aten.cummax.default,
      aten.cummin.default, aten.sort.default, aten.sort.stable, aten.argsort.default, aten.argsort.stable,
      aten.msort.default)  # fmt: skip
def whole_dim(call: Call) -> Rule:
    return along(call, 0 if call.op is aten.msort.default else call.argument("dim", -1))


@rule(aten.topk.default, aten.kthvalue.default, aten.mode.default, aten.median.dim, aten.nanmedian.dim)
def picked(call: Call) -> Rule:
    """The dim is whole in the operand, and in the outputs: shorter, of size 1, or gone."""
    x, out = call.operands[0], call.outputs[0]
    if x.ndim == 0:
        return all_whole(call)
    dim = call.argument("dim") % x.ndim
    row = labels(x.shape, {dim})
    kept = row if out.ndim == x.ndim else row[:dim] + row[dim + 1 :]
    return Equation((row,), (kept,) * len(call.outputs))


@rule(aten.median.default, aten.nanmedian.default)
def picked_of_all(call: Call) -> Rule:
    return all_whole(call)


@rule(aten.searchsorted.Tensor)
def searchsorted(call: Call) -> Rule:
    """The sorted dim is whole; rows of a table of sorted rows go with rows of values."""
    table, values = call.operands[0], call.operands[1]
    if table.ndim == 1:
        row, found = ("_",), labels(values.shape)
    else:
        row, found = labels(table.shape, {table.ndim - 1}), (*labels(values.shape)[:-1], "n")
    sorter = (row,) * (len(call.operands) - 2)
    return Equation((row, found, *sorter), (found,))


@rule(aten.bucketize.Tensor)
def bucketize(call: Call) -> Rule:
    row = labels(call.operands[0].shape)
    return Equation((row, ("_",)), (row,))
