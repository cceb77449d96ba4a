"""Plain text tables: aligned columns that fit a terminal."""

from __future__ import annotations

import shutil
from collections.abc import Sequence


def columns(rows: Sequence[Sequence[object]], *, right: Sequence[int] = (), width: int = 100, gap: str = "  ") -> str:
    """Rows of cells as aligned text.

    Args:
        rows: cells by row; a row may be shorter than others.
        right: the columns that are aligned to the right: numbers.
        width: longer lines lose the end of their last cell.
        gap: between columns.

    >>> print(columns([("axis", "bytes"), ("data", 8), ("tensor", 1024)], right=[1]))
    axis    bytes
    data        8
    tensor   1024
    """
    cells = [[str(c) for c in row] for row in rows]
    count = max((len(row) for row in cells), default=0)
    widths = [max((len(row[i]) for row in cells if i < len(row)), default=0) for i in range(count)]
    lines = []
    for row in cells:
        parts = [c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=False))]
        lines.append(shortened(gap.join(parts).rstrip(), width))
    return "\n".join(lines)


def shortened(text: str, width: int) -> str:
    """A text of at most ``width`` characters; three dots stand for what is left out.

    >>> shortened("all_gather of params", 12)
    'all_gathe...'
    """
    return text if len(text) <= width else text[: max(width - 3, 0)] + "..."


def terminal_width() -> int:
    """The width for tables whose last column may be cut: the terminal's, at least 100 characters."""
    return max(shutil.get_terminal_size((100, 24)).columns, 100)


def human_bytes(nbytes: float) -> str:
    """Bytes for people, in powers of 1024.

    >>> human_bytes(3 * 2**20), human_bytes(0), human_bytes(2**50)
    ('3.0 MiB', '0 B', '1024.0 TiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def human_count(n: float) -> str:
    """A large number for people, in powers of 1000.

    >>> human_count(8_030_261_248), human_count(812), human_count(3.2e18)
    ('8.03 G', '812', '3.20 E')
    """
    if abs(n) < 1000:
        return f"{n:.0f}"
    for unit in ("K", "M", "G", "T", "P"):
        n /= 1000
        if abs(n) < 1000:
            return f"{n:.2f} {unit}"
    return f"{n / 1000:.2f} E"


def human_seconds(seconds: float) -> str:
    """A duration for people.

    >>> human_seconds(2.5), human_seconds(0.0123), human_seconds(4e-6), human_seconds(0)
    ('2.50 s', '12.30 ms', '4.00 us', '0 s')
    """
    if seconds == 0:
        return "0 s"
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.2f} {unit}"
    return f"{seconds * 1e6:.2f} us"
