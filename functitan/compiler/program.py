"""The result of lowering: per-device graphs with explicit collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch import fx

from functitan import tree
from functitan.compiler.body_calls import (
    BODY_CALLS,
    call_body,
    call_body_backward,
    scan_body,
    scan_body_backward,
)
from functitan.compiler.collectives import Collective, Collectives
from functitan.compiler.cost import Cost, estimate
from functitan.compiler.emit import Origin
from functitan.compiler.hardware import Chip
from functitan.compiler.memory import Memory, measure
from functitan.compiler.owned import Part
from functitan.compiler.report import summary, to_json
from functitan.compiler.reshard import Move
from functitan.compiler.text import body_names, place_name, program_text
from functitan.errors import ConfigError
from functitan.sharding.layout import Layout
from functitan.sharding.mesh import Mesh
from functitan.sharding.op_rules.base import TensorType
from functitan.sharding.ownership import Plan

if TYPE_CHECKING:
    from functitan.compiler.passes import PassRecord

__all__ = [
    "BODY_CALLS",
    "Collective",
    "Collectives",
    "LoweredBody",
    "Program",
    "call_body",
    "call_body_backward",
    "scan_body",
    "scan_body_backward",
]


@dataclass(eq=False)
class LoweredBody:
    """A lowered region or scan body.

    Attributes:
        name: what nodes call it by; unique in the program.
        label: the traced body's name.
        n_carry, n_xs, n_inputs: how a scan's inputs are grouped; the rest are constants.
        forward: coordinates, inputs -> outputs, saved values.
        backward: coordinates, kept inputs, saved values, cotangents -> gradients. None without gradients.
        saved_inputs: inputs that backward reads again.
        saved_values: fake values of what forward hands to backward.
        tangent_of: the output of each cotangent.
        gradient_of: the input of each gradient.
        ahead: for a scan, how many steps before its own a step's collectives of ``forward_starts`` and
            ``backward_starts`` are started; 0 without such graphs.
        forward_starts: coordinates, inputs -> collectives under way, which forward takes after its inputs.
        backward_starts: coordinates, kept inputs -> collectives under way, which backward takes last.
        backward_finish: graphs from what backward gives after the gradients of the carry to the other gradients, each
            run after the backward of one more step, so that the collectives in between have that long: coordinates,
            results of the one before -> collectives under way, or at last the gradients.
    """

    name: str
    label: str
    n_inputs: int
    n_carry: int
    n_xs: int
    forward: fx.Graph
    backward: fx.Graph | None
    in_layouts: list[Layout]
    in_types: list[TensorType]
    out_layouts: list[Layout]
    out_types: list[TensorType]
    saved_inputs: list[int]
    saved_values: list[Any]
    tangent_of: list[int]
    tangent_layouts: list[Layout]
    gradient_of: list[int]
    gradient_layouts: list[Layout]
    gradient_types: list[TensorType]
    remat: Any = None
    ahead: int = 0
    forward_starts: fx.Graph | None = None
    backward_starts: fx.Graph | None = None
    backward_finish: tuple[fx.Graph, ...] = ()

    def graphs(self, *, backward: bool | None = None) -> Iterator[tuple[str, fx.Graph]]:
        """The body's graphs in the order in which a step runs them, each with its name.

        Args:
            backward: only those of that pass.
        """
        one: list[tuple[str, fx.Graph | None]] = [
            (".starts", self.forward_starts),
            ("", self.forward),
            (".starts.backward", self.backward_starts),
            (".backward", self.backward),
        ]
        rows = [(self.name + suffix, graph) for suffix, graph in one]
        for name, graph in (*rows, *zip(self.finish_names, self.backward_finish, strict=True)):
            if graph is not None and backward in (None, name.endswith(".backward")):
                yield name, graph

    @property
    def finish_names(self) -> tuple[str, ...]:
        """The names of ``backward_finish``."""
        return tuple(f"{self.name}.finish{i + 1 if i else ''}.backward" for i in range(len(self.backward_finish)))

    def with_graphs(self, change: Callable[[str, fx.Graph], fx.Graph]) -> LoweredBody:
        """The body with every graph changed by itself: (name, graph) -> graph, with inputs and outputs as they were."""
        made = {name: change(name, graph) for name, graph in self.graphs()}
        return replace(
            self,
            forward_starts=made.get(f"{self.name}.starts"),
            forward=made[self.name],
            backward_starts=made.get(f"{self.name}.starts.backward"),
            backward=made.get(f"{self.name}.backward"),
            backward_finish=tuple(made[name] for name in self.finish_names),
        )


@dataclass(eq=False)
class Program:
    """A lowered function.

    Attributes:
        name: the function's name.
        mesh: what it is lowered for.
        graph: coordinates, flat inputs -> flat outputs.
        bodies: lowered bodies by name.
        inputs, outputs: paths of the flat inputs and outputs.
        choices: layouts that were settled without being asked for: (line, sentence).
        unused_rules: logical names that nothing asked for.
        donated: the flat inputs that are given up to the call.
        passes: what each pass changed, in order; ``print(passes_text(program.passes))`` of
            :mod:`functitan.compiler.passes` shows it.
    """

    name: str
    mesh: Mesh
    graph: fx.Graph
    bodies: dict[str, LoweredBody]
    inputs: list[str]
    in_layouts: list[Layout]
    in_types: list[TensorType]
    outputs: list[str]
    out_layouts: list[Layout]
    out_types: list[TensorType]
    out_tree: tree.TreeDef
    choices: list[tuple[str, str]] = field(default_factory=list)
    unused_rules: list[str] = field(default_factory=list)
    donated: tuple[int, ...] = ()
    passes: tuple[PassRecord, ...] = ()

    def graphs(self) -> Iterator[tuple[str, fx.Graph]]:
        """All graphs with their names: the step, then each body forward and backward."""
        yield "step", self.graph
        for body in self.bodies.values():
            yield from body.graphs()

    def calls(self) -> Iterator[tuple[str, fx.Node, int]]:
        """Every call of the program with the graph's name and how often a step runs it."""
        yield from _calls(self, "step", self.graph, 1)

    def nodes(self) -> int:
        """The number of calls in all graphs, each body counted once."""
        return sum(n.op == "call_function" for _, g in self.graphs() for n in g.nodes)

    def plans(self) -> list[Plan]:
        """Who orthogonalises which matrix, for each optimizer rule that gives matrices to owners."""
        found = [n.target.plan for _, g in self.graphs() for n in g.nodes if isinstance(n.target, Part)]
        return list({id(p): p for p in found}.values())

    def collectives(self) -> Collectives:
        """Every collective, in program order, with count, bytes, and reason; ``print`` shows a table."""
        names = body_names(self)
        found = []
        for where, node, count in self.calls():
            move: Move | None = node.meta.get("collective")
            if move is None:
                continue
            origin: Origin = node.meta["origin"]
            val = node.args[0].meta["val"]  # type: ignore[union-attr]
            found.append(
                Collective(
                    move.kind,
                    move.axes,
                    count,
                    move.nbytes,
                    str(val.dtype).removeprefix("torch."),
                    tuple(val.shape),
                    origin.param,
                    str(origin.line or ""),
                    origin.backward or where.endswith(".backward"),
                    origin.why,
                    place_name(where, names).replace(" ", "."),
                )
            )
        return Collectives(found)

    def text(self, body: str | None = None) -> str:
        """The lowered code: a line per value with its local type, layout, op and source line.

        Args:
            body: "step", or the name of a body: its forward and backward. None for everything.

        Raises:
            ArgumentError: there is no such body.
        """
        return program_text(self, body)

    def memory(self, groups: Mapping[str, str] | None = None) -> Memory:
        """Bytes that a rank holds, by what holds them, and the peak by liveness.

        Args:
            groups: path prefixes of the inputs that are "parameters" and "optimizer" state; by default what
                is called ``params`` and ``opt`` at or right below an argument.
        """
        return measure(self, groups)

    def cost(self, hardware: str | Chip | None = None, groups: Mapping[str, str] | None = None) -> Cost:
        """Operations, bytes and time of a step by first principles.

        Args:
            hardware: a chip's name, or a Chip; by default what the mesh was given.
            groups: as for :meth:`memory`.

        Raises:
            ConfigError: no such chip, or none named.
        """
        if hardware is None and self.mesh.hardware is None:
            raise ConfigError('cost needs a chip: write program.cost("h100"), or name it in abstract_mesh(...).')
        return estimate(self, hardware or self.mesh.hardware or "", self.memory(groups).peak)

    def to_json(self, hardware: str | Chip | None = None) -> str:
        """All reports as JSON; bytes and counts are per rank and step."""
        chosen = hardware or self.mesh.hardware
        return to_json(self, self.memory(), None if chosen is None else self.cost(chosen))

    def __str__(self) -> str:
        cost = None if self.mesh.hardware is None else self.cost()
        return summary(self, self.memory(), cost)


def _calls(program: Program, where: str, graph: fx.Graph, times: int) -> Iterator[tuple[str, fx.Node, int]]:
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        yield where, node, times
        if node.target in BODY_CALLS:
            body = program.bodies[str(node.args[0])]
            length = int(node.args[1]) if node.target in (scan_body, scan_body_backward) else 1  # type: ignore[arg-type]
            late = node.target in (call_body_backward, scan_body_backward)
            for name, inner in body.graphs(backward=late):
                yield from _calls(program, name, inner, times * length)
