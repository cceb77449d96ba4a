"""A program's reports together: one screen of text, and all of it for machines."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from functitan.columns import columns, human_bytes, shortened
from functitan.compiler import collectives
from functitan.compiler.memory import Memory
from functitan.compiler.text import body_names

if TYPE_CHECKING:
    from functitan.compiler.cost import Cost
    from functitan.compiler.program import Program


def summary(program: Program, memory: Memory, cost: Cost | None = None, top: int = 5) -> str:
    """One screen: memory, what is sent, the largest collectives, and with a cost the time."""
    sent = program.collectives()
    names = body_names(program)
    bodies = f", bodies: {', '.join(names.values())}" if names else ""
    head = f"{program.name} on {program.mesh}: {program.nodes()} ops{bodies}"
    state: list[tuple[object, ...]] = [("per rank", "bytes")]
    state += [
        (what, human_bytes(memory[what]))
        for what in ("parameters", "optimizer", "gradients", "saved activations", "gathered parameters")
    ]
    state.append(("peak", human_bytes(memory.peak), f"at {memory.where}"))
    state.append(("sent per step", human_bytes(sent.total), f"in {sent.runs} collectives"))
    parts = [shortened(head, 100), columns(state, right=(1,))]
    if sent:
        parts.append(collectives.table(sent.top(top)))
    if cost is not None:
        parts.append(str(cost))
    notes = _notes(program)
    if notes:
        parts.append("\n".join(notes))
    return "\n\n".join(parts)


def _notes(program: Program) -> Iterable[str]:
    """What a reader should know beside the numbers."""
    notes = []
    if program.unused_rules:
        # The layouts of its arguments, made before, do not tell which rules they came from.
        unused = ", ".join(program.unused_rules)
        notes.append(f"rules that no annotation inside the function names, though those of its arguments may: {unused}")
    if program.choices:
        notes.append(f"settled without being asked ({len(program.choices)}):")
        notes += [shortened(f"  {' '.join(text.split())}", 100) for _, text in program.choices[:5]]
    return notes


def report(program: Program, memory: Memory, cost: Cost | None = None) -> dict[str, Any]:
    """Everything in a form that JSON can hold. Bytes and counts are per rank and step."""
    sent = program.collectives()
    values = lambda paths, layouts, types: [  # noqa: E731
        {
            "path": path,
            "shape": list(typ.shape),
            "dtype": str(typ.dtype).removeprefix("torch."),
            "layout": str(layout),
            "local_shape": list(layout.local_shape),
        }
        for path, layout, typ in zip(paths, layouts, types, strict=True)
    ]
    return {
        "name": program.name,
        "mesh": program.mesh.shape,
        "ranks": program.mesh.size,
        "ops": program.nodes(),
        "bodies": list(body_names(program).values()),
        "memory": memory.to_json(),
        "collectives": sent.to_json(),
        "sent": sent.total,
        "totals": [
            {"kind": kind, "axes": list(axes), "count": count, "bytes": nbytes}
            for (kind, axes), (count, nbytes) in sent.totals().items()
        ],
        "cost": None if cost is None else cost.to_json(),
        "plans": [plan.to_json() for plan in program.plans()],
        "inputs": values(program.inputs, program.in_layouts, program.in_types),
        "outputs": values(program.outputs, program.out_layouts, program.out_types),
        "choices": [{"line": line, "choice": text} for line, text in program.choices],
        "unused_rules": list(program.unused_rules),
    }


def comparison(names: tuple[str, str], reports: tuple[Mapping[str, Any], Mapping[str, Any]]) -> str:
    """Two reports side by side with their differences.

    Args:
        names: what heads each column.
        reports: of :func:`report`.
    """
    rows: list[tuple[object, ...]] = [("per rank and step", *names, "change")]
    a, b = reports
    for what, was in a["memory"]["largest"].items():
        will = b["memory"]["largest"][what]
        if was or will:
            rows.append((what, human_bytes(was), human_bytes(will), change(was, will)))
    rows.append(_bytes_row("peak", a["memory"]["peak"], b["memory"]["peak"]))
    rows.append(_bytes_row("sent", a["sent"], b["sent"]))
    if a["cost"] is not None and b["cost"] is not None:
        from functitan.columns import human_seconds

        rows.append(("fits", *("yes" if r["cost"]["fits"] else "NO" for r in reports)))
        for name in ("compute", "communication", "serial", "overlapped"):
            was, will = a["cost"][name], b["cost"][name]
            rows.append((f"time: {name}", human_seconds(was), human_seconds(will), change(was, will)))
    sent: list[tuple[object, ...]] = [("collective over axes", "count", "count", "sent", "sent", "change")]
    totals = [{(t["kind"], tuple(t["axes"])): (t["count"], t["bytes"]) for t in r["totals"]} for r in reports]
    for key in sorted(totals[0].keys() | totals[1].keys()):
        (n, was), (m, will) = (t.get(key, (0, 0)) for t in totals)
        sent.append((f"{key[0]} {'+'.join(key[1])}", n, m, human_bytes(was), human_bytes(will), change(was, will)))
    return columns(rows, right=(1, 2, 3)) + "\n\n" + columns(sent, right=(1, 2, 3, 4, 5))


def _bytes_row(what: str, was: int, will: int) -> tuple[object, ...]:
    return (what, human_bytes(was), human_bytes(will), change(was, will))


def change(was: float, will: float) -> str:
    """A change for people.

    >>> change(2, 3), change(4, 1), change(1, 1), change(0, 5)
    ('+50%', '-75%', '=', 'new')
    """
    if was == will:
        return "="
    return "new" if not was else f"{100 * (will - was) / was:+.0f}%"


def to_json(program: Program, memory: Memory, cost: Cost | None = None) -> str:
    """:func:`report` as text."""
    return json.dumps(report(program, memory, cost), indent=2)
