"""A second opinion on every layout of a program.

1. DTensor's own sharding propagation, one mesh axis at a time and with redistribution forbidden, must give the layout
   that a rule gave, wherever it has an opinion.
2. Every distinct (op, layouts) is run once on small random tensors: per rank on local parts, put together, against
   the whole op. For ops that only have a registered rule, this is the proof.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from functitan import _torch
from functitan.compiler.by_value import Run, check_by_value, has_sizes, shrunk
from functitan.compiler.program import Program
from functitan.compiler.values import Applied
from functitan.errors import ShardingError
from functitan.sharding.layout import Layout, digit_size
from functitan.sharding.mesh import Mesh
from functitan.sharding.op_rules.base import Operand

#: Calls with more elements than this are not run by value.
VALUE_LIMIT = 1 << 22
#: Where DTensor answers another question (tried on torch 2.13): it keeps logical reductions pending as sums and
#: products, and gives a convolution's results back replicated.
_NO_OPINION = ("aten::any", "aten::all", "aten::convolution", "aten::convolution_backward")


@dataclass(frozen=True)
class Verification:
    """The outcome: distinct (op, layouts) by how they were checked.

    Attributes:
        agreed: DTensor gave the same layout on every axis.
        by_value: run by value and equal.
        unchecked: neither had an opinion (too large to run), by op name.
        problems: disagreements.
    """

    agreed: int
    by_value: int
    unchecked: tuple[str, ...]
    problems: tuple[str, ...] = field(default=())

    @property
    def ok(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        text = f"verified: {self.agreed} layouts agreed with DTensor, {self.by_value} equal by value"
        text += f", {len(self.unchecked)} unchecked" + (
            f" ({', '.join(sorted(set(self.unchecked)))})" if self.unchecked else ""
        )
        return "\n".join([text, *self.problems])


def verify(program: Program, run: Run) -> Verification:
    """Check every layout of a program.

    Args:
        program: what to check.
        run: runs a graph on all ranks of the program's mesh; see ``functitan.runtime``.

    Raises:
        ShardingError: a layout is wrong; the message names op, layouts and what differs.
    """
    distinct: dict[Any, tuple[Applied, str]] = {}
    for where, graph in program.graphs():
        for node in graph.nodes:
            applied = node.meta.get("applied")
            if applied is not None:
                line = node.meta["origin"].line
                distinct.setdefault(applied.key, (applied, f"{where}, {line}" if line else where))
    agreed, by_value, unchecked, problems = 0, 0, [], []
    opinion = _Opinion(program.mesh)
    with opinion:
        for applied, where in distinct.values():
            verdict = opinion.ask(applied)
            if isinstance(verdict, str):
                problems.append(f"{where}: {verdict}")
            agreed += verdict is True
            small = shrunk(applied, program.mesh.shape).call
            size = sum(t.numel for t in (*small.operands, *small.outputs))
            if size > VALUE_LIMIT:
                if verdict is None:
                    unchecked.append(str(applied.call.op))
                continue
            wrong = check_by_value(applied, program.mesh, run)
            if wrong:
                problems.append(f"{where}: {wrong}")
            else:
                by_value += 1
    found = Verification(agreed, by_value, tuple(unchecked), tuple(problems))
    if problems:
        raise ShardingError(f"{len(problems)} layouts of {program.name} are wrong:\n" + "\n".join(problems[:10]))
    return found


# --- DTensor's opinion -----------------------------------------------------------------------------------------


class _Opinion:
    """Asks DTensor's propagation about single axes, on meta tensors, in a fake process group where none is."""

    def __init__(self, mesh: Mesh) -> None:
        self._sizes = {a: n for a, n in mesh.axes if n > 1}
        self._dtensor = _torch.DTensorPropagation(max(self._sizes.values(), default=1))

    def __enter__(self) -> _Opinion:
        self._dtensor.__enter__()
        return self

    def __exit__(self, *details: Any) -> None:
        self._dtensor.__exit__(*details)

    def ask(self, applied: Applied) -> bool | str | None:
        """True when DTensor agrees on all axes, a sentence when it does not, None without an opinion."""
        call = applied.call
        if has_sizes(applied) or not call.operands or call.op._schema.name in _NO_OPINION:
            return None
        if any(isinstance(a, list | tuple) and not a for a in (*call.args, *call.kwargs.values())):
            return None  # an empty list of dims means all of them; DTensor reads it as none
        axes = {a for lay in (*applied.operands, *applied.outputs) for a in (*lay.axes, *lay.pending)}
        agreed = False
        for axis in sorted(axes):
            places = [_placement(lay, axis, self._sizes) for lay in applied.operands]
            operands = [
                (_axis_shape(lay, axis, self._sizes), t.dtype, p)
                for lay, t, p in zip(applied.operands, call.operands, places, strict=True)
            ]
            answer = self._dtensor.propagate(
                call.op, lambda make: (_made(call.args, make), _made(call.kwargs, make)), operands, self._sizes[axis]
            )
            if answer is None:
                return None
            mine = [_placement(lay, axis, self._sizes) for lay in applied.outputs]
            # A rule joins maxima at once; DTensor leaves them pending.
            answer = [("replicate", 0, 0) if a[0] == applied.reduce else a for a in answer]
            if answer != mine:
                return f'{call.op} over axis "{axis}" with operands {places}: the rule gives {mine}, DTensor gives {answer}.'
            agreed = True
        return agreed or None


def _made(tree: Any, make: Callable[[int], Any]) -> Any:
    if isinstance(tree, Operand):
        return make(tree.index)
    if isinstance(tree, dict):
        return {k: _made(v, make) for k, v in tree.items()}
    if isinstance(tree, list | tuple):
        return [_made(v, make) for v in tree]
    return tree


def _axis_shape(layout: Layout, axis: str, sizes: dict[str, int]) -> tuple[int, ...]:
    """The shape that a value has when only this axis is taken as whole."""
    shape = []
    for dim in layout.dims:
        n = 1
        for d in dim:
            if isinstance(d, int) or d == axis:
                n *= digit_size(d, sizes)
        shape.append(n)
    return tuple(shape)


def _placement(layout: Layout, axis: str, sizes: dict[str, int]) -> tuple[str, int, int]:
    """Replicate, Partial, or Shard with dim and split factor (1 for a leading split)."""
    if axis in layout.pending:
        return ("partial", 0, 0)
    for i, dim in enumerate(layout.dims):
        if axis in dim:
            before = 1
            for d in dim[: dim.index(axis)]:
                before *= d if isinstance(d, int) else 1
            return ("shard", i, before)
    return ("replicate", 0, 0)
