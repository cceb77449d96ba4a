"""Real text that every installation carries: the Python source files of the standard library, as bytes.

Token ids 0 to 255 are bytes; 256 begins each document.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from functitan.errors import ConfigError

#: The ids below this are bytes.
BYTES = 256
#: The id that begins a document.
SEPARATOR = 256
# Installed packages differ between machines, and test files are not text that one would want to learn.
_SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


@dataclass(frozen=True)
class Corpus:
    """Two streams of tokens, each a sequence of documents.

    Attributes:
        train, valid: 1-D int16 tensors; every document is a separator and its bytes.
        train_files, valid_files: the relative paths, in the order of the streams.
    """

    train: torch.Tensor
    valid: torch.Tensor
    train_files: tuple[str, ...]
    valid_files: tuple[str, ...]


def standard_library() -> Path:
    """The folder of the running Python's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def source_files(root: Path) -> list[str]:
    """The .py files below ``root`` as sorted relative paths, without installed packages and tests."""
    found = (path.relative_to(root) for path in root.rglob("*.py"))
    return sorted(path.as_posix() for path in found if not _SKIPPED & set(path.parts[:-1]))


def is_held_out(path: str, one_in: int = 20) -> bool:
    """Whether a file is for validation, by a hash of its relative path.

    The decision concerns the file alone: adding or removing other files moves nothing between the sets.

    >>> sum(is_held_out(f"pkg/file{i}.py") for i in range(2000))
    93
    """
    return int.from_bytes(hashlib.blake2b(path.encode(), digest_size=8).digest(), "big") % one_in == 0


def encode(text: bytes | str) -> torch.Tensor:
    """Bytes (a string as UTF-8) as 1-D int16 ids.

    >>> encode("ab")
    tensor([97, 98], dtype=torch.int16)
    """
    raw = text.encode() if isinstance(text, str) else text
    return torch.from_numpy(np.frombuffer(raw, dtype=np.uint8).astype(np.int16))


def decode(ids: Iterable[int]) -> str:
    """Ids as text: invalid UTF-8 becomes the replacement character, other ids than bytes are left out.

    >>> decode([256, 104, 105])
    'hi'
    """
    return bytes(i for i in ids if 0 <= i < BYTES).decode("utf-8", errors="replace")


def blank_corpus(tokens: int) -> Corpus:
    """A corpus of zeros, where only the shapes of batches matter.

    >>> len(blank_corpus(5).train)
    5
    """
    stream = torch.zeros(tokens, dtype=torch.int16)
    return Corpus(stream, stream, (), ())


def load_corpus(root: Path | None = None, one_in: int = 20) -> Corpus:
    """Read the corpus into memory.

    Args:
        root: a folder of .py files; by default the standard library.
        one_in: one file in so many is held out.

    Raises:
        ConfigError: one of the sets has no text.
    """
    root = standard_library() if root is None else root
    streams: dict[bool, list[torch.Tensor]] = {False: [], True: []}
    names: dict[bool, list[str]] = {False: [], True: []}
    separator = torch.tensor([SEPARATOR], dtype=torch.int16)
    for name in source_files(root):
        held_out = is_held_out(name, one_in)
        names[held_out].append(name)
        streams[held_out] += [separator, encode((root / name).read_bytes())]
    for held_out, purpose in ((False, "training"), (True, "validation")):
        if not streams[held_out]:
            found = len(names[False]) + len(names[True])
            raise ConfigError(
                f"the corpus needs .py files for {purpose}; {root} has {found} .py files, of which "
                f"{len(names[held_out])} are for {purpose} (one in {one_in} is held out). "
                "Point it at a folder with more files."
            )
    return Corpus(torch.cat(streams[False]), torch.cat(streams[True]), tuple(names[False]), tuple(names[True]))
