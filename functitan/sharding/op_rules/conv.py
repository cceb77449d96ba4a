"""Convolutions: batch and channels split, positions are whole; input channels are contracted.

Channels are groups times channels per group, both of the input and of the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from functitan.sharding.layout import Layout
from functitan.sharding.op_rules.base import Call, Equation, Factor, Label, Labels, Rule, rule

aten = torch.ops.aten
_EACH = (frozenset({0}), frozenset({1}))


def _names(call: Call, x: Sequence[int], w: Sequence[int]) -> tuple[Labels, Labels, Labels]:
    """Labels of input, weight and output."""
    groups = call.argument("groups")
    # A transposed convolution has weights (in, out per group), others (out, in per group).
    n_in, n_out = x[1] // groups, (w[1] if call.argument("transposed") else w[0] // groups)
    group: tuple[Factor, ...] = (("g", groups),)
    inner: Label = (*group, ("c", n_in))
    outer: Label = (*group, ("o", n_out))
    space = ("_",) * (len(x) - 2)
    batch: Label = None if x[0] == 1 else "b"
    lone: Label = None if w[1] == 1 else "o" if call.argument("transposed") else "c"
    weight = inner if call.argument("transposed") else outer
    return (batch, inner, *space), (weight, lone, *space), (batch, outer, *space)


def _local_groups(outer: Layout, inner: Layout) -> int:
    """The groups that a rank holds: the channels of all its groups over those of one."""
    return outer.local_shape[1] // inner.local_shape[1]


@rule(aten.convolution.default)
def convolution(call: Call) -> Rule:
    """Without a bias, which would be counted once per part of a contraction; the trace adds it afterwards."""
    x, w = call.operands
    row, weight, out = _names(call, x.shape, w.shape)

    def local(c: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        wide = outs[0] if c.argument("transposed") else ins[0]
        return (*c.args[:8], _local_groups(wide, ins[1])), {}

    return Equation((row, weight), (out,), _EACH, local=local)


@rule(aten.convolution_backward.default)
def convolution_backward(call: Call) -> Rule:
    """Each output has its own contraction: over output channels, over the batch, and for the bias over the batch."""
    _, x, w = call.operands
    row, weight, out = _names(call, x.shape, w.shape)
    mask = call.argument("output_mask")
    outputs = [labels for labels, wanted in zip((row, weight, (out[1],)), mask, strict=True) if wanted]
    apart = frozenset({(len(outputs) - 1, "c")}) if mask[2] else frozenset()

    def local(c: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        wide = ins[0] if c.argument("transposed") else ins[1]
        bias = [ins[0].local_shape[1]] if mask[2] else c.args[3]
        return (*c.args[:3], bias, *c.args[4:9], _local_groups(wide, ins[2]), mask), {}

    return Equation((out, row, weight), tuple(outputs), (frozenset({0}),), local=local, apart=apart)
