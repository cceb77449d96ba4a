"""The loop of a scan over a lowered body, the same for one rank's tensors and for all ranks in lockstep.

Outputs per step are written into stacks. Values that only go to the backward loop stay a list of rows: nothing copies
them. A body may have graphs that start collectives for a later step, and some that finish those of steps before
(:class:`functitan.compiler.program.LoweredBody`); the loop runs them so much earlier or later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

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

    def split(self, x: Any) -> Any: ...

    def row(self, x: Any, i: int) -> Any: ...

    def write(self, stack: Any, i: int, row: Any, length: int) -> Any: ...

    def rows(self, rows: Sequence[Any]) -> Any: ...

    def add(self, a: Any, b: Any) -> Any: ...


class TensorOps:
    """Values are one rank's tensors."""

    def split(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        """All rows at once, which costs less than one by one."""
        return x.unbind(0)

    def row(self, x: Sequence[torch.Tensor], i: int) -> torch.Tensor:
        return x[i]

    def write(self, stack: torch.Tensor | None, i: int, row: torch.Tensor, length: int) -> torch.Tensor:
        """The stack with this row, made for all rows when the first one comes: rows do not wait for each other."""
        stack = row.new_empty((length, *row.shape)) if stack is None else stack
        stack[i] = row
        return stack

    def rows(self, rows: Sequence[Any]) -> Any:
        return list(rows)

    def add(self, a: Any, b: Any) -> Any:
        return a + b


def scan_forward(body: LoweredBody, length: int, inputs: list[Any], stages: Stages, ops: Ops) -> list[Any]:
    """The last carry, the stacked outputs of all steps, and the rows that backward needs."""
    first, last = body.n_carry, body.n_carry + body.n_xs
    carry, xs, consts = inputs[:first], [ops.split(x) for x in inputs[first:last]], inputs[last:]
    n_outs = len(body.out_layouts)
    ys: list[Any] = [None] * (n_outs - first)
    saved = []
    at = lambda i: [*(ops.row(x, i) for x in xs), *consts]  # noqa: E731
    for i, started in _started_ahead(range(length), body.ahead, stages.starts, at):
        outs = stages.main([*carry, *at(i), *started])
        carry = outs[:first]
        ys = [ops.write(y, i, row, length) for y, row in zip(ys, outs[first:n_outs], strict=True)]
        saved.append(outs[n_outs:])
    return [*carry, *ys, *(ops.rows(column) for column in zip(*saved, strict=True))]


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
    carried = {o: k for k, o in enumerate(body.tangent_of) if o < first}
    own = [j for j in body.gradient_of if j < first]
    others = [j for j in body.gradient_of if j >= first]
    current = list(cotangents)
    stacks: dict[int, Any] = {}
    totals: dict[int, Any] = {}
    late = reversed(range(length))

    def take(found: Sequence[Any]) -> None:
        i = next(late)
        for j, g in zip(others, found, strict=True):
            if j < last:
                stacks[j] = ops.write(stacks.get(j), i, g, length)
            else:
                totals[j] = g if j not in totals else ops.add(totals[j], g)

    ready = [ops.split(x) if j < last else x for j, x in zip(body.saved_inputs, kept, strict=True)]
    ys = {k: ops.split(cotangents[k]) for k, o in enumerate(body.tangent_of) if o >= first}
    at = lambda i: [ops.row(x, i) if j < last else x for j, x in zip(body.saved_inputs, ready, strict=True)]  # noqa: E731
    unfinished: list[list[Any] | None] = [None] * len(stages.finish)  # what each graph of finish takes next

    def finish(found: list[Any] | None) -> None:
        """Run every graph of finish that has something to take, the last one first; then hand ``found`` to the first."""
        for k in reversed(range(len(unfinished))):
            given, unfinished[k] = unfinished[k], None
            if given is not None and k + 1 < len(unfinished):
                unfinished[k + 1] = stages.finish[k](given)
            elif given is not None:
                take(stages.finish[k](given))
        if unfinished:
            unfinished[0] = found
        elif found is not None:
            take(found)

    for i, started in _started_ahead(reversed(range(length)), body.ahead, stages.starts, at):
        tangents = [current[k] if o < first else ops.row(ys[k], i) for k, o in enumerate(body.tangent_of)]
        found = stages.main([*at(i), *(ops.row(s, i) for s in saved), *tangents, *started])
        for j, g in zip(own, found, strict=False):
            current[carried[j]] = g
        finish(found[len(own) :])
    for _ in stages.finish:
        finish(None)
    return [current[carried[j]] if j < first else stacks[j] if j < last else totals[j] for j in body.gradient_of]


def _started_ahead(
    steps: Sequence[int] | Iterator[int], ahead: int, starts: Run | None, at: Callable[[int], list[Any]]
) -> Iterator[tuple[int, list[Any]]]:
    """The steps in order, each with what ``starts`` gave for it so many steps before."""
    waiting: deque[tuple[int, list[Any]]] = deque()
    for i in steps:
        waiting.append((i, [] if starts is None else starts(at(i))))
        if len(waiting) > ahead:
            yield waiting.popleft()
    yield from waiting
