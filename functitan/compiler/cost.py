"""How long a step takes by first principles: a roofline for each op, and a link's rate for each collective.

Peak rates only: no launch times, no latencies, no stragglers. It is the time below which no implementation of
the program can go, and the ratio of compute to communication that a sharding leaves.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from functitan.columns import columns, human_bytes, human_count, human_seconds
from functitan.compiler.flops import flops, moved_bytes
from functitan.compiler.hardware import Chip, chip

if TYPE_CHECKING:
    from functitan.compiler.program import Program
    from functitan.sharding.mesh import Mesh

_WAIT = torch.ops._c10d_functional.wait_tensor.default


@dataclass(frozen=True)
class Part:
    """The costs of one graph over a step: times in seconds, bytes and operations per rank."""

    flops: int
    hbm: int
    compute: float
    communication: float


@dataclass(frozen=True)
class Cost:
    """What a step costs a rank on a chip.

    Attributes:
        hardware: the chip's name.
        flops: matrix operations.
        hbm: bytes moved to and from memory, with pointwise ops fused.
        sent: bytes sent to other ranks.
        compute: seconds of compute: each op by the slower of its operations and its memory traffic.
        parameters: seconds of collectives of parameters, gradients, and matrices on their way to owners.
        activations: seconds of the others.
        ahead: seconds of those that run beside compute: what the Program starts in one graph and waits for in another,
            a step of a scan or a region apart, and what it starts and waits for in one graph, as far as the compute
            between covers it.
        peak: bytes of memory at the peak.
        memory: bytes of the chip's memory.
        peak_flops: the chip's rate in the dtype in which most operations run.
        axes: per mesh axis how many ranks of a group share a node.
        parts: the costs by graph.
    """

    hardware: str
    flops: int
    hbm: int
    sent: int
    compute: float
    parameters: float
    activations: float
    ahead: float
    peak: int
    memory: float
    peak_flops: float
    axes: Mapping[str, int]
    parts: Mapping[str, Part]

    @property
    def communication(self) -> float:
        """Seconds of all collectives."""
        return self.parameters + self.activations

    @property
    def serial(self) -> float:
        """Seconds of a step without any overlap."""
        return self.compute + self.communication

    @property
    def overlapped(self) -> float:
        """Seconds of a step in which what is started ahead runs beside compute, as far as it fits."""
        return max(self.compute, self.ahead) + self.communication - self.ahead

    @property
    def fits(self) -> bool:
        """Whether the peak is within the chip's memory."""
        return self.peak <= self.memory

    @property
    def utilization(self) -> float:
        """The share of the chip's peak rate that the overlapped step reaches."""
        return self.flops / (self.overlapped * self.peak_flops) if self.overlapped else 0.0

    def to_json(self) -> dict[str, Any]:
        """In a form that JSON can hold, with what is derived."""
        derived = {k: getattr(self, k) for k in ("communication", "serial", "overlapped", "fits", "utilization")}
        return dataclasses.asdict(self) | derived

    def __str__(self) -> str:
        need = f"{human_bytes(self.peak)} of {human_bytes(self.memory)}"
        groups = ", ".join(f"{a} {n}" for a, n in self.axes.items())
        where = f"; ranks of a group in one node: {groups}" if groups else ""
        rows = [
            ("memory", need, "fits" if self.fits else "DOES NOT FIT"),
            ("matrix operations", human_count(self.flops)),
            ("compute", human_seconds(self.compute)),
            ("communication", human_seconds(self.communication)),
            ("  parameters, gradients", human_seconds(self.parameters)),
            ("  activations", human_seconds(self.activations)),
            ("  of it started ahead", human_seconds(self.ahead), "runs beside compute"),
            ("step without overlap", human_seconds(self.serial)),
            ("step with overlap", human_seconds(self.overlapped), f"{self.utilization:.0%} of the peak rate"),
        ]
        title = f"on {self.hardware}, per rank, at peak rates{where}"
        return "\n".join([title, columns(rows, right=(1,))])


