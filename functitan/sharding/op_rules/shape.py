"""Joining, cutting and moving along dims: the dim that is worked on is whole, the others go through."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from functitan.sharding.op_rules.base import Call, Equation, Labels, Rule, rule
from functitan.sharding.op_rules.labels import along, labels, normal_dims

aten = torch.ops.aten
_FIRST = (frozenset({0}),)


def _together(n: int) -> tuple[frozenset[int], ...]:
    return (frozenset(range(n)),)


def _without(row: Labels, *dims: int) -> Labels:
    return tuple(label for d, label in enumerate(row) if d not in dims)


@rule(aten.cat.default)
def cat(call: Call) -> Rule:
    out = call.outputs[0]
    row = labels(out.shape, {call.argument("dim", 0) % out.ndim})
    # An empty tensor of one dim may stand between tensors of any rank.
    rows = tuple(row if t.ndim == out.ndim else ("_",) for t in call.operands)
    return Equation(rows, (row,), _together(len(rows)))


@rule(aten.stack.default)
def stack(call: Call) -> Rule:
    out = call.outputs[0]
    dim = call.argument("dim", 0) % out.ndim
    row = labels(out.shape, {dim})
    return Equation((_without(row, dim),) * len(call.operands), (row,), _together(len(call.operands)))


@rule(aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default, aten.unsafe_split.Tensor,
      aten.unsafe_chunk.default, aten.unsafe_split_with_sizes.default)  # fmt: skip
def split(call: Call) -> Rule:
    return along(call, call.argument("dim", 0), _FIRST)


@rule(aten.unbind.int)
def unbind(call: Call) -> Rule:
    x = call.operands[0]
    dim = call.argument("dim", 0) % x.ndim
    row = labels(x.shape, {dim})
    return Equation((row,), (_without(row, dim),) * len(call.outputs), _FIRST)


@rule(aten.constant_pad_nd.default)
def pad(call: Call) -> Rule:
    """Only zeros may be put around the addends of a sum."""
    pads = call.argument("pad")
    n = call.operands[0].ndim
    dims = {n - 1 - i // 2 for i, p in enumerate(pads) if p}
    return _padded(call, dims, _FIRST if not call.argument("value", 0) else ())


def _padded(call: Call, dims: set[int], linear: tuple[frozenset[int], ...] = _FIRST) -> Equation:
    """The dims change their size; others keep theirs."""
    row = labels(call.operands[0].shape, dims)
    return Equation((row,), (row,), linear)


_MIRRORED = [
    getattr(aten, f"{kind}_pad{n}d{suffix}").default
    for kind in ("reflection", "replication")
    for n in (1, 2, 3)
    for suffix in ("", "_backward")
]


@rule(*_MIRRORED)
def mirrored_pad(call: Call) -> Rule:
    """The padded dims are the last ones; of the operand, backward reads only the shape."""
    n = len(call.argument("padding")) // 2
    ndim = call.operands[0].ndim
    row = labels(call.operands[0].shape, set(range(ndim - n, ndim)))
    return Equation((row,) * len(call.operands), (row,), _FIRST)


@rule(aten.roll.default)
def roll(call: Call) -> Rule:
    return along(call, call.argument("dims"), _FIRST)


@rule(aten.flip.default)
def flip(call: Call) -> Rule:
    # No dims at all is the identity, not all of them.
    dims = call.argument("dims")
    return _padded(call, normal_dims(dims, call.operands[0].ndim) if dims else set())


@rule(aten.diagonal.default, aten.diagonal_copy.default)
def diagonal(call: Call) -> Rule:
    x = call.operands[0]
    a, b = call.argument("dim1", 0) % x.ndim, call.argument("dim2", 1) % x.ndim
    row = labels(x.shape, {a, b})
    return Equation((row,), ((*_without(row, a, b), "_"),), _FIRST)


@rule(aten.diagonal_scatter.default)
def diagonal_scatter(call: Call) -> Rule:
    eq = diagonal(replace(call, operands=call.operands[:1]))
    assert isinstance(eq, Equation)
    return Equation((*eq.inputs, *eq.outputs), eq.inputs, _together(2))


@rule(aten.unfold.default)
def unfold(call: Call) -> Rule:
    x = call.operands[0]
    row = labels(x.shape, {call.argument("dimension") % max(x.ndim, 1)})
    return Equation((row,), ((*row, "_"),), _FIRST)


def _sized(call: Call, whole: Sequence[int], gone: Sequence[int] = (), extra: int = 0) -> Equation:
    """The adjoint of a cut: a gradient back into the operand's shape, which stands among the arguments."""
    out = call.outputs[0]
    row = labels(out.shape, set(whole))
    given = (*_without(row, *gone), *("_",) * extra)
    sizes = next(i for i, a in enumerate(call.op._schema.arguments) if a.name in ("input_sizes", "input_size"))

    def local(c, ins, outs):  # type: ignore[no-untyped-def]
        args = list(c.args)
        args[sizes] = list(outs[0].local_shape)
        return tuple(args), c.kwargs

    return Equation((given,), (row,), _FIRST, local=local)


@rule(aten.slice_backward.default)
def slice_backward(call: Call) -> Rule:
    return _sized(call, [call.argument("dim") % call.outputs[0].ndim])


@rule(aten.select_backward.default)
def select_backward(call: Call) -> Rule:
    dim = call.argument("dim") % call.outputs[0].ndim
    return _sized(call, [dim], [dim])


@rule(aten.diagonal_backward.default)
def diagonal_backward(call: Call) -> Rule:
    n = call.outputs[0].ndim
    dims = [call.argument("dim1") % n, call.argument("dim2") % n]
    return _sized(call, dims, dims, 1)


@rule(aten.unfold_backward.default)
def unfold_backward(call: Call) -> Rule:
    return _sized(call, [call.argument("dim") % call.outputs[0].ndim], extra=1)


@rule(aten.slice.Tensor)
def slice_(call: Call) -> Rule:
    x = call.operands[0]
    dim = call.argument("dim", 0) % x.ndim
    whole = () if call.outputs[0].shape == x.shape else {dim}
    row = labels(x.shape, whole)
    return Equation((row,), (row,), _FIRST, through_storage=True)


@rule(aten.select.int)
def select(call: Call) -> Rule:
    x = call.operands[0]
    dim = call.argument("dim") % x.ndim
    row = labels(x.shape, {dim})
    return Equation((row,), (_without(row, dim),), _FIRST, through_storage=True)


@rule(aten.slice_scatter.default)
def slice_scatter(call: Call) -> Rule:
    return along(call, call.argument("dim", 0), _together(2))


@rule(aten.select_scatter.default)
def select_scatter(call: Call) -> Rule:
    x = call.operands[0]
    dim = call.argument("dim") % x.ndim
    row = labels(x.shape, {dim})
    return Equation((row, _without(row, dim)), (row,), _together(2))


@rule(aten.view.dtype)
def view_dtype(call: Call) -> Rule:
    """Other bits of the same memory: element by element, or along a whole last dim where sizes differ."""
    x, out = call.operands[0], call.outputs[0]
    row = labels(x.shape, set() if x.shape == out.shape else {x.ndim - 1})
    return Equation((row,), (row,))
