"""The exceptions that functitan raises, and the helpers that word them.

A message says three things: what was asked, what was found (with names and numbers), and what to write
instead. Several problems of one kind are collected and raised as one error.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class FunctitanError(Exception):
    """Base of every error that functitan raises on purpose."""


class ShardingError(FunctitanError):
    """A mesh, spec, rule or layout that cannot be what was asked."""


class TraceError(FunctitanError):
    """A function that cannot be traced into one graph."""


class TreeError(FunctitanError):
    """Two pytrees that should match and do not, or a leaf of a wrong kind."""


class ArgumentError(FunctitanError, ValueError):
    """An argument of a function that is of a wrong kind, shape or range."""


class GradientError(FunctitanError, ValueError):
    """A function, or a value, that cannot be differentiated as was asked."""


class NonfiniteError(FunctitanError, ArithmeticError):
    """A gradient that is not finite, where a step was told to stop for one."""


class ConfigError(FunctitanError):
    """A recipe, override or command line that cannot be used."""


def suggest(name: str, known: Iterable[str]) -> str:
    """A sentence that proposes the nearest known name, or an empty string.

    >>> suggest("tensr", ["data", "tensor"])
    ' Did you mean "tensor"?'
    >>> suggest("x", ["data"])
    ''
    """
    near = difflib.get_close_matches(str(name), [str(k) for k in known], n=1, cutoff=0.5)
    return f' Did you mean "{near[0]}"?' if near else ""


def listed(names: Iterable[object]) -> str:
    """Names in a row for a message, "none" when there are none.

    >>> listed(["a", "b"])
    'a, b'
    """
    return ", ".join(str(n) for n in names) or "none"


def raise_batch(kind: type[FunctitanError], problems: Sequence[str], what: str) -> None:
    """Raise one error for all problems; do nothing when there are none.

    A single problem is its own message; several are numbered below a headline that counts them.
    """
    if not problems:
        return
    if len(problems) == 1:
        raise kind(problems[0])
    lines = [f"{len(problems)} problems in {what}:"]
    lines += [f"  {i}. {p}" for i, p in enumerate(problems, 1)]
    raise kind("\n".join(lines))
