"""Time one training step, and the way to the first one, of functitan beside its peers.

python -m benchmarks.peers

All start from the same weights and read the same tokens, so that their losses must agree. After its first step every
peer waits and takes steps when it is its turn: rounds interleave the peers, and a drift of the machine meets all.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.measure import machine
from benchmarks.peers.cases import Case, PeerError, Running, start
from benchmarks.peers.sizes import Sizes

OURS = Case("functitan", "functitan_llama")
TORCH = [
    Case("torch, blocks compiled", "torch_llama", ("--compile", "block")),
    Case("torch, whole compiled", "torch_llama", ("--compile", "whole")),
]
PROCESSES = [
    Case("functitan, fsdp=2", "functitan_llama", ("--mesh", "fsdp=2"), processes=2),
    Case("functitan, tensor=2", "functitan_llama", ("--mesh", "tensor=2"), processes=2),
]
#: Steps of which losses are compared; the float32 rounding of updates grows from step to step.
COMPARED = 5


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6, help="turns that every peer takes")
    parser.add_argument("--steps", type=int, default=4, help="steps of a turn")
    parser.add_argument("--cores", type=int, default=2, help="threads, shared by the processes of a case")
    parser.add_argument("--jax", metavar="PYTHON", help="an interpreter that has jax and optax")
    parser.add_argument("--processes", action="store_true", help="also functitan on two processes, fsdp=2 and tensor=2")
    parser.add_argument("--no-starts", action="store_true", help="step times only: skip warm starts and 24 layers")
    return parser.parse_args()


def main() -> None:
    found = arguments()
    cases = [OURS, *TORCH]
    if found.jax:
        cases.append(Case("jax", "jax_llama", python=found.jax))
    else:
        print("not run: jax, which --jax PYTHON adds", file=sys.stderr)
    if found.processes:
        cases += PROCESSES
    print(machine(found.cores))
    caches = Path(tempfile.mkdtemp(prefix="functitan-peers-"))
    running: list[Running] = []
    try:
        for case in cases:
            running.append(start(case, caches / case.name.replace(" ", "-"), (), found.cores))
        for turn in range(found.rounds + 1):  # the first warms up
            for one in running:
                one.steps(found.steps)
            print(f"round {turn} of {found.rounds}", file=sys.stderr)
        print(step_table(running, found.cores))
        if not found.no_starts:
            print(first_step_table(running, caches, found.cores))
    except PeerError as error:
        sys.exit(str(error))
    finally:
        for one in running:
            one.close()
        shutil.rmtree(caches, ignore_errors=True)


def step_table(running: list[Running], cores: int) -> str:
    """Seconds of a step, and what they are of functitan's and of the time of its matmuls alone."""
    floor = matmul_seconds(Sizes(), cores)
    ours = running[0]
    rows = [
        "",
        "a step",
        f"{'':<26}{'wall':>8}{'fastest':>9}{'CPU':>8}{'ours / it':>11}{'over matmuls':>14}{'loss gap':>10}",
    ]
    for one in running:
        walls = [w for turn in one.turns[1:] for w in turn["walls"]]
        cpus = [c for turn in one.turns[1:] for c in turn["cpus"]]
        # Round by round, so that what slows the machine meets both sides of a ratio.
        ratio = statistics.median(
            statistics.median(a["walls"]) / statistics.median(b["walls"])
            for a, b in zip(ours.turns[1:], one.turns[1:], strict=True)
        )
        gap = max(abs(a - b) for a, b in zip(losses(ours)[:COMPARED], losses(one)[:COMPARED], strict=True))
        wall = statistics.median(walls)
        rows.append(
            f"{one.case.name:<26}{wall:>7.3f}s{min(walls):>8.3f}s{statistics.median(cpus):>7.2f}s"
            f"{ratio:>11.2f}{wall / floor:>14.2f}{gap:>10.0e}"
        )
    rows.append(f"{'matmuls alone':<26}{floor:>7.3f}s   {Sizes().flops() / 1e9:.0f} GFLOP a step with attention")
    return "\n".join(rows)


def losses(one: Running) -> list[float]:
    return [one.ready["loss"], *(loss for turn in one.turns for loss in turn["losses"])]


def first_step_table(running: list[Running], caches: Path, cores: int) -> str:
    """Seconds from the first call to its result, imports done, by what is in the compile caches."""
    rows = ["", "to the first step", f"{'':<26}{'wall':>8}{'CPU':>8}{'ours / it':>11}"]
    cold = running[0].ready["first"]

    def row(name: str, ready: dict[str, float], ratio: float) -> None:
        rows.append(f"{name:<26}{ready['first']:>7.1f}s{ready['first_cpu']:>7.1f}s{ratio:>11.2f}")

    for one in running:
        row(one.case.name, one.ready, cold / one.ready["first"])
    warm = once(OURS, caches / OURS.name, (), cores)
    deep = once(OURS, caches / "deep", ("--layers", "24"), cores)
    rows += ["", f"{'':<26}{'wall':>8}{'CPU':>8}{'over cold':>11}"]
    row("functitan, caches kept", warm, warm["first"] / cold)
    row("functitan, 24 layers", deep, deep["first"] / cold)
    return "\n".join(rows)


def once(case: Case, cache: Path, sizes: tuple[str, ...], cores: int) -> dict[str, float]:
    one = start(case, cache, sizes, cores)
    one.close()
    return one.ready


def matmul_seconds(s: Sizes, threads: int) -> float:
    """The time of a step's matmuls by themselves: forward, and two of the same size backward."""
    torch.set_num_threads(threads)
    total = 0.0
    for m, k, n, times in s.matmuls():
        x, w, g = torch.randn(m, k), torch.randn(k, n), torch.randn(m, n)
        for a, b in ((x, w), (g, w.mT), (x.mT, g)):
            seconds = []
            for _ in range(8):
                begun = time.perf_counter()
                a @ b
                seconds.append(time.perf_counter() - begun)
            total += times * statistics.median(seconds)
    return total


if __name__ == "__main__":
    main()
