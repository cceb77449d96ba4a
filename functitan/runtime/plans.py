"""Whether the processes of a job agree on who works on what, asked once before a program runs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from functitan.compiler.program import Program
from functitan.errors import FunctitanError, listed
from functitan.sharding.processes import gather_parts


class PlanMismatch(FunctitanError):
    """Processes made different plans of one program."""


def check_plans(program: Program) -> None:
    """Compare the plans of all processes, if the program has any.

    Raises:
        PlanMismatch: on every process, naming the ranks that differ.
    """
    plans = program.plans()
    if not plans or program.mesh.kind != "process" or program.mesh.size == 1:
        return
    for plan in plans:
        found = gather_parts(torch.tensor([int(plan.hash[:8], 16), int(plan.hash[8:], 16)]))
        compare([f"{int(high):08x}{int(low):08x}" for high, low in found], program.name)


def compare(hashes: Sequence[str], name: str) -> None:
    """Raise an error unless all ranks have one hash.

    >>> compare(["aa", "aa"], "step")
    """
    by_hash: dict[str, list[int]] = {}
    for rank, one in enumerate(hashes):
        by_hash.setdefault(one, []).append(rank)
    if len(by_hash) > 1:
        told = "; ".join(f"rank{'s' * (len(r) > 1)} {listed(r)} made {h}" for h, r in by_hash.items())
        raise PlanMismatch(
            f"the processes of {name} do not agree on which rank orthogonalises which matrix: {told}. A plan follows from "
            "shapes, blocks, specs, mesh and settings: start all processes with the same code, versions and settings."
        )
