"""Pack small reductions into one collective: a loss and a norm, the gradients of a layer's norms.

A small collective costs its start, not its bytes. Reductions of one graph over the same axes, with the same operation
and dtype, of which none depends on another, become one.

The packed collective stands where its last operand is made, and only what is small may wait for it: a reduction joins
others only if no other op needs one of the results before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from functitan.compiler import nodes
from functitan.compiler.body_calls import BODY_CALLS
from functitan.compiler.emit import Origin
from functitan.compiler.passes.fuse import Writer, fuse, wait_of
from functitan.compiler.passes.pack import joined_paths, pack
from functitan.compiler.passes.settings import Passes
from functitan.compiler.program import Program
from functitan.compiler.reshard import Move
from functitan.compiler.text import body_names, place_name

_c10d = torch.ops._c10d_functional
_ALL_REDUCE = _c10d.all_reduce.default
_SCATTER = _c10d.reduce_scatter_tensor.default


def join_reductions(program: Program, settings: Passes) -> tuple[Program, list[str]]:
    """The program with small reductions packed, graph by graph; see this module."""
    names = body_names(program)
    changes: list[str] = []

    def changed(where: str, graph: fx.Graph) -> fx.Graph:
        groups = [g.members for g in _groups(list(graph.nodes), settings.join_bytes) if len(g.members) > 1]
        changes.extend(_sentence(place_name(where, names), group) for group in groups)
        return fuse(graph, groups, _join) if groups else graph

    step = changed("step", program.graph)
    bodies = {name: body.with_graphs(changed) for name, body in program.bodies.items()}
    return replace(program, graph=step, bodies=bodies), changes


@dataclass(eq=False)
class _Group:
    """Reductions that become one.

    Attributes:
        members: in program order.
        place: the place of the last op that they wait for.
        need: the place of the first op that must not wait and needs a result.
        reads: the groups that an operand depends on, as a bit mask.
    """

    members: list[fx.Node]
    place: int
    need: float
    reads: int


def _sentence(where: str, group: Sequence[fx.Node]) -> str:
    move: Move = group[0].meta["collective"]
    return f"{where}: {len(group)} {move.kind} {'+'.join(move.axes)} as one: {_reasons(group)}"


def _groups(order: list[fx.Node], limit: int) -> list[_Group]:
    """The reductions that may become one, first fit in program order."""
    place = {node: i for i, node in enumerate(order)}
    first = sum(node.op == "placeholder" for node in order) - 1
    need = _needs(place, limit)
    groups: list[_Group] = []
    alike: dict[Any, list[int]] = {}
    behind: dict[fx.Node, int] = {}  # the groups that a value depends on
    for node in order:
        mask = 0
        for used in node.all_input_nodes:
            mask |= behind[used]
        if _is_small_reduction(node, limit):
            operand: fx.Node = nodes.args(node)[0]
            before = _closure(mask, groups)
            at = max([first, place[operand], *(g.place for k, g in enumerate(groups) if before >> k & 1)])
            made = _Group([node], at, need[node], mask)
            candidates = alike.setdefault((node.target, node.args[1:], operand.meta["val"].dtype), [])
            k = next((k for k in candidates if not before >> k & 1 and _fits(made, k, groups)), len(groups))
            if k == len(groups):
                groups.append(made)
                candidates.append(k)
            else:
                _add(made, k, groups)
            mask |= 1 << k
        behind[node] = mask
    return groups


def _closure(mask: int, groups: list[_Group]) -> int:
    """All groups that these groups depend on, themselves included."""
    found, rest = 0, mask
    while rest:
        k = rest.bit_length() - 1
        found |= 1 << k
        rest = (rest | groups[k].reads) & ~found
    return found


def _with_dependents(k: int, groups: list[_Group]) -> list[_Group]:
    """A group and those that wait for it."""
    return [g for i, g in enumerate(groups) if i == k or _closure(g.reads, groups) >> k & 1]


def _fits(made: _Group, k: int, groups: list[_Group]) -> bool:
    """Whether nothing that must not wait would wait, if a reduction joined a group."""
    at = max(made.place, groups[k].place)
    return made.need > at and all(g.need > at for g in _with_dependents(k, groups))


def _add(made: _Group, k: int, groups: list[_Group]) -> None:
    group = groups[k]
    at = max(made.place, group.place)
    group.members += made.members
    group.need, group.reads = min(group.need, made.need), group.reads | made.reads
    for late in _with_dependents(k, groups):
        late.place = max(late.place, at)


def _needs(place: dict[fx.Node, int], limit: int) -> dict[fx.Node, float]:
    """The place of the first op that needs a value and must not wait."""
    need: dict[fx.Node, float] = {}
    for node in reversed(place):
        users = [need[u] if _may_move(u, limit) else place[u] for u in node.users if u.op != "output"]
        need[node] = min(users, default=math.inf)
    return need


def _may_move(node: fx.Node, limit: int) -> bool:
    """Whether a call may wait without holding anything large, or anyone up: it reads and gives small values."""
    if "collective" in node.meta:
        return _is_small_reduction(node, limit)
    if node.op != "call_function" or node.target in BODY_CALLS or nodes.has_effect(node):
        return False
    return all(_nbytes(n) <= limit for n in (node, *node.all_input_nodes))


def _is_small_reduction(node: fx.Node, limit: int) -> bool:
    if node.target not in (_ALL_REDUCE, _SCATTER) or "collective" not in node.meta:
        return False
    return _nbytes(nodes.args(node)[0]) <= limit and wait_of(node) is not None


def _nbytes(node: fx.Node) -> float:
    val = node.meta.get("val")
    return val.numel() * val.dtype.itemsize if isinstance(val, torch.Tensor) else math.inf


def _join(w: Writer, members: Sequence[fx.Node], operands: Sequence[fx.Node]) -> list[fx.Node]:
    origins: list[Origin] = [m.meta["origin"] for m in members]
    paths = [o.param for o in origins]
    joint = replace(
        origins[0],
        param=joined_paths(paths) if all(paths) else "",
        why=f"{len(members)} joined: {_reasons(members)}",
        backward=all(o.backward for o in origins),
    )
    w.meta = {"origin": joint}
    parts = pack(w, members, operands)
    for part, member in zip(parts, members, strict=True):
        wait = wait_of(member)
        assert wait is not None
        part.meta = {**wait.meta, "val": part.meta["val"]}
    return parts


def _reasons(members: Sequence[fx.Node]) -> str:
    """What became one, in words."""
    rows = []
    for member in members:
        origin: Origin = member.meta["origin"]
        rows.append(origin.why if origin.param or origin.line is None else f"{origin.why} ({origin.line})")
    return "; ".join(rows)
