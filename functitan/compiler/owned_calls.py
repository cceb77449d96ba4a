"""How an orthogonalisation of many leaves is lowered: matrices go to their owners and back, in buckets.

A bucket is packed, exchanged, worked on, exchanged back and unpacked. The next stage's buckets are under way before
those of this one are worked on, and results are waited for one stage late, so that at most two stages are held at a time.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from spmd_types.types import PartitionSpec
from torch import fx

from functitan.compiler import markers, nodes
from functitan.compiler.emit import Emitter, Origin
from functitan.compiler.gram import in_gram_form, split_over
from functitan.compiler.owned import Exchange, Orthogonalize, Pack, Unpack
from functitan.compiler.reshard import Move
from functitan.compiler.values import Applied, Value
from functitan.errors import listed
from functitan.ops.orthogonalize import Spread, matrix_flops, orthogonalize_op
from functitan.sharding.layout import Layout, replicated, without
from functitan.sharding.op_rules.base import Call, Decompose, Operand
from functitan.sharding.ownership import Leaf, Plan
from functitan.sharding.planner import plan

if TYPE_CHECKING:
    from functitan.compiler.propagate import Propagator

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
_OP = torch.ops.functitan.orthogonalize.default


def orthogonalize(p: Propagator, node: fx.Node) -> list[Value]:
    """Lower the op: leaves in the Gram form, then the others stacked or owned."""
    spread = Spread.of(str(nodes.args(node)[4]))
    for axis in (*spread.axes, *spread.gram):
        p.ctx.mesh.require(axis, f"the axes {spread.axes} of an orthogonalisation")
    call, values = p.describe(node)
    axes = tuple(a for a in p.sizes if a in spread.axes)
    split, told = in_gram_form(spread, [_own(v) for v in values], call, axes, p.sizes)
    line = str(node.meta.get("line") or "")
    p.choices += [(line, text) for text in told]
    out: dict[int, Value] = {}
    if split:
        found = p.inline(node, Decompose(lambda *a: split_over(split, spread, *a), tuple(split.items())), values)
        out.update(zip(split, found, strict=True))
    rest = [i for i in range(len(values)) if i not in split]
    if rest:
        choice, why = (spread.layout, "") if spread.layout != "auto" else _stacked(spread, values, rest, axes, p.sizes)
        if why and axes:
            p.choices.append((line, f"{len(rest)} leaves of matrices over {listed(axes)}: {choice}, since {why}"))
        if choice == "stacked":
            found = p.inline(node, Decompose(lambda *a: _stack(axes, spread, rest, *a), tuple(rest)), values)
        else:
            found = _owned(p, spread.part(rest), _part(call, rest, spread), [values[i] for i in rest], axes)
        out.update(zip(rest, found, strict=True))
    return [out[i] for i in range(len(values))]


def _own(v: Value) -> Layout:
    return (v.layout or v.preferred or replicated(v.type.shape)).settled()


def _part(call: Call, index: Sequence[int], spread: Spread) -> Call:
    """The same call on some of its leaves."""
    args = ([Operand(k) for k in range(len(index))], *call.args[1:4], spread.part(index).text())
    types = tuple(call.operands[i] for i in index)
    return Call(call.op, args, {}, types, tuple(call.outputs[i] for i in index))


def _owned(p: Propagator, spread: Spread, call: Call, values: Sequence[Value], axes: tuple[str, ...]) -> list[Value]:
    own = [_own(v) for v in values]
    layouts = [_entered(lay, axes, p.sizes) for lay in own]
    locals_ = [
        p.read(v, lay, f"the matrices of leaf {path} are worked on whole")
        for v, lay, path in zip(values, layouts, spread.paths, strict=True)
    ]
    work = _Work(call, layouts, spread, axes, p.sizes)
    outs = work.emit(p.emitter, locals_)
    outs[0].meta["applied"] = Applied(call, tuple(layouts), tuple(layouts), work.emit)
    rows = zip(outs, layouts, own, call.outputs, strict=True)
    return [p.value(typ, wanted, p.moved(out, lay, wanted, typ)) for out, lay, wanted, typ in rows]


def _entered(layout: Layout, axes: Sequence[str], sizes: dict[str, int]) -> Layout:
    """Matrices are split by the axes of the work alone; others are gathered."""
    kept = Layout(layout.dims)
    regular = [dim for dim in kept.dims[-2:] if all(isinstance(d, str) for d in dim[:-1])]
    fine = {d for dim in regular for d in dim if d in axes}
    return without(kept, [d for dim in kept.dims[-2:] for d in dim if isinstance(d, str) and d not in fine], sizes)


def leaf_of(path: str, layout: Layout, axes: Sequence[str], sizes: dict[str, int], flops: int) -> Leaf:
    """A leaf for the planner."""
    rows, cols = (tuple(str(d) for d in dim if isinstance(d, str)) for dim in layout.dims[-2:])
    shape = layout.shape(sizes)
    copies = tuple(a for a in axes if a not in layout.axes)
    return Leaf(path, math.prod(layout.local_shape[:-2]), (shape[-2], shape[-1]), rows, cols, copies, flops)


@dataclass(frozen=True, eq=False)
class _Work:
    """A call with the layouts of its operands."""

    call: Call
    layouts: Sequence[Layout]
    spread: Spread
    axes: tuple[str, ...]
    sizes: dict[str, int]

    @cached_property
    def plan(self) -> Plan:
        """Who works on what."""
        steps = len(self.call.args[1]) // 3
        leaves = [
            leaf_of(path, lay, self.axes, self.sizes, matrix_flops(lay.shape(self.sizes)[-2:], parts, steps))
            for path, lay, parts in zip(self.spread.paths, self.layouts, self.spread.blocks, strict=True)
        ]
        itemsize = max(t.dtype.itemsize for t in self.call.operands)
        live = {a: self.sizes[a] for a in self.axes}
        return plan(leaves, live, itemsize=itemsize, bucket_bytes=self.spread.bucket_bytes)

    def emit(self, emitter: Emitter, xs: list[fx.Node]) -> list[fx.Node]:
        """The local results."""
        made = self.plan
        index = [self.spread.paths.index(leaf.path) for leaf in made.leaves]  # of the call, by leaf of the plan
        out: dict[int, fx.Node] = {}
        for i in made.here:
            out[index[i]] = self._here(emitter, xs[index[i]], index[i])
        flat = {
            i: _reshaped(emitter, xs[index[i]], [leaf.count, *_piece(made, i)]) for i, leaf in enumerate(made.leaves)
        }
        blocks = tuple(self.spread.blocks[i] for i in index)
        stages = [[_Moved(emitter, made, j, flat, blocks, self.call) for j in rows] for rows in made.stages()]
        rows: dict[int, list[fx.Node]] = {}
        for j, stage in enumerate(stages):
            for bucket in [*(stage if j == 0 else []), *(stages[j + 1] if j + 1 < len(stages) else [])]:
                bucket.start()
            for bucket in stage:
                bucket.work()
            # Those of the stage before are back by now; the last have nothing else to wait beside.
            for bucket in [*(stages[j - 1] if j else []), *(stage if j + 1 == len(stages) else [])]:
                for run, part in zip(bucket.what.runs, bucket.results(), strict=True):
                    rows.setdefault(run.leaf, []).append(part)
        for i, parts in rows.items():
            joined = parts[0] if len(parts) == 1 else emitter.call(aten.cat.default, parts)
            out[index[i]] = _reshaped(emitter, joined, self.layouts[index[i]].local_shape)
        return [out[i] for i in range(len(xs))]

    def _here(self, emitter: Emitter, x: fx.Node, i: int) -> fx.Node:
        """Matrices that are whole where they are."""
        own = Spread((self.spread.paths[i],), (self.spread.blocks[i],)).text()
        made = emitter.call(_OP, [x], *self.call.args[1:4], own)
        return emitter.call(operator.getitem, made, 0)


def _piece(made: Plan, i: int) -> tuple[int, int]:
    leaf, sizes = made.leaves[i], dict(made.sizes)
    ways = [math.prod(sizes[a] for a in axes) for axes in (leaf.rows, leaf.cols)]
    return leaf.shape[0] // ways[0], leaf.shape[1] // ways[1]


def _reshaped(emitter: Emitter, x: fx.Node, shape: Sequence[int]) -> fx.Node:
    if tuple(x.meta["val"].shape) == tuple(shape):
        return x
    return emitter.call(aten.reshape.default, x, list(shape))


class _Moved:
    """One bucket's way through the graph."""

    def __init__(
        self, emitter: Emitter, made: Plan, number: int, flat: dict[int, fx.Node], blocks: Any, call: Call
    ) -> None:
        self.emitter, self.plan, self.number, self.call, self.blocks = emitter, made, number, call, blocks
        self.what = made.buckets[number]
        self._flat = flat
        self._coordinates = [emitter.coordinates[a] for a in (*self.what.apart, *self.what.axes)]
        paths = list(dict.fromkeys(made.leaves[run.leaf].path for run in self.what.runs))
        self._param = paths[0] if len(paths) == 1 else ""
        self._text = f"{len(self.what.owners[0])} matrices of {listed(paths)}"
        self._dtype = flat[self.what.runs[0].leaf].meta["val"].dtype
        self._node: Any = None

    def start(self) -> None:
        """Send parts on their way to the owners."""
        runs = [
            self._flat[run.leaf]
            if (run.start, run.stop) == (0, self.plan.leaves[run.leaf].count)
            else self.emitter.call(aten.slice.Tensor, self._flat[run.leaf], 0, run.start, run.stop)
            for run in self.what.runs
        ]
        pack = Pack(self.plan, self.number)
        self._node = self._part(pack, pack.size(), runs)
        if self.what.split:
            self._exchange("in")

    def work(self) -> None:
        """Orthogonalise what arrived, and send results on their way back."""
        part = Orthogonalize(self.plan, self.number, self.blocks)
        self._node = self._part(part, part.size(), self._waited(), *self.call.args[1:4])
        self._exchange("out")

    def results(self) -> list[fx.Node]:
        """The runs that came back."""
        shapes = [(run.stop - run.start, *_piece(self.plan, run.leaf)) for run in self.what.runs]
        vals = [self.emitter.fake(shape, self._dtype) for shape in shapes]
        made = self.emitter.opaque(Unpack(self.plan, self.number), (self._waited(), *self._coordinates), vals)
        made.meta["owned"] = True
        return [self.emitter.call(operator.getitem, made, i) for i in range(len(shapes))]

    def _part(self, target: Any, size: int, *args: Any) -> fx.Node:
        node = self.emitter.opaque(target, (*args, *self._coordinates), self.emitter.fake((size,), self._dtype))
        node.meta["owned"] = True
        return node

    def _exchange(self, way: Any) -> None:
        target, sent = Exchange(self.plan, self.number, way), self._node
        made = self._part(target, target.size(), sent)
        before, after = (replicated(n.meta["val"].shape) for n in (sent, made))  # local shapes
        nbytes = target.nbytes(self._dtype.itemsize)
        made.meta["collective"] = Move("all_to_all", target.group, before, after, 0, -1, nbytes)
        o = self.emitter.origin
        why = f"{self._text} {'to their owners' if way == 'in' else 'back from their owners'}"
        made.meta["origin"] = Origin(o.line, o.backward, why, self._param or o.param)
        self._node = made

    def _waited(self) -> fx.Node:
        if "collective" not in self._node.meta:
            return self._node
        made = self.emitter.call(c10d.wait_tensor.default, self._node)
        made.meta["owned"] = True
        return made


