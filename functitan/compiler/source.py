"""Where in the user's code an op comes from."""

from __future__ import annotations

import linecache
import os
import sys
from dataclasses import dataclass
from types import CodeType, FrameType, TracebackType

import functitan

_PACKAGE = os.path.dirname(os.path.abspath(functitan.__file__)) + os.sep
#: Parts of the package that count as a user's code; the rest stands between a user's line and torch.
_LIKE_USERS = tuple(_PACKAGE + part + os.sep for part in ("nn", "optim", "train", "recipes", "data"))
_LIBRARIES = tuple(os.sep + name + os.sep for name in ("torch", "optree", "spmd_types", "contextlib.py"))
#: Code typed at a prompt; other names in brackets are code that torch generates.
_TYPED = ("<stdin>", "<python-input", "<ipython-input")
_known: dict[CodeType, bool] = {}


@dataclass(frozen=True)
class SourceLine:
    """A line of user code: file, number, and the function that it is in."""

    file: str
    number: int
    function: str

    @property
    def text(self) -> str:
        """The code of the line."""
        return linecache.getline(self.file, self.number).strip()

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.number}"

    def shown(self) -> str:
        """The place and the code, for messages."""
        return f"{self} ({self.text})" if self.text else str(self)


def _is_user(code: CodeType) -> bool:
    known = _known.get(code)
    if known is None:
        name = code.co_filename
        known = not (
            (name.startswith(_PACKAGE) and not name.startswith(_LIKE_USERS))
            or (name.startswith("<") and not name.startswith(_TYPED))
            or any(lib in name for lib in _LIBRARIES)
            or name.endswith(os.sep + "contextlib.py")
        )
        _known[code] = known
    return known


def current_line() -> SourceLine | None:
    """The nearest line of user code on the stack."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not _is_user(frame.f_code):
        frame = frame.f_back
    if frame is None:
        return None
    return SourceLine(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def line_of(trace: TracebackType | None) -> SourceLine | None:
    """The innermost line of user code in a traceback."""
    found = None
    while trace is not None:
        code = trace.tb_frame.f_code
        if _is_user(code):
            found = SourceLine(code.co_filename, trace.tb_lineno, code.co_name)
        trace = trace.tb_next
    return found


def user_frames(trace: TracebackType | None) -> TracebackType | None:
    """A traceback without the frames of torch and of this package's machinery."""
    kept = []
    while trace is not None:
        if _is_user(trace.tb_frame.f_code):
            kept.append(trace)
        trace = trace.tb_next
    made: TracebackType | None = None
    for t in reversed(kept):
        made = TracebackType(made, t.tb_frame, t.tb_lasti, t.tb_lineno)
    return made


def raised_by_user(trace: TracebackType | None) -> bool:
    """Whether an exception comes from the user's code itself, not from what it called in torch or here."""
    code = None
    while trace is not None:
        code, trace = trace.tb_frame.f_code, trace.tb_next
    return code is not None and _is_user(code)


def at(line: SourceLine | None) -> str:
    """The user's line at the start of a message."""
    return f"{line.shown()}: " if line is not None else ""
