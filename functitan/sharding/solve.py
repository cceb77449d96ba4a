"""Solve an equation for given operand layouts: what each operand must look like, and what comes out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from functitan.sharding.layout import Dim, Layout, Unsplittable, canonical, dim_size, split, without
from functitan.sharding.op_rules.base import Call, Conflict, Equation, Label, Solution

#: A scalar that is settled joins a pending sum by standing on one rank only; larger values are not masked.
_MASK_NUMEL = 1


def factors(label: Label, size: int) -> list[tuple[str, int]]:
    """A dim's labels with sizes; "_" for a whole dim; empty for size 1."""
    if label is None:
        return []
    return list(label) if isinstance(label, tuple) else [(label, size)]


def _axes(dim: Dim) -> list[str]:
    return [d for d in dim if isinstance(d, str)]


def _places(dim: Dim, sizes: Mapping[str, int]) -> frozenset[tuple[str, int]]:
    """The axes of a dim, each with its stride: what two layouts of one label must agree on."""
    found, stride = [], 1
    for d in reversed(dim):
        if isinstance(d, str):
            found.append((d, stride))
            stride *= sizes[d]
        else:
            stride *= d
    return frozenset(found)


def solve(eq: Equation, call: Call, layouts: Sequence[Layout | None], sizes: Mapping[str, int]) -> Solution:
    """Choose a split for every label, and decide which pending sums pass.

    Args:
        eq: the rule.
        call: the call, for global sizes.
        layouts: the operands' layouts; None for a value that can be made in any layout.
        sizes: axis sizes of the mesh.

    Returns:
        Layouts for operands and outputs. ``conflicts`` lists what had to be overruled; the larger value keeps its
        layout.
    """
    conflicts: list[Conflict] = []
    given: list[list[list[tuple[str, Dim]]]] = []
    for i, layout in enumerate(layouts):
        given.append(_labelled(eq, call, i, layout, sizes, conflicts))

    chosen = _choose(eq, call, given, layouts, sizes, conflicts)
    operands, passed, masked = _pending(eq, call, layouts, chosen, sizes)
    outputs = []
    for o, (labels, out) in enumerate(zip(eq.outputs, call.outputs, strict=True)):
        dims = tuple(_dim(label, n, chosen) for label, n in zip(labels, out.shape, strict=True))
        kept = {name for label, n in zip(labels, out.shape, strict=True) for name, _ in factors(label, n)}
        kept |= {name for number, name in eq.apart if number == o}
        contracted = {a for name, dim in chosen.items() if name not in kept for a in _axes(dim)}
        pending = passed | contracted
        storage = frozenset().union(
            *(lay.storage for lay in layouts if lay is not None and (eq.through_storage or not lay.active))
        ) & frozenset(a for d in dims for a in _axes(d))
        active = eq.through_storage and any(lay is not None and lay.active for lay in layouts)
        unreduced = layouts[0].unreduced if eq.through_storage and layouts and layouts[0] is not None else frozenset()
        outputs.append(Layout(dims, tuple(a for a in sizes if a in pending), storage, active, unreduced))
    advice = eq.advice(call, layouts) if conflicts and eq.advice is not None else ""
    return Solution(operands, outputs, conflicts, masked, advice)


def _labelled(
    eq: Equation,
    call: Call,
    i: int,
    layout: Layout | None,
    sizes: Mapping[str, int],
    conflicts: list[Conflict],
) -> list[list[tuple[str, Dim]]]:
    """Per dim of an operand its labels with their digits; axes that lie across a join's cut are dropped."""
    if layout is None:
        return []
    rows: list[list[tuple[str, Dim]]] = []
    for label, dim, size in zip(eq.inputs[i], layout.dims, call.operands[i].shape, strict=True):
        parts = factors(label, size)
        while True:
            try:
                digits = split(dim, [n for _, n in parts], sizes)
                break
            except Unsplittable as e:
                conflicts.append(Conflict(f'axis "{e.axis}" lies across the parts of a dim', (i,)))
                dim = without(Layout((dim,)), [e.axis], sizes).dims[0]
        rows.append([(name, d) for (name, _), d in zip(parts, digits, strict=True)])
    return rows