# --- stacked -------------------------------------------------------------------------------------------------------


def _stacked(
    spread: Spread, values: Sequence[Value], index: Sequence[int], axes: Sequence[str], sizes: dict[str, int]
) -> tuple[str, str]:
    """Which layout has the lower maximal load. Stacked has the mean, which nothing is below, where it can be."""
    ranks = math.prod(sizes[a] for a in axes)
    shapes = [(spread.paths[i], values[i].type.shape) for i in index]
    odd = [f"{path} {tuple(shape)}" for path, shape in shapes if len(shape) < 3 or shape[0] % ranks]
    if not odd:
        return "stacked", f"the layers of every leaf divide by {ranks} ranks, so that all have the mean load"
    more = f" and {len(odd) - 3} more" if len(odd) > 3 else ""
    return "owned", f"{ranks} ranks do not divide the layers of {listed(odd[:3])}{more}"


def _stack(
    axes: tuple[str, ...],
    spread: Spread,
    index: Sequence[int],
    xs: Any,
    coefficients: Any,
    eps: Any,
    dtype: Any,
    _: str,
) -> list[Any]:
    """Layers spread over the axes, and back: the stacked layout, written with annotations."""
    found = []
    for i in index:
        x, what = xs[i], f"leaf {spread.paths[i]} in the stacked layout"
        spec = markers.encode_spec(PartitionSpec(axes or None, *[None] * (x.ndim - 1)), None, x.ndim, what)
        here = Spread((spread.paths[i],), (spread.blocks[i],)).text()
        (out,) = orthogonalize_op([markers.ops.constrain(x, spec)], coefficients, eps, dtype, here)
        found.append(markers.ops.constrain_like(out, x))
    return found


HANDLERS: dict[Any, Callable[[Any, fx.Node], Any]] = {_OP: orthogonalize}
