"""Factories: values made from sizes alone, by each rank for its own part."""

from __future__ import annotations

from typing import Any

import torch

from functitan.sharding.layout import Layout
from functitan.sharding.op_rules.base import Call, Factory, Rule, rule

aten = torch.ops.aten


def _options(call: Call) -> dict[str, Any]:
    out: dict[str, Any] = {"dtype": call.outputs[0].dtype}
    device = call.kwargs.get("device")
    if device is not None:
        out["device"] = device
    return out


def _filled(value: Any) -> Any:
    def emit(emitter: Any, call: Call, layout: Layout) -> Any:
        return emitter.call(aten.full.default, list(layout.local_shape), value(call), **_options(call))

    return emit


@rule(aten.zeros.default, aten.new_zeros.default, aten.empty.memory_format, aten.new_empty.default,
      aten.new_empty_strided.default, aten.empty_strided.default)  # fmt: skip
def zeros(call: Call) -> Rule:
    return Factory(_filled(lambda c: 0), zero=True)


@rule(aten.ones.default, aten.new_ones.default)
def ones(call: Call) -> Rule:
    return Factory(_filled(lambda c: 1))


@rule(aten.full.default, aten.new_full.default)
def full(call: Call) -> Rule:
    return Factory(_filled(lambda c: c.argument("fill_value")), zero=call.argument("fill_value") == 0)


@rule(aten.zeros_like.default, aten.empty_like.default)
def zeros_like(call: Call) -> Rule:
    return Factory(_filled(lambda c: 0), like=0, zero=True)


@rule(aten.ones_like.default)
def ones_like(call: Call) -> Rule:
    return Factory(_filled(lambda c: 1), like=0)


@rule(aten.full_like.default)
def full_like(call: Call) -> Rule:
    return Factory(_filled(lambda c: c.argument("fill_value")), like=0)


@rule(aten.scalar_tensor.default)
def scalar_tensor(call: Call) -> Rule:
    return Factory(_filled(lambda c: c.args[0]))


@rule(aten.arange.default, aten.arange.start, aten.arange.start_step)
def arange(call: Call) -> Rule:
    """start + step * (global index): each rank counts its own indices."""

    def emit(emitter: Any, c: Call, layout: Layout) -> Any:
        out = c.outputs[0]
        start = c.args[0] if len(c.args) > 1 else 0
        step = c.args[2] if len(c.args) > 2 else 1
        device = _options(c).get("device")
        if not layout.axes:
            return emitter.call(aten.arange.start_step, start, start + step * out.shape[0], step, **_options(c))
        index = emitter.global_index(layout.dims[0], device)
        scaled = index if step == 1 else emitter.call(aten.mul.Scalar, index, step)
        moved = scaled if start == 0 else emitter.call(aten.add.Scalar, scaled, start)
        return moved if out.dtype == torch.int64 else emitter.call(aten._to_copy.default, moved, dtype=out.dtype)

    return Factory(emit)
