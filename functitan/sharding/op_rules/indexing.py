"""Indexing with tensors: indexed dims are whole; what the index names may be split, and so may the other dims.

Writes that add up are a contraction over the index, but only onto a base of zeros: any other base would be counted
once per rank. Others are taken apart into such a write and a sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from functitan.errors import ShardingError
from functitan.sharding.layout import Layout
from functitan.sharding.op_rules.base import Call, Decompose, Equation, Label, Labels, Operand, Rule, rule
from functitan.sharding.op_rules.labels import labels
from functitan.sharding.op_rules.lookup import held, is_split

aten = torch.ops.aten
_ops = torch.ops.functitan
_FIRST = (frozenset({0}),)


# --- along one dim ---------------------------------------------------------------------------------------------


def _dim(call: Call) -> int:
    return call.argument("dim") % max(call.operands[0].ndim, 1)


def _at(row: Labels, dim: int, label: Label) -> Labels:
    return tuple(label if d == dim else known for d, known in enumerate(row))


def _gather_rows(x: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    shape = list(x.shape)
    shape[dim] = index.numel()
    wide = index.reshape([-1 if d == dim % x.ndim else 1 for d in range(x.ndim)]).expand(shape)
    return torch.gather(x, dim, wide)


@rule(aten.index_select.default)
def index_select(call: Call) -> Rule:
    x, index = call.operands
    dim = _dim(call)
    if x.ndim == 0 or index.ndim == 0:
        return Equation((("_",) * x.ndim, ("_",) * index.ndim), (("_",) * call.outputs[0].ndim,))
    row = labels(x.shape, {dim})
    name: Label = None if index.shape[0] == 1 else "i"
    otherwise = Decompose(_gather_rows) if x.dtype.is_floating_point else None
    return Equation((row, (name,)), (_at(row, dim, name),), _FIRST, otherwise=otherwise)


def _base(shape: Sequence[int], call: Call, e: Any) -> Any:
    out = call.outputs[0]
    return e.call(aten.full.default, list(shape), 0, dtype=out.dtype)


def _index_add_parts(x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, *, alpha: Any = 1) -> Any:
    return x + torch.zeros_like(x).index_add(dim, index, source, alpha=alpha)


@rule(aten.index_add.default)
def index_add(call: Call) -> Rule:
    x, index = call.operands[:2]
    dim = _dim(call)
    row = labels(x.shape, {dim})
    if x.ndim == 0:
        return Equation(((), ("_",) * index.ndim, ()), ((),), (frozenset({0, 2}),))
    if 0 not in call.zeros:
        whole = _at(row, dim, "_")
        eq = Equation((row, ("_",) * index.ndim, whole), (row,), (frozenset({0, 2}),))
        return Equation(*(eq.inputs, eq.outputs, eq.linear), otherwise=Decompose(_index_add_parts))
    name: Label = None if index.numel == 1 else "i"

    def emit(e: Any, c: Call, local: Sequence[Any], ins: Sequence[Layout], outs: Sequence[Layout]) -> list[Any]:
        base = _base(outs[0].local_shape, c, e)
        return [e.call(c.op, base, dim, local[1], local[2], **c.kwargs)]

    inputs = (row, (name,) * index.ndim, _at(row, dim, name))
    return Equation(inputs, (row,), (frozenset({2}),), refs=frozenset({0}), emit=emit)


@rule(aten.index_copy.default)
def index_copy(call: Call) -> Rule:
    row = labels(call.operands[0].shape, {_dim(call)})
    return Equation((row, ("_",) * call.operands[1].ndim, row), (row,), (frozenset({0, 2}),))


@rule(aten.index_fill.int_Scalar, aten.index_fill.int_Tensor)
def index_fill(call: Call) -> Rule:
    row = labels(call.operands[0].shape, {_dim(call)})
    return Equation((row, ("_",), *((),) * (len(call.operands) - 2)), (row,))


# --- scatter ---------------------------------------------------------------------------------------------------


def _scattered(call: Call, inner: Label) -> tuple[Labels, Labels]:
    """Labels of the base and of the index; dims of other sizes are whole."""
    x, index = call.operands[0].shape, call.operands[1].shape
    dim = _dim(call)
    both = [("_" if n != m else None if n == 1 else f"d{d}") for d, (n, m) in enumerate(zip(x, index, strict=True))]
    return _at(tuple(both), dim, "_"), _at(tuple(both), dim, inner)


def _is_flat(call: Call) -> bool:
    return any(t.ndim == 0 for t in call.operands[:2])


@rule(aten.scatter.src, aten.scatter.value, aten.scatter_reduce.two, aten.scatter.reduce, aten.scatter.value_reduce)
def scatter(call: Call) -> Rule:
    """Writes that replace: which one stays depends on all of the index, so it is whole along the dim."""
    if _is_flat(call):
        return Equation(tuple(("_",) * t.ndim for t in call.operands), (("_",) * call.outputs[0].ndim,))
    base, found = _scattered(call, "_")
    linear: tuple[frozenset[int], ...] = ()
    source: tuple[Labels, ...] = ()
    if len(call.operands) == 3:
        same = call.operands[2].shape == call.operands[1].shape
        source = (found if same else ("_",) * call.operands[2].ndim,)
        if not same:
            base = found = ("_",) * call.operands[0].ndim
        if call.op is aten.scatter.src:
            linear = (frozenset({2} if 0 in call.zeros else {0, 2}),)
    return Equation((base, found, *source), (base,), linear)


def _scatter_add_parts(x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    return x + torch.zeros_like(x).scatter_add(dim, index, source)


@rule(aten.scatter_add.default)
def scatter_add(call: Call) -> Rule:
    if _is_flat(call) or call.operands[1].shape != call.operands[2].shape:
        return Equation(tuple(("_",) * t.ndim for t in call.operands), (("_",) * call.outputs[0].ndim,))
    dim = _dim(call)
    base, whole = _scattered(call, "_")
    if 0 not in call.zeros:
        linear = (frozenset({0, 2}),)
        return Equation((base, whole, whole), (base,), linear, otherwise=Decompose(_scatter_add_parts))
    found = _at(whole, dim, None if call.operands[1].shape[dim] == 1 else "i")

    def emit(e: Any, c: Call, local: Sequence[Any], ins: Sequence[Layout], outs: Sequence[Layout]) -> list[Any]:
        _, index, source = local
        same = c.operands[0].shape[:dim] + c.operands[0].shape[dim + 1 :]
        if is_split(outs[0], dim) and same == c.operands[1].shape[:dim] + c.operands[1].shape[dim + 1 :]:
            index, block = held(e, index, outs[0].dims[dim])
            return [e.call(_ops.put_shard.default, source, index, block, dim, outs[0].local_shape[dim])]
        return [e.call(c.op, _base(outs[0].local_shape, c, e), dim, index, source)]

    fits = all(
        n == m for d, (n, m) in enumerate(zip(call.operands[0].shape, call.operands[1].shape, strict=True)) if d != dim
    )
    into = _at(base, dim, "v") if fits and call.outputs[0].shape[dim] > 1 else base
    return Equation((into, found, found), (into,), (frozenset({2}),), refs=frozenset({0}), emit=emit)


# --- x[i, j] ---------------------------------------------------------------------------------------------------


def _indexed(call: Call) -> tuple[Labels, list[Labels], Labels]:
    """Labels of the operand, of each index, and of what the index names: the index dims stand where the indexed
    dims stood, or first where those do not stand side by side."""
    x = call.operands[0]
    indices = list(call.args[1])
    at = [d for d, i in enumerate(indices) if i is not None]
    for d in at:
        if call.operands[indices[d].index].dtype in (torch.bool, torch.uint8):
            raise ShardingError(
                f"{call.op}: a bool index makes a result whose shape depends on data. Write torch.where(mask, a, b), or "
                "multiply by the mask."
            )
    row = labels(x.shape, set(at))
    shapes = [call.operands[indices[d].index].shape for d in at]
    joint = torch.broadcast_shapes(*shapes)
    names: Labels = tuple(None if n == 1 else f"i{len(joint) - k}" for k, n in enumerate(joint))
    rows: list[Labels] = [tuple(None if n == 1 else f"i{len(s) - k}" for k, n in enumerate(s)) for s in shapes]
    rest = [label for d, label in enumerate(row) if d not in at]
    together = at == list(range(at[0], at[0] + len(at)))
    first = at[0] if together else 0
    return row, rows, (*rest[:first], *names, *rest[first:])


def _one_index(x: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> torch.Tensor:
    (dim,) = (d for d, i in enumerate(indices) if i is not None)
    index = indices[dim]
    assert index is not None
    index = torch.where(index < 0, index + x.shape[dim], index)
    rows = _gather_rows(x, dim, index.reshape(-1))
    return rows.reshape(*x.shape[:dim], *index.shape, *x.shape[dim + 1 :])


@rule(aten.index.Tensor, aten._unsafe_index.Tensor)
def index(call: Call) -> Rule:
    row, rows, named = _indexed(call)
    single = len(rows) == 1 and call.operands[0].dtype.is_floating_point
    return Equation((row, *rows), (named,), _FIRST, otherwise=Decompose(_one_index) if single else None)


def _index_put_parts(x: torch.Tensor, indices: Any, values: torch.Tensor, accumulate: bool = False) -> torch.Tensor:
    return x + torch.zeros_like(x).index_put(indices, values, accumulate=True)


def _masked_put(x: torch.Tensor, indices: Any, values: torch.Tensor, accumulate: bool = False) -> torch.Tensor:
    """x[mask] = number: a choice by a mask."""
    mask = indices[0].reshape([*indices[0].shape, *[1] * (x.ndim - indices[0].ndim)])
    return torch.where(mask, x + values if accumulate else values.to(x.dtype), x)


@rule(aten.index_put.default, aten._unsafe_index_put.default)
def index_put(call: Call) -> Rule:
    masks = [i for i in call.args[1] if i is not None and call.operands[i.index].dtype == torch.bool]
    at_value = call.argument("values")
    assert isinstance(at_value, Operand)
    if masks and len(call.args[1]) == 1 and call.operands[at_value.index].numel == 1:
        return Decompose(_masked_put)
    row, rows, named = _indexed(call)
    values = call.operands[at_value.index]
    add = bool(call.argument("accumulate", False))
    last = len(call.operands) - 1
    if not add or 0 not in call.zeros:
        # Which write stays depends on all of the index.
        whole = {label for r in rows for label in r if label}
        rows = [tuple("_" if label in whole else label for label in r) for r in rows]
        named = tuple("_" if label in whole else label for label in named)
    given = tuple(
        None if n == 1 else label for n, label in zip(values.shape, named[len(named) - values.ndim :], strict=True)
    )
    if not add:
        return Equation((row, *rows, given), (row,), (frozenset({0, last}),))
    if 0 not in call.zeros:
        linear = (frozenset({0, last}),)
        return Equation((row, *rows, given), (row,), linear, otherwise=Decompose(_index_put_parts))

    def emit(e: Any, c: Call, local: Sequence[Any], ins: Sequence[Layout], outs: Sequence[Layout]) -> list[Any]:
        indices = [None if i is None else local[i.index] for i in c.args[1]]
        return [e.call(aten.index_put.default, _base(outs[0].local_shape, c, e), indices, local[last], True)]

    # A value that is broadcast along a split dim of the index is written once per rank, each time for other places.
    return Equation((row, *rows, given), (row,), (frozenset({last}),), refs=frozenset({0}), emit=emit)
