"""The loop of a scan over a lowered body, the same for one rank's tensors and for all ranks in lockstep.

Outputs per step are written into stacks. Values that only go to the backward loop stay a list of rows: nothing copies
them. A body may have graphs that start collectives for a later step, and some that finish those of steps before
(:class:`functitan.compiler.program.LoweredBody`); the loop runs them so much earlier or later.

What a step takes is laid out before the first one, row by row: a step only calls its graphs and copies its results.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from functitan import _torch
from functitan.compiler.program import LoweredBody

Run = Callable[[list[Any]], list[Any]]


@dataclass(frozen=True)
class Stages:
    """How a backend runs the graphs of one pass of a body: main, and where there are any, starts and finish."""

    main: Run
    starts: Run | None = None
    finish: tuple[Run, ...] = ()


class Ops(Protocol):
    """What a loop does with values."""

    def rows(self, x: Any) -> Sequence[Any]:
        """The rows of a stack, or of a list of rows as ``listed`` makes it."""
        ...

    def listed(self, rows: Sequence[Any]) -> Any: ...

    def stack(self, row: Any, length: int) -> Any:
        """Room for so many rows like this one."""
        ...

    def write(self, places: Sequence[Any], rows: Sequence[Any]) -> None:
        """Copy rows to their places in stacks."""
        ...

    def add(self, a: Any, b: Any) -> Any: ...


class TensorOps:
    """Values are one rank's tensors."""

    def rows(self, x: torch.Tensor | list[torch.Tensor]) -> Sequence[torch.Tensor]:
        return x if isinstance(x, list) else x.unbind(0)

    def listed(self, rows: Sequence[Any]) -> Any:
        return list(rows)

    def stack(self, row: torch.Tensor, length: int) -> torch.Tensor:
        return row.new_empty((length, *row.shape))

    def write(self, places: Sequence[torch.Tensor], rows: Sequence[torch.Tensor]) -> None:
        _torch.copy_each(places, rows)

    def add(self, a: Any, b: Any) -> Any:
        return a + b


class _Stacks:
    """Outputs per step, written into stacks that are made when the first come: rows do not wait for each other."""

    def __init__(self, length: int, ops: Ops) -> None:
        self.whole: list[Any] = []
        self._length, self._ops = length, ops
        self._places: list[tuple[Any, ...]] = []

    def write(self, i: int, rows: Sequence[Any]) -> None:
        if not rows:
            return
        if not self.whole:
            self.whole = [self._ops.stack(row, self._length) for row in rows]
            self._places = list(zip(*map(self._ops.rows, self.whole), strict=True))
        self._ops.write(self._places[i], rows)


def scan_forward(body: LoweredBody, length: int, inputs: list[Any], stages: Stages, ops: Ops) -> list[Any]:
    """The last carry, the stacked outputs of all steps, and the rows that backward needs."""
    first, last, n_outs = body.n_carry, body.n_carry + body.n_xs, len(body.out_layouts)
    carry = inputs[:first]
    given = _rows(map(ops.rows, inputs[first:last]), inputs[last:], length)
    ys = _Stacks(length, ops)
    saved = []
    for i, started in _started_ahead(range(length), body.ahead, stages.starts, given):
        outs = stages.main([*carry, *given[i], *started])
        carry = outs[:first]
        ys.write(i, outs[first:n_outs])
        saved.append(outs[n_outs:])
    return [*carry, *ys.whole, *map(ops.listed, zip(*saved, strict=True))]


def scan_backward(
    body: LoweredBody,
    length: int,
    kept: list[Any],
    saved: list[Any],
    cotangents: list[Any],
    stages: Stages,
    ops: Ops,
) -> list[Any]:
    """The gradients of carry, xs and constants, last step first.

    A constant's gradient is the sum over steps, the first carry's is what the loop ends with.
    """
    first, last = body.n_carry, body.n_carry + body.n_xs
    # Inputs, outputs and gradients are numbered carry first, then xs or ys, then constants.
    n_kept = sum(j < last for j in body.saved_inputs)
    n_carried = sum(o < first for o in body.tangent_of)
    slots = [body.tangent_of.index(j) for j in body.gradient_of if j < first]
    n_own, n_rows = len(slots), sum(j < last for j in body.gradient_of)

    given = _rows(map(ops.rows, kept[:n_kept]), kept[n_kept:], length)
    late = _rows(map(ops.rows, saved), [], length)
    ys = _rows(map(ops.rows, cotangents[n_carried:]), [], length)
    current = cotangents[:n_carried]
    stacks = _Stacks(length, ops)
    totals: list[Any] = []
    last_first = reversed(range(length))

    def take(found: list[Any]) -> None:
        nonlocal totals
        stacks.write(next(last_first), found[: n_rows - n_own])
        mine = found[n_rows - n_own :]
        totals = [ops.add(a, b) for a, b in zip(totals, mine, strict=True)] if totals else mine

    unfinished: list[list[Any] | None] = [None] * len(stages.finish)  # what each graph of finish takes next

    def finish(found: list[Any] | None) -> None:
        """Run every graph of finish that has something to take, the last one first; then hand ``found`` to the first."""
        for k in reversed(range(len(unfinished))):
            values, unfinished[k] = unfinished[k], None
            if values is not None and k + 1 < len(unfinished):
                unfinished[k + 1] = stages.finish[k](values)
            elif values is not None:
                take(stages.finish[k](values))
        if unfinished:
            unfinished[0] = found
        elif found is not None:
            take(found)

    for i, started in _started_ahead(reversed(range(length)), body.ahead, stages.starts, given):
        found = stages.main([*given[i], *late[i], *current, *ys[i], *started])
        for slot, g in zip(slots, found, strict=False):
            current[slot] = g
        finish(found[n_own:])
    for _ in stages.finish:
        finish(None)
    return [*(current[slot] for slot in slots), *stacks.whole, *totals]


def _rows(columns: Iterable[Sequence[Any]], constants: Sequence[Any], length: int) -> list[list[Any]]:
    """Per step its row of every column, and the constants."""
    rows = list(zip(*columns, strict=True)) or [()] * length
    return [[*row, *constants] for row in rows]


def _started_ahead(
    steps: Sequence[int] | Iterator[int], ahead: int, starts: Run | None, given: Sequence[list[Any]]
) -> Iterator[tuple[int, list[Any]]]:
    """The steps in order, each with what ``starts`` gave for it so many steps before."""
    waiting: deque[tuple[int, list[Any]]] = deque()
    for i in steps:
        waiting.append((i, [] if starts is None else starts(list(given[i]))))
        if len(waiting) > ahead:
            yield waiting.popleft()
    yield from waiting
