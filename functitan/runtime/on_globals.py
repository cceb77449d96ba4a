"""Run a Program on global values: every rank takes its part, and the parts of the results are put together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from functitan.compiler.program import Program
from functitan.runtime.eager import Eager
from functitan.runtime.inductor import Inductor
from functitan.runtime.lockstep import Lockstep
from functitan.sharding import processes
from functitan.sharding.array import assemble, local_part

Observe = Callable[[str, fx.Node, list[Any]], None]


def run_on_globals(
    program: Program, values: Sequence[torch.Tensor], *, backend: str = "eager", observe: Observe | None = None
) -> list[torch.Tensor]:
    """Global outputs for global inputs, the same on every process.

    Args:
        program: for a simulated mesh, or for the processes of this job.
        values: the flat inputs, whole.
        backend: how each rank runs on processes; a simulated mesh is interpreted.
        observe: for a simulated mesh, what sees the per-rank values of each node.
    """
    mesh = program.mesh
    places = mesh.local_coordinates() if mesh.kind == "process" else list(mesh.coordinates())
    columns = [[local_part(v, lay, c, mesh) for c in places] for v, lay in zip(values, program.in_layouts, strict=True)]
    if mesh.kind == "process":
        runner = (Inductor if backend == "inductor" else Eager)(program, places[0])
        with torch.no_grad():
            mine = runner.run([c[0] for c in columns])
        outs = [processes.gather_parts(part) if mesh.size > 1 else [part] for part in mine]
    else:
        outs = Lockstep(mesh, program.bodies, observe).graph("step", program.graph, columns)
    return [assemble(parts, lay, mesh) for parts, lay in zip(outs, program.out_layouts, strict=True)]
