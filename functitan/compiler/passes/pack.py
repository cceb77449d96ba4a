"""Several collectives of one kind as one: their operands side by side in a flat buffer, and the results cut out of it.

The same bytes are sent, and every element is summed over the same ranks. On a simulated mesh the bits are the same; a
ring of processes adds the ranks in an order that depends on where in its buffer an element lies, and may round
otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import fx

from functitan.compiler import nodes
from functitan.compiler.passes.fuse import Writer, wait_of
from functitan.compiler.reshard import Move
from functitan.sharding.layout import Layout, canonical

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


def pack(w: Writer, members: Sequence[fx.Node], operands: Sequence[fx.Node]) -> list[fx.Node]:
    """One collective for several all-gathers, reduce-scatters or all-reduces; for each, what stands for its result.

    Args:
        w: where calls are appended; they take its ``meta``.
        members: the collectives, of equal targets, arguments and dtypes, each with a wait as its only reader.
        operands: of each, in the graph of ``w``.
    """
    build: dict[str, Callable[..., list[fx.Node]]] = {
        "all_gather": _gather,
        "reduce_scatter": _scatter,
        "all_reduce": _reduce,
    }
    return build[members[0].meta["collective"].kind](w, members, operands)


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