def estimate(program: Program, hardware: str | Chip, peak: int) -> Cost:
    """The cost of a step of a program.

    Args:
        program: what runs.
        hardware: a chip, or its name in the table of :mod:`functitan.compiler.hardware`.
        peak: bytes of memory at the peak.
    """
    c = chip(hardware)
    traffic: dict[str, Any] = {where: moved_bytes(graph) for where, graph in program.graphs()}
    totals: dict[str, list[float]] = {}
    by_dtype: dict[str, int] = {}
    moved = {"parameters": 0.0, "activations": 0.0}
    ahead = 0.0
    links: dict[str, _Link] = {}
    sent = 0
    for where, node, times in program.calls():
        row = totals.setdefault(where, [0, 0, 0.0, 0.0])
        move = node.meta.get("collective")
        if move is not None:
            seconds = times * collective_seconds(move.kind, move.axes, move.nbytes, program.mesh, c)
            row[3] += seconds
            origin = node.meta["origin"]
            of_parameter = origin.gather or (origin.backward and bool(origin.param)) or "owned" in node.meta
            moved["parameters" if of_parameter else "activations"] += seconds
            if any(user.target is _WAIT for user in node.users):
                links.setdefault(where, _Link()).start(node, seconds / times)
            else:  # waited for in another graph
                ahead += seconds
            sent += times * move.nbytes
            continue
        if node.target is _WAIT and where in links:
            links[where].wait(node.args[0])
        operations, nbytes = flops(node), traffic[where].get(node, 0)
        if not operations and not nbytes:
            continue
        dtype = _dtype(node)
        row[0] += times * operations
        row[1] += times * nbytes
        seconds = max(operations / c.rate(dtype), nbytes / c.bandwidth)
        row[2] += times * seconds
        if where in links:
            ahead += times * links[where].beside(seconds)
        if operations:
            by_dtype[dtype] = by_dtype.get(dtype, 0) + times * operations
    parts = {w: Part(int(f), int(b), s, t) for w, (f, b, s, t) in totals.items()}
    main = max(by_dtype, key=by_dtype.__getitem__, default="bfloat16")
    return Cost(
        c.name,
        sum(p.flops for p in parts.values()),
        sum(p.hbm for p in parts.values()),
        sent,
        sum(p.compute for p in parts.values()),
        moved["parameters"],
        moved["activations"],
        ahead,
        peak,
        c.memory,
        c.rate(main),
        {a: together(program.mesh, (a,), c.node) for a, n in program.mesh.axes if n > 1},
        parts,
    )


class _Link:
    """The collectives of one graph in the order of its calls: one at a time, beside compute.

    What runs in the bodies that the graph calls takes no time here, so nothing is said to run beside it.
    """

    def __init__(self) -> None:
        self._left: dict[Any, float] = {}  # seconds, in the order of starts

    def start(self, node: Any, seconds: float) -> None:
        """A collective begins when it is started and the one before has ended."""
        self._left[node] = seconds

    def wait(self, node: Any) -> None:
        """Until a collective has ended, and with it those before."""
        while node in self._left:
            del self._left[next(iter(self._left))]

    def beside(self, seconds: float) -> float:
        """For how long of so much compute a collective is under way."""
        rest = seconds
        for node, left in self._left.items():
            self._left[node] = left - min(left, rest)
            rest -= min(left, rest)
        return seconds - rest


def together(mesh: Mesh, axes: tuple[str, ...], node: int) -> int:
    """How many ranks of a group over ``axes`` share a node, when nodes are filled in rank order.

    >>> from functitan.sharding.mesh import abstract_mesh
    >>> mesh = abstract_mesh({"data": 4, "fsdp": 4, "tensor": 4})
    >>> [together(mesh, (a,), 8) for a in mesh.names], together(mesh, ("fsdp", "tensor"), 8)
    ([1, 2, 4], 8)
    """
    count, stride = 1, 1
    for name, size in reversed(mesh.axes):
        # A node that the stride does not divide is treated as the next smaller one that it does.
        within = math.gcd(size, max(node // stride, 1))
        if name in axes:
            count *= within
        stride *= size
    return count


def collective_seconds(kind: str, axes: tuple[str, ...], nbytes: int, mesh: Mesh, c: Chip) -> float:
    """Seconds of a collective in which every rank sends ``nbytes``: by the slower of its links.

    Of n ranks, m share a node. Gathers and reductions send each datum once between nodes, spread over the
    ports of the m ranks; an all-to-all sends (n - m) / (n - 1) of its bytes there, each rank its own.
    """
    n = math.prod(mesh.shape[a] for a in axes)
    m = together(mesh, axes, c.node)
    if n == 1 or not nbytes:
        return 0.0
    outside = nbytes * (n - m) / (n - 1)
    if kind != "all_to_all":
        outside /= m
    inside = nbytes if m > 1 else 0
    return max(inside / c.fast, outside / c.slow)


def _dtype(node: Any) -> str:
    """The dtype in which a product runs: that of its floating operands."""
    for used in node.all_input_nodes:
        val = used.meta.get("val")
        if isinstance(val, torch.Tensor) and val.dtype.is_floating_point:
            return str(val.dtype).removeprefix("torch.")
    return "float32"
