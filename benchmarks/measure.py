"""Interleaved timing: cases take turns, so that a drift of the machine meets all of them."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping

import torch


def interleaved(cases: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of every case in every round, after one round that is not counted."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(rounds + 1):
        for name, run in cases.items():
            start = time.perf_counter()
            run()
            if number:
                times[name].append(time.perf_counter() - start)
    return times


def machine(threads: int | None = None) -> str:
    """What the figures belong to; by default with the threads of this process."""
    return (
        f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}, "
        f"{threads or torch.get_num_threads()} threads"
    )


def table(times: Mapping[str, list[float]]) -> str:
    """Minimum, median and maximum of every case."""
    width = max(len(n) for n in times)
    rows = [f"{'':<{width}}   {'min':>8} {'median':>8} {'max':>8}"]
    for name, t in times.items():
        rows.append(f"{name:<{width}}   {min(t):>7.2f}s {statistics.median(t):>7.2f}s {max(t):>7.2f}s")
    return "\n".join(rows)


def ratio(times: Mapping[str, list[float]], over: str, under: str) -> float:
    """The median of the ratios round by round."""
    return statistics.median(a / b for a, b in zip(times[over], times[under], strict=True))
