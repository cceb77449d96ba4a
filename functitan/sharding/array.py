"""Arrays: global tensors at rest on a mesh."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from spmd_types.types import PartitionSpec

from functitan.errors import ShardingError
from functitan.sharding import processes
from functitan.sharding.layout import Layout, digit_size, replicated, spec_text
from functitan.sharding.logical import Entry, as_axes, layout_of
from functitan.sharding.mesh import Mesh


def _digits(layout: Layout, sizes: dict[str, int]) -> list[int]:
    return [digit_size(d, sizes) for dim in layout.dims for d in dim]


def local_part(x: torch.Tensor, layout: Layout, coordinates: dict[str, int], mesh: Mesh) -> torch.Tensor:
    """A rank's part of a global tensor, as a contiguous copy."""
    digits = [d for dim in layout.dims for d in dim]
    wide = x.reshape(_digits(layout, mesh.shape))
    index = tuple(coordinates[d] if isinstance(d, str) else slice(None) for d in digits)
    return wide[index].reshape(layout.local_shape).clone(memory_format=torch.contiguous_format)


def assemble(parts: Sequence[torch.Tensor], layout: Layout, mesh: Mesh) -> torch.Tensor:
    """The global tensor of all ranks' parts, the inverse of :func:`local_part`; pending sums are added up."""
    digits = [d for dim in layout.dims for d in dim]
    local_digits = [d for d in digits if isinstance(d, int)]
    wides: dict[tuple[int, ...], torch.Tensor] = {}
    for part, coordinates in zip(parts, mesh.coordinates(), strict=True):
        addend = tuple(coordinates[a] for a in layout.pending)
        wide = wides.setdefault(addend, part.new_empty(_digits(layout, mesh.shape)))
        index = tuple(coordinates[d] if isinstance(d, str) else slice(None) for d in digits)
        wide[index] = part.reshape(local_digits)
    total, *rest = (wides[k] for k in sorted(wides))
    for wide in rest:
        total = total + wide
    return total.reshape(layout.shape(mesh.shape))


class Array:
    """A global tensor at rest: global shape and dtype, a layout over a mesh, and the parts that this process holds.

    Attributes:
        shape, dtype: of the global tensor.
        layout: where its parts are; ``spec`` is the PartitionSpec.
        mesh: the mesh.
        shards: this process's parts: all ranks' when simulated, none on an abstract mesh.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        layout: Layout,
        mesh: Mesh,
        shards: Sequence[torch.Tensor] | None,
    ) -> None:
        self.shape = torch.Size(shape)
        self.dtype = dtype
        self.layout = layout
        self.mesh = mesh
        self._shards = None if shards is None else list(shards)
        self._gone = ""

    @property
    def spec(self) -> PartitionSpec:
        """The spec; axes of size 1 do not appear."""
        return self.layout.spec

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes_local(self) -> int:
        """Bytes of one rank's part."""
        return math.prod(self.layout.local_shape) * self.dtype.itemsize

    @property
    def shards(self) -> list[torch.Tensor]:
        """This process's parts in rank order.

        Raises:
            ShardingError: the Array was donated, or lives on an abstract mesh.
        """
        if self._gone:
            raise ShardingError(
                f"{self} was donated to {self._gone} and holds no value any more. Use what that call returned, or leave "
                "the argument out of donate_argnums."
            )
        if self._shards is None:
            raise ShardingError(f"{self} is on an abstract mesh: it has a shape and a spec, no values.")
        return self._shards

    @property
    def donated_to(self) -> str:
        """The function that this Array was given up to; empty while it holds its value."""
        return self._gone

    def donate(self, to: str) -> list[torch.Tensor]:
        """Give the parts away; reading the Array is an error from now on."""
        shards = self.shards
        self._shards, self._gone = None, to
        return shards

    def full(self) -> torch.Tensor:
        """The whole tensor, gathered into this process."""
        parts = self.shards
        if self.mesh.kind == "process" and self.mesh.size > 1:
            parts = processes.gather_parts(parts[0])
        return assemble(parts, self.layout, self.mesh)

    def reshard(self, spec: PartitionSpec | Sequence[Entry]) -> Array:
        """The same value under another spec of the same mesh."""
        return device_put(self.full(), spec, self.mesh)

    def __repr__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"Array({dtype}{list(self.shape)}, {self.layout}, mesh {self.mesh})"


