"""A peer as processes that are started, told to take steps, and ended."""

from __future__ import annotations

import json
import os
import socket
import subprocess
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
        name: by which it is chosen.
        title: shown.
        project: whose it is; other projects than ours and torch have an environment of their own.
        options: arguments of the project's driver.
        processes: how many, one per rank; they share the cores.
        against: the case of ours that does the same.
        goal: for a step of ours over one of this.
        first_goal: likewise for the time to the first step.
        python: its interpreter.
    """

    name: str
    title: str
    project: str
    options: tuple[str, ...] = ()
    processes: int = 1
    against: str = ""
    goal: float | None = None
    first_goal: float | None = None
    python: str = ""


_FSDP, _TENSOR = "two processes, fsdp=2", "two processes, tensor=2 with sequence sharding"
_BLOCKS, _WHOLE = ("--compile", "block"), ("--compile", "whole")
_CASES = [
    Case("functitan", "functitan, inductor", "functitan"),
    Case("torch-blocks", "torch, each block compiled", "torch", _BLOCKS, 1, "functitan", 0.9, 1.0),
    Case("torch-whole", "torch, the whole model compiled", "torch", _WHOLE, 1, "functitan", 0.9, 0.6),
    Case("jax", "JAX, jit", "jax", (), 1, "functitan", 0.55),
    Case("titan", "TorchTitan, compiled", "titan", (), 1, "functitan"),
    Case("functitan-fsdp", f"functitan, {_FSDP}", "functitan", ("--mesh", "fsdp=2"), 2),
    Case("titan-fsdp", f"TorchTitan, {_FSDP}", "titan", (), 2, "functitan-fsdp", 0.85),
    Case("functitan-tensor", f"functitan, {_TENSOR}", "functitan", ("--mesh", "tensor=2"), 2),
    Case("titan-tensor", f"TorchTitan, {_TENSOR}", "titan", ("--parallel", "tensor"), 2, "functitan-tensor", 0.75),
]
#: By name, in the order in which they take turns.
CASES = {case.name: case for case in _CASES}


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
                [case.python, "-m", f"benchmarks.peers.{case.project}_llama", *case.options, *sizes],
                cwd=ROOT,
                env=os.environ | shared | ranks | place,
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
