"""Cut a graph into the pieces that a compiler takes: as large as can be, but for the updates of state leaf by leaf.

What a compiler cannot take (calls of bodies, values that are not tensors, effects) stays between the pieces. An
optimizer does the same to every leaf; its part is cut by leaf, and leaves that are treated alike are one piece of code
for any number of elements, so that what there is to compile does not grow with the model.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from functitan.compiler import nodes
from functitan.compiler.body_calls import BODY_CALLS
from functitan.compiler.emit import Constant

aten = torch.ops.aten
_WAIT = torch.ops._c10d_functional.wait_tensor.default
#: Elementwise, though torch does not tag them so.
_ELEMENTWISE = {aten._to_copy.default, aten.clone.default, aten.zeros_like.default, aten.ones_like.default}
#: A value under another name, in a program that runs without gradients.
_RENAMES = {aten.detach.default, aten.alias.default}


@dataclass
class Piece:
    """Calls that are compiled together.

    Attributes:
        calls: in order.
        inputs: the values from outside that they read.
        outs: the values that are read outside.
        flat: whether every call is elementwise, or sums up all elements, over values of one shape: then the code is
            the same for any shape.
        writes: from a result to the input whose memory it takes.
    """

    calls: list[fx.Node]
    inputs: list[fx.Node] = field(default_factory=list)
    outs: list[fx.Node] = field(default_factory=list)
    flat: bool = False
    writes: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def __post_init__(self) -> None:
        inside = set(self.calls)
        self.inputs = list(dict.fromkeys(a for n in self.calls for a in n.all_input_nodes if a not in inside))
        self.outs = [n for n in self.calls if any(u not in inside for u in n.users)]


#: A graph in order: pieces, and the nodes between them.
Items = list[Piece | fx.Node]


def cut(graph: fx.Graph, overwritable: Mapping[fx.Node, fx.Node], views: Mapping[fx.Node, set[fx.Node]]) -> Items:
    """The graph as pieces and the nodes between them.

    Args:
        graph: without its dead nodes.
        overwritable: from a result to the input whose memory it may take once nothing reads it any more.
        views: per value the inputs whose memory it shares.
    """
    items: Items = []
    run: list[fx.Node] = []

    def flush() -> None:
        items.extend(_leaves(list(run), overwritable))
        run.clear()

    for node in graph.nodes:
        if node.op == "call_function" and not _outside(node):
            run.append(node)
            continue
        if any(a in run for a in node.all_input_nodes):
            flush()
        items.append(node)
    flush()
    _take_memory(items, overwritable, views)
    return items


def renames(node: fx.Node) -> bool:
    """Whether a node is another name of its operand."""
    return node.target in _RENAMES and "checkpoint_name" not in node.meta


def _outside(node: fx.Node) -> bool:
    """Whether a call stays between pieces: bodies, parts of other sizes on each rank, what comes from them, collectives
    that end in another graph, constants, effects, other names of inputs."""
    if isinstance(node.target, Constant) or node.target in BODY_CALLS or nodes.has_effect(node):
        return True
    if "collective" in node.meta and not any(user.target is _WAIT for user in node.users):
        return True  # started here, waited for in another graph
    if node.target is _WAIT and nodes.args(node)[0].op == "placeholder":
        return True
    source = nodes.args(node)[0] if node.target is operator.getitem else node
    if "body" in source.meta or "owned" in source.meta:
        return True
    return renames(node) and node.all_input_nodes[0].op == "placeholder"


def _leaves(run: list[fx.Node], overwritable: Mapping[fx.Node, fx.Node]) -> list[Piece]:
    """A run as pieces: sums over whole leaves, the rest, the updates of leaves."""
    inside = set(run)
    update: dict[fx.Node, torch.Size] = {}
    for node in reversed(run):  # what leads to nothing but updates belongs to them
        shape = _flat_shape(node)
        mine = [u for u in node.users if u in inside]
        if shape is not None and all(update.get(u) == shape for u in mine) and (mine or len(node.users)):
            update[node] = shape
    updates = [g for g in _connected(run, update) if any(n in overwritable for n in g)]
    taken = {n for group in updates for n in group}
    total: dict[fx.Node, torch.Size] = {}
    if updates:
        for node in run:
            shape = _flat_shape(node) or _summed_shape(node)
            mine = [a for a in node.all_input_nodes if a in inside]
            if shape is not None and node not in taken and all(total.get(a) == shape for a in mine):
                total[node] = shape
    sums = [g for g in _connected(run, total) if any(_summed_shape(n) is not None for n in g)]
    taken |= {n for group in sums for n in group}
    rest = [n for n in run if n not in taken]
    pieces = [*(Piece(g, flat=True) for g in sums), *([Piece(rest)] if rest else [])]
    return [*pieces, *(Piece(g, flat=True) for g in updates)]


def _flat_shape(node: fx.Node) -> torch.Size | None:
    """The shape of an elementwise call on values of that one shape and scalars, if it is one."""
    val = node.meta.get("val")
    elementwise = torch.Tag.pointwise in getattr(node.target, "tags", ()) or node.target in _ELEMENTWISE
    if not elementwise or not isinstance(val, torch.Tensor) or val.ndim == 0 or not val.is_contiguous():
        return None
    return val.shape if _all_like(node.all_input_nodes, val.shape) else None


def _summed_shape(node: fx.Node) -> torch.Size | None:
    """The shape of what a call sums up to one number, if it is one."""
    if node.target is not aten.sum.default:
        return None
    shape = node.all_input_nodes[0].meta["val"].shape
    return shape if len(shape) and _all_like(node.all_input_nodes, shape) else None


def _all_like(operands: Iterable[fx.Node], shape: torch.Size) -> bool:
    vals = [a.meta.get("val") for a in operands]
    return all(isinstance(v, torch.Tensor) and (v.ndim == 0 or (v.shape == shape and v.is_contiguous())) for v in vals)


def _connected(run: Sequence[fx.Node], members: Mapping[fx.Node, torch.Size]) -> list[list[fx.Node]]:
    """The members in groups that are connected through members, each in the order of the run."""
    group_of: dict[fx.Node, list[fx.Node]] = {}
    for node in run:
        if node not in members:
            continue
        joined = [node]
        for used in node.all_input_nodes:
            other = group_of.get(used)
            if other is not None and other is not joined:
                joined = [*other, *joined]
                for n in joined:
                    group_of[n] = joined
        for n in joined:
            group_of[n] = joined
    order = {n: i for i, n in enumerate(run)}
    groups = {id(g): g for g in group_of.values()}
    return [sorted(g, key=order.__getitem__) for g in groups.values()]


def _take_memory(items: Items, overwritable: Mapping[fx.Node, fx.Node], views: Mapping[fx.Node, set[fx.Node]]) -> None:
    """Let results take the memory of inputs that nothing reads after their piece."""
    last: dict[fx.Node, int] = {}
    for i, item in enumerate(items):
        for used in item.inputs if isinstance(item, Piece) else item.all_input_nodes:
            for root in views[used]:
                last[root] = i
    for i, item in enumerate(items):
        if not isinstance(item, Piece):
            continue
        for out in item.outs:
            place = overwritable.get(out)
            if place is None or place not in item.inputs or last[place] != i or _flat_shape(out) is None:
                continue
            if all(used is place or place not in views[used] for used in item.inputs):
                item.writes[out] = place
