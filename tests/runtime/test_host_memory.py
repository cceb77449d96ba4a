"""Memory that a step frees is there for the next one, counted in page faults."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# Blocks of 64 MiB, which glibc never keeps by itself; functitan keeps them once a program is made ready to run.
SCRIPT = """
import resource, sys
import torch
import functitan as ft

torch.set_num_threads(1)
step = ft.compile(lambda x: (x + 1).sum(), mesh=ft.make_mesh({"data": 1}))
x = torch.ones(1 << 24)
faults = []
for _ in range(40):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    assert step(x).item() == 1 << 25
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(*faults[-10:])
"""


def faults(**environment: str) -> list[int]:
    found = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, env=os.environ | environment
    )
    return [int(n) for n in found.stdout.split()]


@pytest.mark.skipif(sys.platform != "linux", reason="page faults of glibc's allocator")
def test_steps_come_to_take_no_memory_from_the_system() -> None:
    assert max(faults()) < 1000  # of the 16,384 pages of a block


@pytest.mark.skipif(sys.platform != "linux", reason="page faults of glibc's allocator")
def test_what_the_user_has_set_up_stays() -> None:
    assert min(faults(MALLOC_TRIM_THRESHOLD_="131072")) > 16_000