def _choose(
    eq: Equation,
    call: Call,
    given: Sequence[Sequence[Sequence[tuple[str, Dim]]]],
    layouts: Sequence[Layout | None],
    sizes: Mapping[str, int],
    conflicts: list[Conflict],
) -> dict[str, Dim]:
    """The digits of every label: those of the largest operand that splits it, when operands disagree."""

    def weight(i: int) -> int:
        layout = layouts[i]
        assert layout is not None
        if i in eq.refs:  # it only proposes a layout
            return 0
        return math.prod(layout.local_shape) * call.operands[i].dtype.itemsize

    claims: dict[str, list[tuple[Dim, int]]] = {}
    for i, rows in enumerate(given):
        for row in rows:
            for name, dim in row:
                if _axes(dim):
                    claims.setdefault(name, []).append((dim, i))
    for dim, i in claims.pop("_", []):
        conflicts.append(Conflict(f"the op needs a dim whole that is split over {', '.join(_axes(dim))}", (i,)))
    chosen: dict[str, Dim] = {}
    for name, rows in claims.items():
        rows = sorted(rows, key=lambda r: (r[1] not in eq.refs, len(_axes(r[0])), weight(r[1])), reverse=True)
        best, owner = rows[0]
        for dim, i in rows[1:]:
            if i not in eq.refs and not _places(dim, sizes) <= _places(best, sizes):
                conflicts.append(
                    Conflict(
                        f"the same dim is split over {', '.join(_axes(best))} in one operand and over "
                        f"{', '.join(_axes(dim))} in another",
                        (owner, i),
                    )
                )
        chosen[name] = best
    used: dict[str, str] = {}
    owners = {name: max((i for _, i in rows), key=weight) for name, rows in claims.items()}
    for name in sorted(chosen, key=lambda n: weight(owners[n]), reverse=True):
        clash = [a for a in _axes(chosen[name]) if a in used]
        if clash:
            if owners[name] not in eq.refs:
                who = (owners[used[clash[0]]], owners[name])
                conflicts.append(Conflict(f'axis "{clash[0]}" splits two different dims of the op', who))
            chosen[name] = without(Layout((chosen[name],)), clash, sizes).dims[0]
        used.update({a: name for a in _axes(chosen[name])})
    for rows in given:
        for row in rows:
            for name, dim in row:
                if name != "_":
                    chosen.setdefault(name, canonical([dim_size(dim, sizes)]))
    return chosen


def _dim(label: Label, size: int, chosen: Mapping[str, Dim]) -> Dim:
    digits: list[str | int] = []
    for name, n in factors(label, size):
        digits += chosen.get(name, canonical([n])) if name != "_" else canonical([n])
    return canonical(digits)


def _pending(
    eq: Equation,
    call: Call,
    layouts: Sequence[Layout | None],
    chosen: Mapping[str, Dim],
    sizes: Mapping[str, int],
) -> tuple[list[Layout], set[str], frozenset[tuple[int, str]]]:
    """Target layouts of the operands, the pending axes that pass, and settled scalars that join a pending sum."""
    splitting = {a for dim in chosen.values() for a in _axes(dim)}
    holders: dict[str, set[int]] = {}
    for i, layout in enumerate(layouts):
        for a in layout.pending if layout is not None and i not in eq.refs else ():
            holders.setdefault(a, set()).add(i)
    passed: dict[str, frozenset[int]] = {}
    masked: set[tuple[int, str]] = set()
    for axis, who in holders.items():
        if axis in splitting:
            continue
        for group in eq.linear:
            if who <= group:
                missing = group - who - {i for i in call.zeros if layouts[i] is None}  # a zero is a sum of zeros
                if not missing:
                    passed[axis] = group
                elif all(call.operands[i].numel <= _MASK_NUMEL for i in group):
                    passed[axis] = group
                    masked |= {(i, axis) for i in missing}
                if axis in passed:
                    break
    operands = []
    for i, typ in enumerate(call.operands):
        dims = tuple(_dim(label, n, chosen) for label, n in zip(eq.inputs[i], typ.shape, strict=True))
        pending = tuple(a for a in sizes if a in passed and i in passed[a])
        operands.append(Layout(dims, pending))
    return operands, set(passed), frozenset(masked)


def operand_layouts(eq: Equation, call: Call, out: Layout, sizes: Mapping[str, int]) -> list[Layout]:
    """The operands' layouts that give the only output this layout, for an equation that contracts nothing."""
    chosen: dict[str, Dim] = {}
    for label, dim, size in zip(eq.outputs[0], out.dims, call.outputs[0].shape, strict=True):
        parts = factors(label, size)
        for (name, _), digits in zip(parts, split(dim, [n for _, n in parts], sizes), strict=True):
            chosen[name] = digits
    return [
        Layout(tuple(_dim(label, n, chosen) for label, n in zip(eq.inputs[i], typ.shape, strict=True)))
        for i, typ in enumerate(call.operands)
    ]
