"""A peer as processes that are started, told to take steps, and ended."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Case:
    """One way to train the model.

    Attributes:
        name: shown.
        module: the peer's module in this package.
        options: its arguments.
        python: its interpreter.
        processes: how many, one per rank; they share the cores.
    """

    name: str
    module: str
    options: tuple[str, ...] = ()
    python: str = sys.executable
    processes: int = 1


class PeerError(RuntimeError):
    """A peer ended before it had answered."""


@dataclass
class Running:
    """A case at work; its first step is done.

    Attributes:
        ready: what it said of its first step.
        turns: what it said of each of its turns.
    """

    case: Case
    processes: list[subprocess.Popen[str]]
    log: Any
    ready: dict[str, Any] = field(default_factory=dict)
    turns: list[dict[str, Any]] = field(default_factory=list)

    def steps(self, count: int) -> None:
        """Take some steps; all ranks do, and rank 0 says how long they took."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(f"{count}\n")
            process.stdin.flush()
        self.turns.append(self.answer("STEPS"))

    def answer(self, word: str) -> dict[str, Any]:
        """The next answer: rank 0's times, and the CPU time of all ranks."""
        said = [self._line(process, word) for process in self.processes]
        found = said[0]
        for other in said[1:]:
            for name in ("first_cpu", "cpus"):
                if name in found:
                    found[name] = _sum(found[name], other[name])
        return found

    def _line(self, process: subprocess.Popen[str], word: str) -> dict[str, Any]:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(word + " "):
                return json.loads(line.removeprefix(word + " "))
        self.log.seek(0)
        raise PeerError(f"{self.case.name} ended with {process.wait()}:\n{self.log.read()[-2000:]}")

    def close(self) -> None:
        """End its processes."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self.processes:
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:  # a rank that waits for one that failed
                process.kill()
                process.wait()
        self.log.close()


def start(case: Case, cache: Path, sizes: Sequence[str], cores: int) -> Running:
    """Start a case with its compile caches in a folder, and wait for its first step.

    Raises:
        PeerError: it failed; with the end of what it wrote.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed with the processes)
    shared = {
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": str(max(1, cores // case.processes)),
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
    }
    processes: list[subprocess.Popen[str]] = []
    for rank in range(case.processes):
        ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(case.processes)}
        place = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        processes.append(
            subprocess.Popen(
                [case.python, "-m", f"benchmarks.peers.{case.module}", *case.options, *sizes],
                cwd=ROOT,
                env=os.environ | shared | (ranks | place if case.processes > 1 else {}),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        )
    running = Running(case, processes, log)
    try:
        running.ready = running.answer("READY")
    except PeerError:
        running.close()
        raise
    return running


def _sum(a: Any, b: Any) -> Any:
    return [x + y for x, y in zip(a, b, strict=True)] if isinstance(a, list) else a + b