def device_put(x: torch.Tensor, spec: PartitionSpec | Sequence[Entry], mesh: Mesh) -> Array:
    """Lay a global tensor out over a mesh.

    Args:
        x: the whole tensor, equal on all processes.
        spec: one entry per dim: None, a mesh axis, or a tuple of axes.
        mesh: a mesh that runs.

    >>> from functitan.sharding.mesh import make_mesh
    >>> x = device_put(torch.arange(4), PartitionSpec("data"), make_mesh({"data": 2}, simulate=True))
    >>> x.shards
    [tensor([0, 1]), tensor([2, 3])]
    """
    layout = layout_of(x.shape, spec, mesh, "device_put")
    return put(x, layout, mesh)


def put(x: torch.Tensor, layout: Layout, mesh: Mesh) -> Array:
    """As :func:`device_put`, with a layout."""
    if mesh.kind == "abstract":
        return Array(x.shape, x.dtype, layout, mesh, None)
    parts = [local_part(x, layout, c, mesh) for c in mesh.local_coordinates()]
    return Array(x.shape, x.dtype, layout, mesh, parts)


def on_mesh(x: torch.Tensor | Array, mesh: Mesh) -> Array:
    """A value as an Array: a plain tensor, equal on all processes, is copied, and is whole on every rank.

    >>> from functitan.sharding.mesh import make_mesh
    >>> on_mesh(torch.arange(2), make_mesh({"data": 2}, simulate=True)).shards
    [tensor([0, 1]), tensor([0, 1])]
    """
    return x if isinstance(x, Array) else put(x, replicated(tuple(x.shape)), mesh)


def abstract_array(shape: Sequence[int], dtype: torch.dtype, layout: Layout, mesh: Mesh) -> Array:
    """An Array without values, to lower functions for."""
    return Array(shape, dtype, layout, mesh, None)


def array_from_process_local(
    rows: torch.Tensor | Sequence[torch.Tensor], spec: PartitionSpec | Sequence[Entry], mesh: Mesh
) -> Array:
    """An Array of the parts that processes already hold, such as each one's rows of a batch.

    Args:
        rows: this process's part; on a simulated mesh a list with every rank's, in rank order. All have one
            shape and dtype. Ranks that hold the same part must hold the same values; nothing checks that.
        spec: how the parts make up the whole: None, a mesh axis, or a tuple of axes per dim.
        mesh: a mesh that runs.

    Returns:
        An Array whose shape is that of the parts times the axes that split each dim.

    Raises:
        ShardingError: an abstract mesh, not one part per rank, or parts that differ in shape or dtype.

    >>> from functitan.sharding.mesh import make_mesh
    >>> mesh = make_mesh({"data": 2}, simulate=True)
    >>> parts = [torch.tensor([1, 2]), torch.tensor([3, 4])]
    >>> array_from_process_local(parts, PartitionSpec("data"), mesh).full()
    tensor([1, 2, 3, 4])
    """
    parts = [rows] if isinstance(rows, torch.Tensor) else list(rows)
    if len(parts) != mesh.processes:
        what = {
            "simulated": f"a list with the parts of its {mesh.size} ranks",
            "process": "this process's tensor",
            "abstract": "nothing, because it holds no values (write functitan.sharding.array.abstract_array)",
        }[mesh.kind]
        raise ShardingError(
            f"array_from_process_local was given {len(parts)} parts for the mesh {mesh}; it takes {what}."
        )
    first = parts[0]
    for rank, part in enumerate(parts):
        if part.shape != first.shape or part.dtype != first.dtype:
            raise ShardingError(
                f"array_from_process_local: rank {rank} has {part.dtype} {tuple(part.shape)} and rank 0 "
                f"{first.dtype} {tuple(first.shape)}; all parts have one shape and dtype. Pad a short batch."
            )
    entries: list[Any] = list(spec)
    if len(spec) != first.ndim:
        raise ShardingError(
            f"array_from_process_local: the spec {spec_text(entries)} has {len(spec)} entries, the parts "
            f"have {first.ndim} dims {tuple(first.shape)}. Write one entry per dim, None for a whole one."
        )
    ways = [
        math.prod(mesh.require(a, "array_from_process_local") for a in as_axes(e, "an entry of the spec")) for e in spec
    ]
    shape = tuple(n * w for n, w in zip(first.shape, ways, strict=True))
    layout = layout_of(shape, spec, mesh, "array_from_process_local")
    return Array(shape, first.dtype, layout, mesh, parts)
