"""Reductions: sums are contractions; a maximum over a split dim is a local maximum and a reduction of maxima."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from functitan.sharding.op_rules.base import Call, Equation, Label, Rule, rule

aten = torch.ops.aten
_FIRST = (frozenset({0}),)


def reduction(call: Call, dims: Sequence[int] | None, *, reduce: str, whole: bool = False) -> Equation:
    """The labels of a reduction over ``dims`` (None or empty: all), with or without kept dims.

    Args:
        whole: the reduced dims must not be split.
    """
    x, out = call.operands[0], call.outputs[0]
    gone = {d % x.ndim for d in dims} if dims else set(range(x.ndim))
    labels: list[Label] = []
    kept: list[Label] = []
    keepdim = out.ndim == x.ndim
    for d, size in enumerate(x.shape):
        label: Label = None if size == 1 else "_" if whole and d in gone else f"d{d}"
        labels.append(label)
        if d not in gone:
            kept.append(label)
        elif keepdim:
            kept.append(None)
    floats = out.dtype.is_floating_point or out.dtype.is_complex
    linear = _FIRST if reduce == "sum" and (floats or not x.dtype.is_floating_point) and x.dtype != torch.bool else ()
    outputs = tuple(tuple(kept) for _ in call.outputs)
    return Equation((tuple(labels),), outputs, linear, reduce)


def _dims(call: Call) -> list[int] | None:
    dim = call.argument("dim")
    if dim is None:
        return None
    return [dim] if isinstance(dim, int) else list(dim)


@rule(aten.sum.default, aten.sum.dim_IntList)
def sum_(call: Call) -> Rule:
    return reduction(call, _dims(call), reduce="sum")


@rule(aten.amax.default, aten.max.default)
def amax(call: Call) -> Rule:
    return reduction(call, _dims(call), reduce="max")


@rule(aten.amin.default, aten.min.default)
def amin(call: Call) -> Rule:
    return reduction(call, _dims(call), reduce="min")
