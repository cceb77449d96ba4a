"""The processes of a job: starting the default group, and a mesh's groups by name."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from functitan import _torch
from functitan.errors import ArgumentError
from functitan.sharding import mailbox, shared_memory

if TYPE_CHECKING:
    from functitan.sharding.mesh import Mesh

#: Seconds that a rank waits in a collective for the others before it gives up.
TIMEOUT = float(os.environ.get("FUNCTITAN_TIMEOUT", "600"))
#: How ranks on CPUs reach each other: through shared memory where all are on one machine ("auto"), or by gloo.
TRANSPORT = os.environ.get("FUNCTITAN_TRANSPORT", "auto")


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
    if TRANSPORT not in ("auto", "gloo"):
        raise ArgumentError(
            f'FUNCTITAN_TRANSPORT={TRANSPORT} is neither "auto" nor "gloo". Set one of them, or leave it unset ("auto").'
        )
    if torch.cuda.is_available():  # untested so far: no GPU has run this
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timeout=timedelta(seconds=TIMEOUT)
    )
    shared_memory.register(TIMEOUT)
    atexit.register(_stop)


def wait_for_all() -> None:
    """Wait until every process of the job is here."""
    if dist.is_initialized() and world() > 1:
        dist.barrier()


@contextlib.contextmanager
def first_of_machine() -> Iterator[None]:
    """Do something on the first process of each machine, then on the others, which find what it left on disk.

    All processes of a job come here. Nothing inside may need another one.
    """
    if int(os.environ.get("LOCAL_RANK", rank())) != 0:
        wait_for_all()
        yield
        return
    try:
        yield
    except Exception:
        wait_for_all()  # the others fail by themselves
        raise
    wait_for_all()


def _stop() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


@functools.cache
def device_mesh(mesh: Mesh) -> DeviceMesh:
    """torch's mesh of a process mesh, with a group per axis; every process makes it at the same point."""
    backend = _backend()
    return init_device_mesh(
        "cuda" if torch.cuda.is_available() else "cpu",
        tuple(mesh.shape.values()),
        mesh_dim_names=mesh.names,
        backend_override=dict.fromkeys(mesh.names, backend) if backend else None,
    )


@functools.cache
def bound_group(mesh: Mesh, name: str) -> str:
    """torch's name of this rank's group over the axes of ``name`` ("tensor", "data+fsdp").

    Every process makes all groups of a name in the same order, so all must ask for the same names in the same order;
    they do, because a program's text is the same on all.
    """
    axes, found = name.split("+"), device_mesh(mesh)
    if len(axes) == 1:
        group = found.get_group(name)
    elif axes == [a for a in mesh.names if a in axes]:
        group = _torch.joined_axes(found, axes, name, _backend()).get_group()
    else:
        group = _ordered(mesh, axes)
    if _backend() is None:
        _torch.set_timeout(group, TIMEOUT)
    return group.group_name


def _ordered(mesh: Mesh, axes: list[str]) -> Any:
    """This rank's group over axes in another order than the mesh's, which torch's meshes do not know."""
    rows: dict[tuple[int, ...], list[tuple[tuple[int, ...], int]]] = {}
    for number, c in enumerate(mesh.coordinates()):
        rest = tuple(v for a, v in c.items() if a not in axes)
        rows.setdefault(rest, []).append((tuple(c[a] for a in axes), number))
    groups = [[number for _, number in sorted(row)] for row in rows.values()]
    made = [dist.new_group(members, backend=_backend(), sort_ranks=False) for members in groups]
    return next(group for group, members in zip(made, groups, strict=True) if rank() in members)


@functools.cache
def _backend() -> str | None:
    """What the groups of a mesh talk by; None for what the job's default group does."""
    if torch.cuda.is_available() or TRANSPORT == "gloo" or sys.platform != "linux":
        return None
    found = [""] * world()
    dist.all_gather_object(found, mailbox.place())
    return shared_memory.BACKEND if len(set(found)) == 1 else None


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
