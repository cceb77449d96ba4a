"""The loop of a scan over a lowered body, the same for one rank's tensors and for all ranks in lockstep.

Outputs per step are stacked. Values that only go to the backward loop stay a list of rows: nothing copies them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from functitan.compiler.program import LoweredBody

Run = Callable[[list[Any]], list[Any]]


class Ops(Protocol):
    """What a loop does with values."""

    def row(self, x: Any, i: int) -> Any: ...

    def stack(self, rows: Sequence[Any]) -> Any: ...

    def rows(self, rows: Sequence[Any]) -> Any: ...

    def add(self, a: Any, b: Any) -> Any: ...


class TensorOps:
    """Values are one rank's tensors."""

    def row(self, x: Any, i: int) -> Any:
        return x[i]

    def stack(self, rows: Sequence[Any]) -> Any:
        return torch.stack(list(rows))

    def rows(self, rows: Sequence[Any]) -> Any:
        return list(rows)

    def add(self, a: Any, b: Any) -> Any:
        return a + b


def scan_forward(body: LoweredBody, length: int, inputs: list[Any], run: Run, ops: Ops) -> list[Any]:
    """The last carry, the stacked outputs of all steps, and the rows that backward needs."""
    first, last = body.n_carry, body.n_carry + body.n_xs
    carry, xs, consts = inputs[:first], inputs[first:last], inputs[last:]
    n_outs = len(body.out_layouts)
    steps = []
    for i in range(length):
        outs = run([*carry, *(ops.row(x, i) for x in xs), *consts])
        carry = outs[:first]
        steps.append(outs[first:])
    columns = list(zip(*steps, strict=True))
    ys = [ops.stack(c) for c in columns[: n_outs - first]]
    return [*carry, *ys, *(ops.rows(c) for c in columns[n_outs - first :])]


def scan_backward(
    body: LoweredBody,
    length: int,
    kept: list[Any],
    saved: list[Any],
    cotangents: list[Any],
    run: Run,
    ops: Ops,
) -> list[Any]:
    """The gradients of carry, xs and constants, last step first.

    A constant's gradient is the sum over steps, the first carry's is what the loop ends with.
    """
    first, last = body.n_carry, body.n_carry + body.n_xs
    carried = {o: k for k, o in enumerate(body.tangent_of) if o < first}
    current = list(cotangents)
    rows: dict[int, list[Any]] = {}
    totals: dict[int, Any] = {}
    for i in reversed(range(length)):
        again = [ops.row(x, i) if j < last else x for j, x in zip(body.saved_inputs, kept, strict=True)]
        tangents = [current[k] if o < first else ops.row(cotangents[k], i) for k, o in enumerate(body.tangent_of)]
        found = run([*again, *(ops.row(s, i) for s in saved), *tangents])
        for j, g in zip(body.gradient_of, found, strict=True):
            if j < first:
                current[carried[j]] = g
            elif j < last:
                rows.setdefault(j, []).append(g)
            else:
                totals[j] = g if j not in totals else ops.add(totals[j], g)
    return [
        current[carried[j]] if j < first else ops.stack(rows[j][::-1]) if j < last else totals[j]
        for j in body.gradient_of
    ]
