"""The processes of a job: starting the default group, and a mesh's groups by name."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from functitan import _torch
from functitan.errors import ArgumentError
from functitan.sharding import mailbox
from functitan.sharding.shared_memory import SharedMemoryGroup

if TYPE_CHECKING:
    from functitan.sharding.mesh import Mesh

#: Seconds that a rank waits in a collective for the others before it gives up.
TIMEOUT = float(os.environ.get("FUNCTITAN_TIMEOUT", "600"))
#: How ranks on CPUs reach each other: through shared memory where all are on one machine ("auto"), or by gloo.
TRANSPORT = os.environ.get("FUNCTITAN_TRANSPORT", "auto")
_names: dict[tuple[tuple[tuple[str, int], ...], str], str] = {}
_shared: list[SharedMemoryGroup] = []  # torch holds groups of Python without their Python part


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
        groups = [[number for _, number in sorted(row)] for row in rows.values()]
        _torch.register_group(registered, _joined(groups))
        _names[key] = registered
    return _names[key]


def _joined(groups: list[list[int]]) -> dist.ProcessGroup:
    """This rank's group of several that have no rank in common; every process of the job calls this with the same."""
    own = next(members for members in groups if rank() in members)
    if TRANSPORT not in ("auto", "gloo"):
        raise ArgumentError(f'FUNCTITAN_TRANSPORT={TRANSPORT} is neither "auto" nor "gloo".')
    if TRANSPORT == "auto" and not torch.cuda.is_available() and sys.platform == "linux":
        listener = mailbox.Listener()
        found: list[tuple[str, str]] = [("", "")] * world()
        dist.all_gather_object(found, (mailbox.place(), listener.path))
        if len({place for place, _ in found}) == 1:
            links = listener.links(own.index(rank()), [found[number][1] for number in own])
            _shared.append(SharedMemoryGroup(links, TIMEOUT))
            return _shared[-1]
        listener.close()
    made = [dist.new_group(members, timeout=timedelta(seconds=TIMEOUT)) for members in groups]
    return made[groups.index(own)]  # pyright: ignore[reportReturnType] (torch's: one that has this rank)


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
