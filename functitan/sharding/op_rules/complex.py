"""Complex numbers as pairs in a last dim, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from functitan.sharding.layout import Layout
from functitan.sharding.op_rules.base import Call, Equation, Rule, rule
from functitan.sharding.op_rules.labels import labels

aten = torch.ops.aten
_FIRST = (frozenset({0}),)


@rule(aten.view_as_real.default)
def view_as_real(call: Call) -> Rule:
    row = labels(call.operands[0].shape)
    return Equation((row,), ((*row, "_"),), _FIRST)


@rule(aten.view_as_complex.default)
def view_as_complex(call: Call) -> Rule:
    """The pair is whole, and lies together in memory: a part that was gathered may not."""
    row = labels(call.outputs[0].shape)

    def emit(e: Any, c: Call, local: Sequence[Any], ins: Sequence[Layout], outs: Sequence[Layout]) -> list[Any]:
        (x,) = local
        if not x.meta["val"].is_contiguous():
            x = e.call(aten.clone.default, x, memory_format=torch.contiguous_format)
        return [e.call(c.op, x)]

    return Equation(((*row, "_"),), (row,), _FIRST, emit=emit)
