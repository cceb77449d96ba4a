"""Meshes: named device axes with sizes.

A mesh says how many ranks there are and how they are addressed; where they run is its kind: the processes of a
torchrun job, ranks simulated in this process, or nowhere (abstract: lower and report only).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from functitan.errors import ShardingError, listed, suggest
from functitan.sharding import processes

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

KINDS = ("process", "simulated", "abstract")


@dataclass(frozen=True)
class Mesh:
    """Named axes, major to minor: rank = mixed radix number of the axis coordinates.

    Attributes:
        axes: pairs of name and size.
        kind: "process", "simulated" or "abstract".
        hardware: a chip name for reports on an abstract mesh, or None.
    """

    axes: tuple[tuple[str, int], ...]
    kind: str
    hardware: str | None = None

    def __post_init__(self) -> None:
        names = [n for n, _ in self.axes]
        for name, size in self.axes:
            if not isinstance(name, str) or not name.isidentifier():
                raise ShardingError(f"mesh axis {name!r} must be a name such as 'data' or 'tensor'.")
            if not isinstance(size, int) or size < 1:
                raise ShardingError(f'mesh axis "{name}" has size {size!r}; a size is an integer of at least 1.')
            if names.count(name) > 1:
                raise ShardingError(f'mesh axis "{name}" is named twice; each axis has one name.')

    @property
    def shape(self) -> dict[str, int]:
        """Axis sizes by name, in mesh order."""
        return dict(self.axes)

    @property
    def names(self) -> tuple[str, ...]:
        """Axis names, major to minor."""
        return tuple(n for n, _ in self.axes)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return math.prod(s for _, s in self.axes)

    @property
    def processes(self) -> int:
        """How many ranks' values this process holds: all when simulated, one of a process mesh, else none."""
        return {"simulated": self.size, "process": 1, "abstract": 0}[self.kind]

    def require(self, name: str, where: str) -> int:
        """The size of an axis.

        Raises:
            ShardingError: there is no such axis; the message says where it was asked for and what there is.
        """
        sizes = self.shape
        if name not in sizes:
            have = listed(f"{n}={s}" for n, s in self.axes)
            raise ShardingError(
                f'unknown mesh axis "{name}" in {where}; the mesh has {have}.{suggest(name, sizes)} '
                f'Write one of these, or add "{name}": 1 to the mesh when the axis is not used here.'
            )
        return sizes[name]

    def coordinates(self) -> Iterator[dict[str, int]]:
        """The coordinates of every rank, in rank order."""
        for values in itertools.product(*(range(s) for _, s in self.axes)):
            yield dict(zip(self.names, values, strict=True))

    def local_coordinates(self) -> list[dict[str, int]]:
        """The coordinates of the ranks whose values this process holds, in rank order."""
        every = list(self.coordinates())
        return {"simulated": every, "process": [every[processes.rank()]], "abstract": []}[self.kind]

    @property
    def device_mesh(self) -> DeviceMesh:
        """torch's DeviceMesh of the same axes, whose groups this mesh sends over; for PyTorch's own code beside.

        Every process of the job asks for it at the same point, because its groups may be made then.

        Raises:
            ShardingError: the mesh is not one of several processes.
        """
        if self.kind != "process" or self.size == 1:
            raise ShardingError(
                f"the mesh {self} has no DeviceMesh: torch's has a process per rank. Start {self.size} processes with "
                "torchrun or functitan's --nproc and make the mesh without simulate=True."
                if self.size > 1
                else f"the mesh {self} has one rank, and no process group; a DeviceMesh is of several processes."
            )
        return processes.device_mesh(self)

    def __str__(self) -> str:
        inner = ", ".join(f"{n}={s}" for n, s in self.axes) or "one device"
        return f"{inner} ({self.kind})"


def make_mesh(axes: Mapping[str, int], *, simulate: bool = False) -> Mesh:
    """A mesh that runs: on this job's processes, or with all ranks simulated in this process.

    Args:
        axes: axis sizes by name, major to minor, such as ``{"data": 2, "tensor": 4}``.
        simulate: hold and run all ranks in this process, in lockstep.

    Raises:
        ShardingError: a bad name or size, or as many processes are not running.

    >>> make_mesh({"fsdp": 2, "tensor": 2}, simulate=True).size
    4
    """
    mesh = Mesh(tuple(axes.items()), "simulated" if simulate else "process")
    if not simulate:
        running = processes.world()
        if mesh.size != running:
            raise ShardingError(
                f"the mesh {mesh} needs {mesh.size} processes, and {running} run. Start as many with torchrun or "
                "functitan's --nproc, write simulate=True to hold all ranks in this process, or abstract_mesh(...) to "
                "lower and report only."
            )
        processes.start()
    return mesh


def abstract_mesh(axes: Mapping[str, int], *, hardware: str | None = None) -> Mesh:
    """A mesh on which nothing runs: functions can be lowered for it, shown, and costed.

    Args:
        axes: axis sizes by name, major to minor; thousands of ranks are fine.
        hardware: a chip name for cost reports.

    >>> abstract_mesh({"data": 64, "tensor": 8}).size
    512
    """
    return Mesh(tuple(axes.items()), "abstract", hardware)
