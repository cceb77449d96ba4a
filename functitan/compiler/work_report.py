"""Who orthogonalises what in a program, and what moves for it: ``functitan lower RECIPE --optim``."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from functitan.columns import columns, human_bytes, human_count
from functitan.compiler.flops import flops
from functitan.sharding.ownership import Plan

if TYPE_CHECKING:
    from functitan.compiler.program import Program

aten = torch.ops.aten
_ORTHOGONALIZE = (torch.ops.functitan.newton_schulz.default, torch.ops.functitan.orthogonalize.default)
#: Calls that only bring a value elsewhere.
_MOVES = (
    aten.reshape.default,
    aten.view.default,
    aten.permute.default,
    aten.transpose.int,
    aten.t.default,
    aten.clone.default,
    aten.cat.default,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.slice.Tensor,
    aten._to_copy.default,
    operator.getitem,
    torch.ops._c10d_functional.wait_tensor.default,
)


def work_text(program: Program) -> str:
    """The plans of a program, then the matrices that every rank works on alike.

    Matrices and operations are per rank and step; bytes are what a rank gets from others.
    """
    parts = [plan_text(plan, program.mesh.size) for plan in program.plans()]
    alike = [(node, times) for _, node, times in program.calls() if node.target in _ORTHOGONALIZE]
    if alike:
        parts.append(_alike_text(alike, bool(parts)))
    told = [text for _, text in program.choices if "leaves of matrices over" in text or "the Gram form over" in text]
    if told:
        parts.append("\n".join(told))
    return "\n\n".join(parts) or "no rule of the optimizer orthogonalises matrices"


def plan_text(plan: Plan, mesh_ranks: int | None = None) -> str:
    """A plan as tables: what ranks have to do and get, and the buckets.

    >>> from functitan.sharding.ownership import Leaf
    >>> from functitan.sharding.planner import plan
    >>> rows = [Leaf("up", 3, (4, 6), ("fsdp",), (), (), 2560), Leaf("q", 1, (4, 4), ("fsdp",), (), (), 1920)]
    >>> print(plan_text(plan(rows, {"fsdp": 2}, itemsize=2, bucket_bytes=1 << 20)))
    owned over fsdp=2: 4 matrices of 2 leaves, plan 7cde6e69f3ad96d0
    most over mean operations 1.067, lower bound 1.067
    <BLANKLINE>
    per rank      least    mean    most
    matrices          2     2.0       2
    operations   4.48 K  4.80 K  5.12 K
    received in    40 B    44 B    48 B
    back           40 B    44 B    48 B
    <BLANKLINE>
    stage  over  groups  matrices of each  a rank's parts
    0      fsdp       1                 4            88 B
    """
    over = ", ".join(f"{a}={n}" for a, n in plan.sizes)
    count = sum(plan.matrices())
    again = (mesh_ranks or plan.ranks) // plan.ranks
    head = [
        f"owned over {over}: {count} matrices of {len(plan.leaves)} leaves, plan {plan.hash}",
        f"most over mean operations {plan.balance:.3f}, lower bound {plan.bound:.3f}",
    ]
    if again > 1:
        head.append(f"each of {again} such groups of ranks has this plan for what it holds")
    rows: list[tuple[object, ...]] = [("per rank", "least", "mean", "most")]
    for what, values, shown in (
        ("matrices", plan.matrices(), lambda x: f"{x:.1f}" if isinstance(x, float) else str(x)),
        ("operations", plan.loads, human_count),
        ("received in", plan.received("in"), human_bytes),
        ("back", plan.received("out"), human_bytes),
    ):
        rows.append((what, shown(min(values)), shown(sum(values) / len(values)), shown(max(values))))
    buckets: list[tuple[object, ...]] = [("stage", "over", "groups", "matrices of each", "a rank's parts")]
    for b in plan.buckets:
        sent = b.sent // math.prod(dict(plan.sizes)[a] for a in b.copies) * plan.itemsize
        buckets.append((b.stage, "+".join(b.axes), len(b.owners), len(b.owners[0]), human_bytes(sent)))
    tables = [columns(rows, right=(1, 2, 3))]
    if plan.buckets:
        tables.append(columns(buckets, right=(2, 3, 4)))
    return "\n\n".join(["\n".join(head), *tables])


def _alike_text(calls: Sequence[tuple[fx.Node, int]], also: bool) -> str:
    """Matrices of which every rank has as many."""
    rows: list[tuple[object, ...]] = [("matrices", "shape", "operations", "received in", "back")]
    totals = [0, 0, 0, 0]
    for node, times in calls:
        shape = _operand(node).meta["val"].shape
        nbytes = [sum(m.nbytes for m in _collectives(node, way)) * times for way in ("in", "out")]
        found = [math.prod(shape[:-2]) * times, flops(node) * times, *nbytes]
        totals = [a + b for a, b in zip(totals, found, strict=True)]
        size = "x".join(map(str, shape[-2:]))
        rows.append((found[0], size, human_count(found[1]), human_bytes(found[2]), human_bytes(found[3])))
    rows.append((totals[0], "all", human_count(totals[1]), human_bytes(totals[2]), human_bytes(totals[3])))
    head = (
        "worked on by every rank alike"
        if also
        else "every rank alike: most over mean operations 1.000, the lower bound"
    )
    return f"{head}\n\n{columns(rows, right=(0, 2, 3, 4))}"


def _operand(node: fx.Node) -> fx.Node:
    return node.all_input_nodes[0]


def _collectives(node: fx.Node, way: str) -> Iterator[Any]:
    """The moves of a value to an op, or of its result from it."""
    seen: set[fx.Node] = set()
    follow = (lambda n: n.all_input_nodes) if way == "in" else (lambda n: list(n.users))
    stack = list(follow(node))
    while stack:
        at = stack.pop()
        if at in seen or (at.target not in _MOVES and "collective" not in at.meta):
            continue
        seen.add(at)
        if "collective" in at.meta:
            yield at.meta["collective"]
        stack.extend(follow(at))
