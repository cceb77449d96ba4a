"""What a pass changed: counts before and after, and a sentence for each change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from functitan.columns import columns, human_bytes, terminal_width

if TYPE_CHECKING:
    from functitan.compiler.program import Program


@dataclass(frozen=True)
class Counts:
    """The size of a program.

    Attributes:
        collectives: how many collectives a step runs.
        sent: bytes that a rank sends in a step.
        nodes: calls in all graphs, each body counted once.
    """

    collectives: int
    sent: int
    nodes: int

    @staticmethod
    def of(program: Program) -> Counts:
        """The counts of a program."""
        found = program.collectives()
        return Counts(found.runs, found.total, program.nodes())


@dataclass(frozen=True)
class PassRecord:
    """What one pass did to a program.

    Attributes:
        name: the pass, as in :class:`functitan.Passes`.
        on: whether it ran.
        before, after: the program's counts; equal when it did not run or changed nothing.
        changes: a sentence for each change.
    """

    name: str
    on: bool
    before: Counts
    after: Counts
    changes: tuple[str, ...] = ()


def passes_text(records: Sequence[PassRecord], width: int | None = None) -> str:
    """A table of all passes in the order in which they ran, and below it what each changed.

    >>> same = Counts(4, 2048, 100)
    >>> print(passes_text([PassRecord("a", True, same, Counts(3, 2048, 98), ("step: two became one",))], 80))
    pass  collectives  sent                nodes      changes
    a     4 -> 3       2.0 KiB -> 2.0 KiB  100 -> 98        1
    <BLANKLINE>
    a
      step: two became one
    """
    if not records:
        return "no passes"
    rows: list[tuple[object, ...]] = [("pass", "collectives", "sent", "nodes", "changes")]
    for r in records:
        pairs = (
            (r.before.collectives, r.after.collectives),
            (human_bytes(r.before.sent), human_bytes(r.after.sent)),
            (r.before.nodes, r.after.nodes),
        )
        cells = [f"{was} -> {now}" for was, now in pairs]
        rows.append((r.name, *cells, len(r.changes)) if r.on else (r.name, "off"))
    parts = [columns(rows, right=(4,), width=terminal_width() if width is None else width)]
    parts += ["\n".join([r.name, *(f"  {text}" for text in r.changes)]) for r in records if r.changes]
    return "\n\n".join(parts)
