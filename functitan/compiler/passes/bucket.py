"""Buckets: the parameter gathers of a body as few collectives, and likewise the reductions of its gradients.

A collective has a cost beside its bytes, and links reach their rate with large ones. Those of one body that do not
depend on each other, over the same axes and in the same dtype, are packed into one buffer, sent, and taken apart:
the same bytes, the same sums of the same elements in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from functitan.columns import human_bytes
from functitan.compiler import nodes
from functitan.compiler.emit import Origin
from functitan.compiler.passes.fuse import Writer, fuse, levels, wait_of
from functitan.compiler.passes.pack import joined_paths, pack
from functitan.compiler.passes.settings import Passes
from functitan.compiler.program import Program
from functitan.compiler.reshard import Move
from functitan.compiler.text import body_names, place_name

aten = torch.ops.aten


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
    origins: list[Origin] = [n.meta["origin"] for n in members]
    joint = replace(
        origins[0], param=joined_paths([o.param for o in origins]), why=f"bucket of {len(members)}: {origins[0].why}"
    )
    w.meta = {"origin": joint}
    parts = pack(w, members, operands)
    for part, origin in zip(parts, origins, strict=True):
        part.meta["origin"] = origin
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
