"""Lookups and their adjoints, where the dim that is looked up in may be split: each rank reads what it holds.

A lookup in a split dim finds zeros for entries that other ranks hold, and leaves a pending sum. The adjoint writes
only what falls into the rank's part, and leaves the dim split.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from functitan.ops import shard_lookup as _shard_lookup  # noqa: F401 (registers the ops)
from functitan.sharding.layout import Dim, Layout
from functitan.sharding.op_rules.base import Call, Equation, Label, Rule, parse, rule

aten = torch.ops.aten
_ops = torch.ops.functitan
_FIRST = (frozenset({0}),)


def held(emitter: Any, index: Any, dim: Dim) -> tuple[Any, Any]:
    """Global indices into a split dim as (index, block) such that the block holds the entries of this rank.

    A dim that is split into blocks keeps its indices. In a joined dim they are taken apart into digits: entries that
    this rank holds get their local index, others -1, and the block is 0.
    """
    axes = [d for d in dim if isinstance(d, str)]
    if all(isinstance(d, str) for d in dim[: len(axes)]):
        return index, emitter.coordinate(axes)
    wide = emitter.call(aten._to_copy.default, index, dtype=torch.int64)
    local: Any = None
    inside: Any = None
    stride = local_stride = 1
    for d in reversed(dim):
        n = emitter.sizes[d] if isinstance(d, str) else d
        digit = emitter.call(aten.div.Tensor_mode, wide, stride, rounding_mode="floor")
        digit = emitter.call(aten.remainder.Scalar, digit, n)
        if isinstance(d, str):
            own = emitter.call(aten.eq.Tensor, digit, emitter.coordinates[d])
            inside = own if inside is None else emitter.call(aten.logical_and.default, inside, own)
        else:
            part = emitter.call(aten.mul.Scalar, digit, local_stride)
            local = part if local is None else emitter.call(aten.add.Tensor, local, part)
            local_stride *= d
        stride *= n
    outside = emitter.call(aten.full_like.default, wide, -1)
    local = emitter.call(aten.zeros_like.default, wide) if local is None else local
    zero = emitter.call(aten.full.default, [], 0, dtype=torch.int64, device=index.meta["val"].device)
    return emitter.call(aten.where.self, inside, local, outside), zero


def is_split(layout: Layout, dim: int) -> bool:
    return any(isinstance(d, str) for d in layout.dims[dim])


@rule(_ops.embedding.default)
def embedding(call: Call) -> Rule:
    """Rows of a table; with a split vocabulary each rank reads its own."""

    def emit(e: Any, c: Call, local: Sequence[Any], ins: Sequence[Layout], outs: Sequence[Layout]) -> list[Any]:
        weight, idx = local
        if not is_split(ins[0], 0):
            return [e.call(c.op, weight, idx)]
        idx, block = held(e, idx, ins[0].dims[0])
        return [e.call(_ops.embedding_shard.default, weight, idx, block)]

    return parse("vd,...->...d", call, linear=_FIRST, emit=emit)


@rule(_ops.embedding_backward.default)
def embedding_backward(call: Call) -> Rule:
    """The table's gradient, laid out as the table; rows add up over the batch."""

    def emit(e: Any, c: Call, local: Sequence[Any], ins: Sequence[Layout], outs: Sequence[Layout]) -> list[Any]:
        grad, idx, _ = local
        # The table only tells the shape: one number, expanded, does as well and takes no memory.
        one = e.call(aten.full.default, [1, 1], 0, dtype=c.operands[2].dtype, device=grad.meta["val"].device)
        shape = e.call(aten.expand.default, one, list(outs[0].local_shape))
        if not is_split(outs[0], 0):
            return [e.call(c.op, grad, idx, shape)]
        idx, block = held(e, idx, outs[0].dims[0])
        return [e.call(_ops.embedding_shard_backward.default, grad, idx, shape, block)]

    return parse("...d,...,vd->vd", call, linear=_FIRST, refs=frozenset({2}), emit=emit)


def _rows(call: Call, x: Sequence[int], index: Sequence[int], dim: int) -> tuple[tuple[Label, ...], tuple[Label, ...]]:
    """Labels of a tensor and of an index into its ``dim``; other dims that differ in size are whole."""
    own: list[Label] = []
    found: list[Label] = []
    for d, (n, m) in enumerate(zip(x, index, strict=True)):
        label: Label = f"d{d}" if n == m else "_"
        own.append("v" if d == dim else label)
        found.append("i" if d == dim else label)
    return tuple(own), tuple(found)


@rule(aten.gather.default)
def gather(call: Call) -> Rule:
    """One entry per index; with a split dim each rank reads its own."""
    x, index = call.operands
    if x.ndim == 0 or index.ndim == 0:
        return Equation(tuple(("_",) * t.ndim for t in call.operands), (("_",) * call.outputs[0].ndim,))
    dim = call.argument("dim") % x.ndim
    own, found = _rows(call, x.shape, index.shape, dim)
    if x.dtype == torch.bool:  # addends of a sum are numbers
        own = tuple("_" if d == dim else label for d, label in enumerate(own))

    def emit(e: Any, c: Call, local: Sequence[Any], ins: Sequence[Layout], outs: Sequence[Layout]) -> list[Any]:
        values, idx = local
        if not is_split(ins[0], dim):
            return [e.call(c.op, values, dim, idx)]
        idx, block = held(e, idx, ins[0].dims[dim])
        return [e.call(_ops.take_shard.default, values, idx, block, dim)]

    return Equation((own, found), (found,), _FIRST if x.dtype.is_floating_point else (), emit=emit)
