"""Ops about memory or data, which cannot be sharded: errors that say what to write instead."""

from __future__ import annotations

from typing import Any

import torch

from functitan.errors import ShardingError
from functitan.sharding.op_rules.base import Call, Rule, rule

aten = torch.ops.aten

_INSTEAD: dict[Any, str] = {
    aten.as_strided.default: "it describes memory, and a global value has none. Write reshape, slices, unfold or expand",
    aten.set_.source_Tensor: "it exchanges memory. Return the new tensor instead",
    aten.resize_.default: "it changes memory in place. Write reshape, slices or torch.nn.functional.pad",
    aten.masked_select.default: "its size depends on data. Write torch.where(mask, x, other)",
    aten.masked_scatter.default: "what goes where depends on data. Write torch.where(mask, a, b)",
    aten.nonzero.default: "its size depends on data. Write torch.where(mask, a, b), or topk for a fixed count",
    aten._unique2.default: "its size depends on data. Sort, and compare neighbours",
    aten.unique_dim.default: "its size depends on data. Sort, and compare neighbours",
}


@rule(*_INSTEAD)
def refused(call: Call) -> Rule:
    raise ShardingError(f"{call.op} cannot be sharded: {_INSTEAD[call.op]}.")
