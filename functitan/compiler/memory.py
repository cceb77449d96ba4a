"""What a rank holds in memory during a step, by what holds it and at its peak; see :mod:`functitan.compiler.liveness`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from functitan.columns import columns, human_bytes
from functitan.compiler.liveness import CATEGORIES, Value, Walk, group_of

if TYPE_CHECKING:
    from functitan.compiler.program import Program


@dataclass(frozen=True)
class Memory:
    """Bytes per rank by what holds them.

    Attributes:
        largest: per category the most that is live at one time.
        at_peak: per category what is live at the moment of the highest total.
        peak: the highest total.
        where: the body and op at which it is reached.
    """

    largest: Mapping[str, int]
    at_peak: Mapping[str, int]
    peak: int
    where: str

    def __getitem__(self, category: str) -> int:
        """The most bytes of a category that are live at one time."""
        return self.largest[category]

    def to_json(self) -> dict[str, Any]:
        """In a form that JSON can hold."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        rows: list[tuple[object, ...]] = [("memory per rank", "at most", "at the peak")]
        rows += [(c, human_bytes(self.largest[c]), human_bytes(self.at_peak[c])) for c in CATEGORIES]
        rows.append(("peak", "", human_bytes(self.peak), f"at {self.where}"))
        return columns(rows, right=(1, 2))


def default_groups(paths: Sequence[str]) -> dict[str, str]:
    """Which inputs are parameters and optimizer state: a leading "params" and "opt", at or below an argument.

    >>> default_groups(["state/params/w", "state/opt/mu/w", "batch/tokens"])
    {'parameters': 'state/params', 'optimizer': 'state/opt'}
    """
    found: dict[str, str] = {}
    for name, word in (("parameters", "params"), ("optimizer", "opt")):
        for path in paths:
            parts = path.split("/")
            if word in parts[:2]:
                found[name] = "/".join(parts[: parts.index(word) + 1])
                break
    return found


def measure(program: Program, groups: Mapping[str, str] | None = None, donated: Iterable[int] | None = None) -> Memory:
    """The memory of a program; see :meth:`functitan.compiler.program.Program.memory`."""
    groups = default_groups(program.inputs) if groups is None else groups
    walk = Walk(program, groups)
    inputs: list[Value] = []
    for path, layout, typ in zip(program.inputs, program.in_layouts, program.in_types, strict=True):
        block = walk.new(math.prod(layout.local_shape) * typ.dtype.itemsize, group_of(path, groups))
        inputs.append((block,))
    given = set(program.donated if donated is None else donated)
    # The caller holds what it does not give away; a donated input is freed after its last use.
    kept = [v for i, v in enumerate(inputs) if i not in given]
    for value in kept:
        walk.hold(value)
    walk.graph("step", program.graph, inputs)
    return Memory(walk.largest, walk.at_peak, walk.peak, walk.where)
