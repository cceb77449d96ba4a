"""Runs a module of this folder as several processes of one machine, with a wall limit and no orphans."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def free_port() -> int:
    """A TCP port that nothing listens on now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run_ranks(n: int, module: str, *arguments: str, limit: float = 240.0, transport: str = "auto") -> list[str]:
    """Run ``python -m MODULE ARGUMENTS`` as ranks 0 to n - 1; their outputs in rank order.

    All are ended when one fails or the limit is over; that is an AssertionError with the output of the one that failed.
    """
    base = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(n),
        "OMP_NUM_THREADS": "1",
        "FUNCTITAN_TIMEOUT": str(limit),
        "FUNCTITAN_TRANSPORT": transport,
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=ROOT,
            env={**base, "RANK": str(r), "LOCAL_RANK": str(r)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for r in range(n)
    ]
    end = time.monotonic() + limit
    try:
        while any(p.poll() is None for p in ranks):
            failed = [r for r, p in enumerate(ranks) if p.poll() not in (None, 0)]
            if failed:
                raise AssertionError(f"rank {failed[0]} failed:\n{ranks[failed[0]].communicate()[0]}")
            if time.monotonic() > end:
                raise AssertionError(f"{module} did not end within {limit} s")
            time.sleep(0.05)
        outputs = [p.communicate()[0] for p in ranks]
    finally:
        for p in ranks:
            if p.poll() is None:
                os.killpg(p.pid, signal.SIGKILL)
                p.wait()
    for r, p in enumerate(ranks):
        assert p.returncode == 0, f"rank {r} failed:\n{outputs[r]}"
    return outputs
