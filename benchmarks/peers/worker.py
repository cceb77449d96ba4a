"""The side of a peer: takes its first step, then waits to be told to take more, so that peers can take turns.

A peer prints ``READY {json}`` after its first step, and for every line ``N`` on its standard input takes N steps and
prints ``STEPS {json}``; it ends when its input does.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from typing import Any


def serve(step: Callable[[int], float], begun: float, **facts: Any) -> None:
    """Run a peer.

    Args:
        step: takes the step of that number and returns its loss when all its work is done.
        begun: ``time.perf_counter()`` where the clock of the first step starts: after imports, weights and tokens.
        facts: what to report beside.
    """
    cpu = _cpu()
    losses = [step(0)]
    _say("READY", first=time.perf_counter() - begun, first_cpu=_cpu() - cpu, loss=losses[0], **facts)
    number = 1
    for line in sys.stdin:
        walls, cpus, losses = [], [], []
        for _ in range(int(line)):
            wall, cpu = time.perf_counter(), _cpu()
            losses.append(step(number))
            walls.append(time.perf_counter() - wall)
            cpus.append(_cpu() - cpu)
            number += 1
        _say("STEPS", walls=walls, cpus=cpus, losses=losses, rss=_rss())


def _cpu() -> float:
    """CPU seconds of this process and of those it waited for, such as compilers."""
    return sum(
        u.ru_utime + u.ru_stime for u in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def _rss() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _say(word: str, **facts: Any) -> None:
    print(word, json.dumps(facts), flush=True)
