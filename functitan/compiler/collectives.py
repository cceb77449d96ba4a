"""What a program sends: its collectives with count, bytes and reason, as a table."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from functitan.columns import columns, human_bytes, shortened, terminal_width


@dataclass(frozen=True)
class Collective:
    """Collectives of one place in a program, counted over a step.

    Attributes:
        kind, axes: what, over which mesh axes.
        count: how often a step runs it (once per layer inside a scan).
        nbytes: bytes that a rank sends each time.
        dtype: of what is sent.
        shape: local shape of the operand.
        param: the path of the parameter or gradient that is moved, or "".
        line: the user's line, or "".
        backward: whether it belongs to a gradient.
        why: what asked for it.
        where: the body that it is in, or "step".
    """

    kind: str
    axes: tuple[str, ...]
    count: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    param: str
    line: str
    backward: bool
    why: str
    where: str

    @property
    def total(self) -> int:
        """Bytes that a rank sends in a step."""
        return self.count * self.nbytes

    @property
    def subject(self) -> str:
        """What is moved: the parameter, else the line of the value."""
        return self.param or self.line


class Collectives(tuple[Collective, ...]):
    """The collectives of a program, in program order; ``print`` shows them as a table."""

    __slots__ = ()

    @property
    def runs(self) -> int:
        """How many collectives a step runs."""
        return sum(c.count for c in self)

    @property
    def total(self) -> int:
        """Bytes that a rank sends in a step."""
        return sum(c.total for c in self)

    def top(self, n: int) -> Collectives:
        """The ``n`` that send most, largest first."""
        return Collectives(sorted(self, key=lambda c: -c.total)[:n])

    def of(self, **wanted: Any) -> Collectives:
        """Those whose attributes have these values, such as ``of(kind="all_gather", axes=("fsdp",))``."""
        return Collectives(c for c in self if all(getattr(c, k) == v for k, v in wanted.items()))

    def totals(self) -> dict[tuple[str, tuple[str, ...]], tuple[int, int]]:
        """Count and bytes per step by kind and axes."""
        found: dict[tuple[str, tuple[str, ...]], tuple[int, int]] = {}
        for c in self:
            count, nbytes = found.get((c.kind, c.axes), (0, 0))
            found[c.kind, c.axes] = (count + c.count, nbytes + c.total)
        return found

    def to_json(self) -> list[dict[str, Any]]:
        """One dict per collective, in a form that JSON can hold."""
        return [dataclasses.asdict(c) | {"total": c.total} for c in self]

    def __str__(self) -> str:
        if not self:
            return "no collectives: no rank sends anything"
        parts = [table(self)]
        if len(self) > 1:
            parts.append(totals_table(self))
        return "\n\n".join(parts)


_SHORT = {
    "float32": "f32",
    "float64": "f64",
    "bfloat16": "bf16",
    "float16": "f16",
    "int64": "i64",
    "int32": "i32",
}


def short_dtype(dtype: str) -> str:
    """A dtype's name in tables.

    >>> short_dtype("bfloat16"), short_dtype("uint8")
    ('bf16', 'uint8')
    """
    return _SHORT.get(dtype, dtype)


#: A bucket of many parameters leaves room for the reason.
_SUBJECT = 24


def table(rows: Sequence[Collective], width: int | None = None) -> str:
    """One line per collective: kind and axes, count and bytes, sum, pass, what is moved, and why."""
    lines: list[tuple[object, ...]] = [("collective over axes", "count x bytes", "sent", "pass", "of", "why")]
    for c in rows:
        each = f"{c.count} x {human_bytes(c.nbytes)} {short_dtype(c.dtype)}"
        late = "bwd" if c.backward else "fwd"
        why = _shortly(c.why, c.subject)
        subject = shortened(tail(c.subject), _SUBJECT)
        lines.append((f"{c.kind} {'+'.join(c.axes)}", each, human_bytes(c.total), late, subject, why))
    return columns(lines, right=(1, 2), width=terminal_width() if width is None else width)


def totals_table(rows: Collectives) -> str:
    """Count and bytes by kind and axes, largest first, and together."""
    found = sorted(rows.totals().items(), key=lambda item: -item[1][1])
    lines: list[tuple[object, ...]] = [("per rank and step", "count", "sent")]
    lines += [(f"{kind} {'+'.join(axes)}", n, human_bytes(nbytes)) for (kind, axes), (n, nbytes) in found]
    lines.append(("all", rows.runs, human_bytes(rows.total)))
    return columns(lines, right=(1, 2))


def _shortly(why: str, subject: str) -> str:
    """A reason without what the columns beside it say."""
    if subject:
        why = why.replace(f" of {subject}", "")
    for noise in ("aten.", "functitan.", ".Tensor"):
        why = why.replace(noise, "")
    return why


def tail(path: str) -> str:
    """The last two parts of a path: the tree that a parameter is in is the same for all.

    >>> tail("state/params/layers/wq"), tail("model.py:88")
    ('layers/wq', 'model.py:88')
    """
    return "/".join(path.split("/")[-2:])
