"""Files that are whole or absent: written beside their place, then renamed into it."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path


def write_whole(path: Path, write: Callable[[Path], None]) -> None:
    """Call ``write`` on a temporary path in the folder of ``path``, then rename; a failed write leaves
    nothing.

    Args:
        path: the final place; its folder is made.
        write: writes the file at the path that it is given.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    temporary = Path(name)
    try:
        write(temporary)
        # mkstemp makes a private file; the final one has the permissions that the user's umask gives.
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o666 & ~mask)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        raise


def write_text(path: Path, text: str) -> None:
    """Write a text file whole."""

    def write(temporary: Path) -> None:
        temporary.write_text(text, encoding="utf-8")

    write_whole(path, write)
