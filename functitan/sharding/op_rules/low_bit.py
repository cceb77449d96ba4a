"""Numbers of a few bits: pointwise but for the blocks of a row, which a split must leave whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from functitan.ops import low_bit as _low_bit  # noqa: F401 (registers the ops)
from functitan.sharding.layout import Layout
from functitan.sharding.op_rules.base import Call, Equation, Label, Labels, Rule, parse, rule

_ops = torch.ops.functitan


def _rows(call: Call) -> tuple[Labels, Labels]:
    """The labels of the numbers and of their scales.

    A row of whole blocks is a join of blocks and places in them; the one block of a short row has one scale; a row with
    a shorter last block is whole.
    """
    shape, block = call.operands[0].shape, call.argument("block")
    lead: list[Label] = [None if n == 1 else f"d{d}" for d, n in enumerate(shape[:-1])]
    columns = shape[-1]
    if columns <= block:
        return (*lead, None if columns == 1 else "b"), (*lead, None)
    if columns % block:
        return (*lead, "_"), (*lead, "_")
    return (*lead, (("n", columns // block), ("b", block))), (*lead, "n")


@rule(_ops.block_quantize.default)
def block_quantize(call: Call) -> Rule:
    """Ranks that share a block, which only one that is a whole row lets them, join their maxima first."""
    numbers, scales = _rows(call)
    block, format = call.argument("block"), call.argument("format")

    def emit(e: Any, c: Call, local: Sequence[Any], ins: Sequence[Layout], outs: Sequence[Layout]) -> list[Any]:
        found = e.call(_ops.block_scales.default, local[0], block, format)
        sharing = tuple(a for a in ins[0].axes if a not in outs[1].axes)
        if sharing:
            found = e.reduce(found, sharing, "max", outs[1])
        return [e.call(_ops.block_code.default, local[0], found, block, format), found]

    return Equation((numbers,), (numbers, scales), apart=frozenset({(1, "b")}), emit=emit, advice=_uncut)


def _uncut(call: Call, layouts: Sequence[Layout | None]) -> str:
    layout, columns, block = layouts[0], call.operands[0].shape[-1], call.argument("block")
    assert layout is not None
    held = layout.local_shape[-1]
    fits = max(n for n in range(1, min(held, block) + 1) if held % n == 0)
    return (
        f"{call.argument('what')}: rows of {columns} are cut into blocks of {block}, and each rank holds {held} of a row: "
        f"a block would lie on two ranks. Write block={fits}, whose scales take {4 / fits:.3g} bytes per number, or "
        f"block={columns}, one scale for a row, or leave the leaf out with where=."
    )


@rule(_ops.block_dequantize.default)
def block_dequantize(call: Call) -> Rule:
    numbers, scales = _rows(call)
    return Equation((numbers, scales), (numbers,))


@rule(_ops.stochastic_round.default)
def stochastic_round(call: Call) -> Rule:
    return parse("...,...->...", call)
