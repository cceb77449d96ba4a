"""The processes of a job: starting the default group, and a mesh's groups by name."""

from __future__ import annotations

import atexit
import os
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from functitan import _torch

if TYPE_CHECKING:
    from functitan.sharding.mesh import Mesh

#: Seconds that a rank waits in a collective for the others before it gives up.
TIMEOUT = float(os.environ.get("FUNCTITAN_TIMEOUT", "600"))
_names: dict[tuple[tuple[tuple[str, int], ...], str], str] = {}


def world() -> int:
    """How many processes the job has; 1 outside a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """This process's number in the job; 0 outside a launcher."""
    return int(os.environ.get("RANK", "0"))


def start() -> None:
    """Join the job's default process group, once: NCCL where CUDA is, gloo elsewhere."""
    if dist.is_initialized() or world() == 1:
        return
    if torch.cuda.is_available():  # untested so far: no GPU has run this
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timeout=timedelta(seconds=TIMEOUT)
    )
    atexit.register(_stop)


def wait_for_all() -> None:
    """Wait until every process of the job is here."""
    if dist.is_initialized() and world() > 1:
        dist.barrier()


def _stop() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def bound_group(mesh: Mesh, name: str) -> str:
    """The registered name of this rank's group over the axes of ``name`` ("tensor", "data+fsdp").

    Every process makes all groups of a name in the same order, so all must ask for the same names in the same order;
    they do, because a program's text is the same on all.
    """
    key = (mesh.axes, name)
    if key not in _names:
        axes = name.split("+")
        rows: dict[tuple[int, ...], list[tuple[tuple[int, ...], int]]] = {}
        for number, c in enumerate(mesh.coordinates()):
            rest = tuple(v for a, v in c.items() if a not in axes)
            rows.setdefault(rest, []).append((tuple(c[a] for a in axes), number))
        registered = f"functitan:{'x'.join(f'{a}{n}' for a, n in mesh.axes)}:{name}"
        for row in rows.values():
            members = [number for _, number in sorted(row)]
            made = dist.new_group(members, timeout=timedelta(seconds=TIMEOUT))
            if rank() in members:
                _torch.register_group(registered, made)
        _names[key] = registered
    return _names[key]


def gather_parts(part: torch.Tensor) -> list[torch.Tensor]:
    """The parts of all processes in rank order, on every process."""
    size = dist.get_world_size()
    flat = part.contiguous().reshape(-1)
    boolean = flat.dtype == torch.bool
    sent = flat.to(torch.uint8) if boolean else flat
    rows = [torch.empty_like(sent) for _ in range(size)]
    if sent.numel():
        dist.all_gather(rows, sent)
    rows = [r.reshape(part.shape) for r in rows]
    return [r.to(torch.bool) if boolean else r for r in rows]
