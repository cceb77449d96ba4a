"""A second opinion on every layout of a program.

1. DTensor's own sharding propagation, one mesh axis at a time and with redistribution forbidden, must give the layout
   that a rule gave, wherever it has an opinion.
2. Every distinct (op, layouts) is run once on small random tensors: per rank on local parts, put together, against
   the whole op. For ops that only have a registered rule, this is the proof.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from functitan import _torch
from functitan.compiler.emit import Emitter
from functitan.compiler.program import Program
from functitan.compiler.values import Applied
from functitan.errors import ShardingError
from functitan.sharding.array import assemble, local_part
from functitan.sharding.layout import Layout, digit_size
from functitan.sharding.mesh import Mesh
from functitan.sharding.op_rules.base import Call, Operand, TensorType

#: Calls with more elements than this are not run by value.
VALUE_LIMIT = 1 << 22
#: Relative difference up to which a value in float64 counts as equal.
TOLERANCE = 1e-10


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
        text += f", {len(self.unchecked)} unchecked" + (f" ({', '.join(sorted(set(self.unchecked)))})" if self.unchecked else "")
        return "\n".join([text, *self.problems])


#: Runs a graph without bodies on all ranks: (graph, per-rank inputs) -> per-rank outputs.
Run = Callable[[fx.Graph, list[list[torch.Tensor]]], list[list[torch.Tensor]]]


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
            size = sum(t.numel for t in (*applied.call.operands, *applied.call.outputs))
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


# --- by value --------------------------------------------------------------------------------------------------


def check_by_value(applied: Applied, mesh: Mesh, run: Run) -> str:
    """Run a call whole and in parts; an empty text when they agree."""
    call = applied.call
    generator = torch.Generator().manual_seed(0)
    wide = [TensorType(t.shape, _wide(t.dtype)) for t in call.operands]
    values = [_random(t, generator) for t in wide]
    for i in call.zeros:
        values[i].zero_()
    sizes = {a: n for a, n in mesh.axes if n > 1}
    emitter = Emitter(sizes, _torch.FakeTensorMode())
    nodes = []
    for i, (t, layout) in enumerate(zip(wide, applied.operands, strict=True)):
        nodes.append(emitter.placeholder(f"x{i}", t, layout))
    outs = applied.emit(emitter, list(nodes))
    emitter.graph.output(list(outs))
    parts = [_parts(v, lay, mesh, generator) for v, lay in zip(values, applied.operands, strict=True)]
    whole = call.op(*_filled(call.args, values), **_filled(call.kwargs, values))
    expected = [t for t in whole if t is not None] if isinstance(whole, list | tuple) else [whole]
    found = run(_wide_graph(emitter.graph), parts)
    for i, (want, rows, layout) in enumerate(zip(expected, found, applied.outputs, strict=True)):
        got = assemble(rows, layout, mesh)
        error = difference(got, want)
        if error > TOLERANCE:
            return (
                f"{call.op} with operands {', '.join(str(x) for x in applied.operands)} gives output {i} as {layout}; run by "
                f"value on {mesh} it differs from the whole op by {error:.1e}."
            )
    return ""


def _wide_graph(graph: fx.Graph) -> fx.Graph:
    for node in graph.nodes:
        if node.op == "call_function":
            node.args = fx.node.map_aggregate(node.args, lambda a: _wide(a) if isinstance(a, torch.dtype) else a)  # type: ignore[assignment]
            node.kwargs = fx.node.map_aggregate(node.kwargs, lambda a: _wide(a) if isinstance(a, torch.dtype) else a)  # type: ignore[assignment]
    return graph


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype.is_floating_point else dtype


def _random(t: TensorType, generator: torch.Generator) -> torch.Tensor:
    if t.dtype.is_floating_point:
        # Away from zero and one: roots, logarithms and quotients stay defined.
        return torch.rand(t.shape, generator=generator, dtype=t.dtype) * 0.8 + 0.1
    if t.dtype.is_complex:
        return torch.randn(t.shape, generator=generator, dtype=t.dtype)
    return torch.randint(0, 2, t.shape, generator=generator).to(t.dtype)


def _parts(x: torch.Tensor, layout: Layout, mesh: Mesh, generator: torch.Generator) -> list[torch.Tensor]:
    """Local parts; over pending axes random addends whose sum is the value."""
    places = list(mesh.coordinates())
    settled = Layout(layout.dims)
    out = []
    addends: dict[tuple[int, ...], torch.Tensor] = {}
    for c in places:
        mine = tuple(c[a] for a in layout.pending)
        if not layout.pending:
            out.append(local_part(x, settled, c, mesh))
            continue
        if mine not in addends:
            share = _random(TensorType(tuple(x.shape), x.dtype), generator)
            addends[mine] = share
        out.append(local_part(addends[mine], settled, c, mesh))
    if layout.pending:
        total = sum(addends.values())
        last = tuple(places[-1][a] for a in layout.pending)
        fix = x - total
        for i, c in enumerate(places):
            if tuple(c[a] for a in layout.pending) == last:
                out[i] = out[i] + local_part(fix, settled, c, mesh)
    return out


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """max|a - b| / max|b|; equal infinities and NaNs count as equal, integers must be equal."""
    if a.shape != b.shape:
        return float("inf")
    if not b.numel():
        return 0.0
    if not b.dtype.is_floating_point and not b.dtype.is_complex:
        return 0.0 if torch.equal(a.to(b.dtype), b) else float("inf")
    same = (a == b) | (a.isnan() & b.isnan())
    gap = torch.where(same, torch.zeros_like(b), a - b).abs().max()
    scale = b[b.isfinite()].abs().max() if b.isfinite().any() else torch.ones(())
    return float(gap / scale) if scale > 0 else float(gap)


def _filled(tree: Any, values: Sequence[torch.Tensor]) -> Any:
    if isinstance(tree, Operand):
        return values[tree.index]
    if isinstance(tree, torch.dtype):
        return _wide(tree)
    if isinstance(tree, dict):
        return {k: _filled(v, values) for k, v in tree.items()}
    if isinstance(tree, tuple | list):
        return [_filled(v, values) for v in tree] if isinstance(tree, list) or type(tree) is not tuple else tuple(
            _filled(v, values) for v in tree
        )
    return tree


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
        if _has_sizes(call) or not applied.call.operands:
            return None
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
                return (
                    f'{call.op} over axis "{axis}" with operands {places}: the rule gives {mine}, DTensor gives {answer}.'
                )
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


def _has_sizes(call: Call) -> bool:
    """Whether sizes of the call's tensors stand among its arguments: they would have to be local ones."""
    return any("SymInt[]" in str(a.type) or a.name in ("size", "shape") for a in call.op._schema.arguments)


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
