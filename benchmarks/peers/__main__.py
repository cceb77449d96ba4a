"""Time one training step, and the way to the first one, of functitan beside its peers.

python -m benchmarks.peers
python -m benchmarks.peers --titan PYTHON --cases functitan-fsdp,titan-fsdp

All start from the same weights and read the same tokens, so that their losses must agree. After its first step every
peer waits and takes steps when it is its turn: rounds interleave the peers, and a drift of the machine meets all.
What is printed are the tables of benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.measure import machine
from benchmarks.peers.cases import CASES, Case, PeerError, Running, start
from benchmarks.peers.sizes import Sizes

#: Steps of which losses are compared; the float32 rounding of updates grows from step to step.
COMPARED = 5


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6, help="turns that every peer takes")
    parser.add_argument("--steps", type=int, default=4, help="steps of a turn")
    parser.add_argument("--cores", type=int, default=2, help="threads, shared by the processes of a case")
    parser.add_argument("--jax", metavar="PYTHON", help="an interpreter that has jax and optax")
    parser.add_argument("--titan", metavar="PYTHON", help="an interpreter that has torchtitan 0.3.0 and torch")
    parser.add_argument("--cases", help=f"some of {','.join(CASES)}; by default all that there are interpreters for")
    parser.add_argument("--no-starts", action="store_true", help="step times only: skip warm starts and 24 layers")
    found = parser.parse_args()
    unknown = [name for name in (found.cases or "").split(",") if name and name not in CASES]
    if unknown:
        parser.error(f"there is no case {unknown[0]}; the cases are {', '.join(CASES)}")
    return found


def chosen(found: argparse.Namespace) -> list[Case]:
    """The cases to run, each with its interpreter."""
    pythons = {"functitan": sys.executable, "torch": sys.executable, "jax": found.jax, "titan": found.titan}
    wanted = found.cases.split(",") if found.cases else CASES
    cases = [replace(CASES[name], python=pythons[CASES[name].project]) for name in wanted]
    for project in dict.fromkeys(case.project for case in cases if not case.python):
        print(f"not run: {project}, which --{project} PYTHON adds")
    cases = [case for case in cases if case.python]
    if not cases:
        sys.exit("no case is left to run")
    return cases


def main() -> None:
    found = arguments()
    cases = chosen(found)
    print(machine(found.cores))
    caches = Path(tempfile.mkdtemp(prefix="functitan-peers-"))
    running: list[Running] = []
    try:
        for case in cases:
            running.append(start(case, caches / case.name, (), found.cores))
        for turn in range(found.rounds + 1):  # the first warms up
            for one in running:
                one.steps(found.steps)
            print(f"round {turn} of {found.rounds}", file=sys.stderr)
        print("; ".join(dict.fromkeys(f"{one.case.project} {one.ready['version']}" for one in running)))
        print(step_table(running, found.cores))
        print(first_step_table(running))
        if cases[0].name == "functitan" and not found.no_starts:
            print("\n".join(later_starts(running[0], caches, found.cores)))
    except PeerError as error:
        sys.exit(str(error))
    finally:
        for one in running:
            one.close()
        shutil.rmtree(caches, ignore_errors=True)


def step_table(running: list[Running], cores: int) -> str:
    """Seconds of a step, and what they are of functitan's and of the time of its matmuls alone."""
    floor = matmul_seconds(Sizes(), cores)
    by_name = {one.case.name: one for one in running}
    rows = [
        "",
        f"| a step ({cores} cores) | wall, median | fastest | CPU | ours over it | over its matmuls alone | loss gap |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in running:
        walls = [w for turn in one.turns[1:] for w in turn["walls"]]
        cpus = [c for turn in one.turns[1:] for c in turn["cpus"]]
        ours = by_name.get(one.case.against)
        ratio = ""
        if ours is not None:
            # Round by round, so that what slows the machine meets both sides of a ratio.
            turns = zip(ours.turns[1:], one.turns[1:], strict=True)
            over = statistics.median(statistics.median(a["walls"]) / statistics.median(b["walls"]) for a, b in turns)
            ratio = with_goal(over, one.case.goal)
        gap = max(abs(a - b) for a, b in zip(losses(running[0])[:COMPARED], losses(one)[:COMPARED], strict=True))
        wall = statistics.median(walls)
        rows.append(
            f"| {one.case.title} | {wall:.3f} s | {min(walls):.3f} s | {statistics.median(cpus):.2f} s | {ratio} "
            f"| {wall / floor:.2f} | {gap:.0e} |"
        )
    rows.append(f"\nmatmuls alone {floor:.3f} s; {Sizes().flops() / 1e9:.0f} GFLOP a step with attention")
    return "\n".join(rows)


def losses(one: Running) -> list[float]:
    return [one.ready["loss"], *(loss for turn in one.turns for loss in turn["losses"])]


def first_step_table(running: list[Running]) -> str:
    """Seconds from the first call to its result, imports done, with empty compile caches."""
    rows = ["", "| to the first step, optimizer included | wall | CPU | ours over it |", "|---|---|---|---|"]
    first = {one.case.name: one.ready["first"] for one in running}
    for one in running:
        ours = first.get(one.case.against)
        ratio = with_goal(ours / one.ready["first"], one.case.first_goal) if ours else ""
        rows.append(first_row(f"{one.case.title}, cold caches", one.ready, ratio))
    return "\n".join(rows)


def later_starts(cold: Running, caches: Path, cores: int) -> list[str]:
    """Rows of functitan's starts with caches kept, and with more layers."""
    rows = []
    for title, cache, sizes, goal in (
        ("caches kept", cold.case.name, (), 0.25),
        ("24 layers, cold caches", "deep", ("--layers", "24"), 1.15),
    ):
        one = start(cold.case, caches / cache, sizes, cores)
        one.close()
        ratio = with_goal(one.ready["first"] / cold.ready["first"], goal)
        rows.append(first_row(f"{cold.case.title}, {title}", one.ready, f"{ratio} over cold"))
    return rows


def first_row(title: str, ready: dict[str, float], ratio: str) -> str:
    return f"| {title} | {ready['first']:.1f} s | {ready['first_cpu']:.1f} s | {ratio} |"


def with_goal(ratio: float, goal: float | None) -> str:
    """A ratio and what it should be.

    >>> with_goal(0.812, 0.85), with_goal(0.5, None)
    ('0.81 (goal: 0.85)', '0.50')
    """
    return f"{ratio:.2f}" + (f" (goal: {goal})" if goal else "")


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
