"""Errors of tracing, as messages about the user's code.

A traceback through a trace holds more frames of torch and of this package than of the user. What leaves a trace keeps
only the user's frames, and what torch says about fake tensors is said again with the user's line.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

from functitan import _torch
from functitan.compiler import source
from functitan.errors import FunctitanError, TraceError

_T = TypeVar("_T")
_LOCATED = re.compile(r"\w\.py:\d+")


def explained(name: str, run: Callable[[], _T]) -> _T:
    """Run a trace; errors that leave it are about the user's code.

    Args:
        name: of the function that is traced.
        run: the trace.

    Raises:
        FunctitanError: as it was raised, with the user's line in front where it names none.
        TraceError: where torch refuses something.
        Exception: what the user's own code raises, as it is.
    """
    try:
        with _torch.quiet_fake_tensors():
            return run()
    except FunctitanError as e:
        line = source.line_of(e.__traceback__)
        if line is not None and not _LOCATED.search(str(e)):
            e.args = (f"{source.at(line)}{e}", *e.args[1:])
        raise e.with_traceback(source.user_frames(e.__traceback__)) from e.__cause__
    except Exception as e:
        if source.raised_by_user(e.__traceback__):
            raise e.with_traceback(source.user_frames(e.__traceback__))  # noqa: B904 (it is the same exception)
        # The original stays reachable as __context__, for those who debug the tracer.
        raise TraceError(_worded(name, e)) from None


def _worded(name: str, e: Exception) -> str:
    line = source.line_of(e.__traceback__)
    where = line.shown() if line is not None else name
    said = str(e).strip().splitlines()[0].rstrip(".!") if str(e).strip() else type(e).__name__
    if isinstance(e, _torch.DATA_DEPENDENT_ERRORS):
        return (
            f"{where}: {name} needs the value of a tensor here (.item(), bool(tensor), an `if` on a tensor, or a shape "
            "that "
            "depends on data), and it is traced on shapes only. Write torch.where(condition, a, b) for a choice, keep "
            "numbers as 0-d tensors, and return or ft.debug.print what you want to see."
        )
    if "in-place" in said or "inplace" in said:
        return (
            f"{where}: {name} writes into a tensor that it did not make, or that a derivative needs as it is. Compiled "
            f"functions are pure; write the form that returns a new tensor, such as x = x.add(...). (torch: {said})"
        )
    return (
        f"{where}: {name} cannot be traced: torch refuses this line: {said}. "
        "Shapes in a compiled function are those of whole (global) tensors."
    )
