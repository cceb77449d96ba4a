"""Views: digits are regrouped, values stay where they are."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from functitan.sharding.layout import Dim, canonical, split
from functitan.sharding.op_rules.base import Call, DimMap, Expand, Rule, rule

aten = torch.ops.aten


def regroup(dims: Sequence[Dim], shape: Sequence[int], sizes: dict[str, int]) -> tuple[Dim, ...]:
    """The digits of a reshape to ``shape``: all digits in one row, cut anew.

    Joining all dims first is right because a reshape keeps the row-major order of elements; a cut that falls between
    two old dims is then always possible.
    """
    row = tuple(d for dim in dims for d in dim)
    return split(canonical(row), shape, sizes)


@rule(aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.unsqueeze.default,
      aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)  # fmt: skip
def reshape(call: Call) -> Rule:
    old, new = call.operands[0].shape, call.outputs[0].shape
    return DimMap(
        forward=lambda dims, sizes: regroup(dims, new, sizes),
        backward=lambda dims, sizes: regroup(dims, old, sizes),
        local=lambda shape: (aten.reshape.default, (list(shape),)),
    )


def _permutation(order: Sequence[int]) -> DimMap:
    inverse = [order.index(i) for i in range(len(order))]
    return DimMap(
        forward=lambda dims, sizes: tuple(dims[i] for i in order),
        backward=lambda dims, sizes: tuple(dims[i] for i in inverse),
        local=lambda shape: (aten.permute.default, (list(order),)),
    )


@rule(aten.permute.default)
def permute(call: Call) -> Rule:
    n = call.operands[0].ndim
    return _permutation([d % n for d in call.args[1]])


@rule(aten.t.default, aten.transpose.int)
def transpose(call: Call) -> Rule:
    n = call.operands[0].ndim
    order = list(range(n))
    a, b = (call.args[1] % n, call.args[2] % n) if len(call.args) == 3 else (0, n - 1)
    order[a], order[b] = order[b], order[a]
    return _permutation(order)


@rule(aten.expand.default)
def expand(call: Call) -> Rule:
    old, new = call.operands[0].shape, call.outputs[0].shape
    lead = len(new) - len(old)
    source = tuple(None if i < lead or (old[i - lead] == 1 and n != 1) else i - lead for i, n in enumerate(new))
    return Expand(source)
