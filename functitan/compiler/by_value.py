"""Check one application of a rule by value: whole, and in parts on every rank.

Operands are small random tensors in float64. Dims that a rule names by a label alone are shrunk, since a rule does
not look at their size; what must be whole, is cut by a view, or stands among the arguments keeps its size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from functitan import _torch
from functitan.compiler.emit import Emitter
from functitan.compiler.values import Applied
from functitan.sharding.array import assemble, local_part
from functitan.sharding.layout import Dim, Layout, canonical
from functitan.sharding.mesh import Mesh
from functitan.sharding.op_rules.base import Labels, Operand, TensorType

#: Relative difference up to which a value in float64 counts as equal.
TOLERANCE = 1e-10
#: Integer operands of these are not zero.
_DIVISIONS = ("aten::div", "aten::floor_divide", "aten::remainder", "aten::fmod")
#: Local indices that a shrunk dim keeps between two mesh axes.
_RUN = 2
#: Runs a graph without bodies on all ranks: (graph, per-rank inputs) -> per-rank outputs.
Run = Callable[[fx.Graph, list[list[torch.Tensor]]], list[list[torch.Tensor]]]


def shrunk(applied: Applied, sizes: dict[str, int]) -> Applied:
    """The same application of the rule on smaller dims, where the rule allows it."""
    eq, call = applied.equation, applied.call
    if eq is None or eq.local is not None or eq.emit is not None or has_sizes(applied):
        return applied
    if any(isinstance(label, tuple) for labels in (*eq.inputs, *eq.outputs) for label in labels):
        return applied

    def small(layout: Layout, labels: Labels) -> Layout:
        dims = tuple(
            dim if label in ("_", None) else _small(dim) for dim, label in zip(layout.dims, labels, strict=True)
        )
        return replace(layout, dims=dims)

    operands = tuple(small(lay, lab) for lay, lab in zip(applied.operands, eq.inputs, strict=True))
    outputs = tuple(small(lay, lab) for lay, lab in zip(applied.outputs, eq.outputs, strict=True))
    types = tuple(TensorType(lay.shape(sizes), t.dtype) for lay, t in zip(operands, call.operands, strict=True))
    results = tuple(TensorType(lay.shape(sizes), t.dtype) for lay, t in zip(outputs, call.outputs, strict=True))
    return replace(applied, call=replace(call, operands=types, outputs=results), operands=operands, outputs=outputs)


def _small(dim: Dim) -> Dim:
    return canonical(d if isinstance(d, str) else min(d, _RUN) for d in dim)


def has_sizes(applied: Applied) -> bool:
    """Whether sizes of the call's tensors stand among its arguments: they would have to be local ones."""
    return any("SymInt[]" in str(a.type) or a.name in ("size", "shape") for a in applied.call.op._schema.arguments)


def check_by_value(applied: Applied, mesh: Mesh, run: Run) -> str:
    """Run a call whole and in parts; an empty text when they agree."""
    applied = shrunk(applied, mesh.shape)
    call = applied.call
    generator = torch.Generator().manual_seed(0)
    wide = [TensorType(t.shape, _wide(t.dtype)) for t in call.operands]
    values = [_random(t, generator) for t in wide]
    for i in call.zeros:
        values[i].zero_()
    if call.op._schema.name in _DIVISIONS:
        values = [v if v.is_floating_point() else v.clamp_min(1) for v in values]
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
    if b.dtype.itemsize == 1:  # no arithmetic in float8
        a, b = a.float(), b.float()
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
        return (
            [_filled(v, values) for v in tree]
            if isinstance(tree, list) or type(tree) is not tuple
            else tuple(_filled(v, values) for v in tree)
        )
    return tree
