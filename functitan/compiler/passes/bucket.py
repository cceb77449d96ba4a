"""Buckets: the parameter gathers of a body as few collectives, and likewise the reductions of its gradients.

A collective has a cost beside its bytes, and links reach their rate with large ones. Those of one body that do not
depend on each other, over the same axes and in the same dtype, are packed into one buffer, sent, and taken apart:
the same bytes, the same sums of the same elements in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from functitan.columns import human_bytes
from functitan.compiler import nodes
from functitan.compiler.emit import Origin
from functitan.compiler.passes.fuse import Writer, fuse, levels, wait_of
from functitan.compiler.passes.settings import Passes
from functitan.compiler.program import Program
from functitan.compiler.reshard import Move
from functitan.compiler.text import body_names, place_name
from functitan.sharding.layout import Layout, canonical

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


def bucket(program: Program, settings: Passes) -> tuple[Program, list[str]]:
    """Bucket the collectives of parameters in every body, by buffers of at most ``settings.bucket_bytes``.

    The step's own graph is left alone: what it gathers early and late has nothing in common.
    """
    names = body_names(program)
    changes: list[str] = []

    def changed(where: str, graph: fx.Graph) -> fx.Graph:
        groups = _groups(graph, settings.bucket_bytes)
        changes.extend(_sentence(place_name(where, names), group) for group in groups)
        return _flatten_reshapes(fuse(graph, groups, _join)) if groups else graph

    bodies = {name: body.with_graphs(changed) for name, body in program.bodies.items()}
    return replace(program, bodies=bodies), changes


def _groups(graph: fx.Graph, limit: int) -> list[list[fx.Node]]:
    """What can be sent together, within the limit on the bytes of the gathered side."""
    gathers, sums = levels(graph, gathers_parameter), levels(graph, adds_gradient)
    found: dict[Any, list[list[fx.Node]]] = {}
    full: dict[Any, int] = {}
    for node in graph.nodes:
        if not (gathers_parameter(node) or adds_gradient(node)) or wait_of(node) is None:
            continue
        depth = gathers if gathers_parameter(node) else sums
        val = nodes.args(node)[0].meta["val"]
        whole = node if gathers_parameter(node) else nodes.args(node)[0]
        key = (node.target, nodes.args(node)[1:], val.dtype, depth[node])
        nbytes = whole.meta["val"].nbytes
        if key not in found or full[key] + nbytes > limit:
            found.setdefault(key, []).append([])
            full[key] = 0
        found[key][-1].append(node)
        full[key] += nbytes
    return [group for groups in found.values() for group in groups if len(group) > 1]


def gathers_parameter(node: fx.Node) -> bool:
    """Whether a node gathers a stored parameter for use."""
    move: Move | None = node.meta.get("collective")
    return move is not None and move.kind == "all_gather" and node.meta["origin"].gather


def adds_gradient(node: fx.Node) -> bool:
    """Whether a node adds up the gradient of a parameter over ranks."""
    move: Move | None = node.meta.get("collective")
    if move is None or move.kind not in ("reduce_scatter", "all_reduce"):
        return False
    origin: Origin = node.meta["origin"]
    return origin.backward and bool(origin.param)


def _join(w: Writer, members: Sequence[fx.Node], operands: Sequence[fx.Node]) -> list[fx.Node]:
    """One collective for several, in the place of the last operand."""
    kind = members[0].meta["collective"].kind
    origins: list[Origin] = [n.meta["origin"] for n in members]
    joint = replace(
        origins[0], param=joined_paths([o.param for o in origins]), why=f"bucket of {len(members)}: {origins[0].why}"
    )
    w.meta = {"origin": joint}
    build: Callable[..., list[fx.Node]] = {"all_gather": _gather, "reduce_scatter": _scatter, "all_reduce": _reduce}[
        kind
    ]
    parts = build(w, members, operands)
    for part, origin in zip(parts, origins, strict=True):
        part.meta["origin"] = origin
    return parts


def _gather(w: Writer, members: Sequence[fx.Node], operands: Sequence[fx.Node]) -> list[fx.Node]:
    n = int(nodes.args(members[0])[1])
    sizes = [x.meta["val"].numel() for x in operands]
    buffer = w.call(aten.cat.default, [w.call(aten.reshape.default, x, [-1]) for x in operands])
    rows = w.call(aten.reshape.default, _send(w, members, buffer), [n, sum(sizes)])
    return _cut(w, rows, 1, sizes, [list(wait_of(m).meta["val"].shape) for m in members])  # type: ignore[union-attr]


def _scatter(w: Writer, members: Sequence[fx.Node], operands: Sequence[fx.Node]) -> list[fx.Node]:
    n = int(nodes.args(members[0])[2])
    sizes = [x.meta["val"].numel() // n for x in operands]
    buffer = w.call(aten.cat.default, [w.call(aten.reshape.default, x, [n, -1]) for x in operands], 1)
    own = w.call(aten.reshape.default, _send(w, members, buffer), [sum(sizes)])
    return _cut(w, own, 0, sizes, [list(wait_of(m).meta["val"].shape) for m in members])  # type: ignore[union-attr]


def _reduce(w: Writer, members: Sequence[fx.Node], operands: Sequence[fx.Node]) -> list[fx.Node]:
    sizes = [x.meta["val"].numel() for x in operands]
    buffer = w.call(aten.cat.default, [w.call(aten.reshape.default, x, [-1]) for x in operands])
    whole = _send(w, members, buffer)
    return _cut(w, whole, 0, sizes, [list(x.meta["val"].shape) for x in operands])


def _send(w: Writer, members: Sequence[fx.Node], buffer: fx.Node) -> fx.Node:
    moves: list[Move] = [m.meta["collective"] for m in members]
    local = buffer.meta["val"].numel()
    ways = math.prod(int(a) for a in nodes.args(members[0])[1:-1] if isinstance(a, int))
    split = Layout((canonical([*moves[0].axes, local if moves[0].kind == "all_gather" else local // ways]),))
    whole = Layout((canonical([local]),))
    before, after = (split, whole) if moves[0].kind == "all_gather" else (whole, split)
    move = replace(
        moves[0], before=before, after=after, dim=0, source=-1, nbytes=sum(m.nbytes for m in moves)
    )  # the members' bytes, exactly
    sent = w.call(members[0].target, buffer, *nodes.args(members[0])[1:], collective=move)  # type: ignore[arg-type]
    return w.call(c10d.wait_tensor.default, sent)


def _cut(w: Writer, x: fx.Node, dim: int, sizes: Sequence[int], shapes: Sequence[list[int]]) -> list[fx.Node]:
    parts, at = [], 0
    for size, shape in zip(sizes, shapes, strict=True):
        part = w.call(aten.slice.Tensor, x, dim, at, at + size)
        parts.append(w.call(aten.reshape.default, part, shape))
        at += size
    return parts


def _flatten_reshapes(graph: fx.Graph) -> fx.Graph:
    """Reshapes of reshapes as one, so that what is cut out of a buffer is copied once, into its last form."""
    for node in graph.nodes:
        while nodes.is_call(node, aten.reshape) and nodes.is_call(nodes.args(node)[0], aten.reshape):
            node.args = (nodes.args(nodes.args(node)[0])[0], nodes.args(node)[1])
    nodes.drop_dead(graph)
    return graph


def _sentence(where: str, group: Sequence[fx.Node]) -> str:
    move = group[0].meta["collective"]
    sent = sum(n.meta["collective"].nbytes for n in group)
    paths = joined_paths([n.meta["origin"].param for n in group])
    return f"{where}: {len(group)} {move.kind} {'+'.join(move.axes)} as one of {human_bytes(sent)}: {paths}"


def joined_paths(paths: Sequence[str]) -> str:
    """Paths with what they have in common said once.

    >>> joined_paths(["layers/wq", "layers/wk"]), joined_paths(["a", "b/c"]), joined_paths(["a", "a"])
    ('layers/{wq,wk}', '{a,b/c}', 'a')
    """
    own = list(dict.fromkeys(paths))
    if len(own) == 1:
        return own[0]
    rows = [p.split("/") for p in own]
    common = 0
    while all(len(r) > common + 1 and r[common] == rows[0][common] for r in rows):
        common += 1
    head = "".join(f"{p}/" for p in rows[0][:common])
    return f"{head}{{{','.join('/'.join(r[common:]) for r in rows)}}}"
