"""The result of lowering: per-device graphs with explicit collectives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from functitan import tree
from functitan.compiler.emit import Origin
from functitan.compiler.reshard import Move
from functitan.sharding.layout import Layout
from functitan.sharding.mesh import Mesh
from functitan.sharding.op_rules.base import TensorType


def call_body(name: str, inputs: list[Any]) -> list[Any]:
    """A node's target: run a lowered body forward. Backends put their own in its place."""
    raise RuntimeError(f"the call of {name} has no backend")


def call_body_backward(name: str, kept: list[Any], saved: list[Any], cotangents: list[Any]) -> list[Any]:
    """A node's target: run a lowered body backward."""
    raise RuntimeError(f"the call of {name} has no backend")


def scan_body(name: str, length: int, inputs: list[Any]) -> list[Any]:
    """A node's target: run a lowered body forward over the leading dim of its xs."""
    raise RuntimeError(f"the scan of {name} has no backend")


def scan_body_backward(
    name: str, length: int, kept: list[Any], saved: list[Any], cotangents: list[Any]
) -> list[Any]:
    """A node's target: run a lowered body backward, last step first."""
    raise RuntimeError(f"the scan of {name} has no backend")


BODY_CALLS = (call_body, call_body_backward, scan_body, scan_body_backward)


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


@dataclass(frozen=True)
class Collective:
    """Collectives of one place in a program, counted over a step.

    Attributes:
        kind, axes: what, over which mesh axes.
        count: how often a step runs it (once per layer inside a scan).
        nbytes: bytes that a rank sends each time.
        dtype: of what is sent.
        shape: local shape of the operand.
        param: the path of the parameter or gradient that is moved, or "".
        line: the user's line, or "".
        backward: whether it belongs to a gradient.
        why: what asked for it.
        where: the body that it is in, or "step".
    """

    kind: str
    axes: tuple[str, ...]
    count: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    param: str
    line: str
    backward: bool
    why: str
    where: str

    @property
    def total(self) -> int:
        """Bytes that a rank sends in a step."""
        return self.count * self.nbytes


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

    def graphs(self) -> Iterator[tuple[str, fx.Graph]]:
        """All graphs with their names: the step, then each body forward and backward."""
        yield "step", self.graph
        for name, body in self.bodies.items():
            yield name, body.forward
            if body.backward is not None:
                yield f"{name}.backward", body.backward

    def calls(self) -> Iterator[tuple[str, fx.Node, int]]:
        """Every call of the program with the graph's name and how often a step runs it."""
        yield from _calls(self, "step", self.graph, 1)

    def nodes(self) -> int:
        """The number of calls in all graphs, each body counted once."""
        return sum(n.op == "call_function" for _, g in self.graphs() for n in g.nodes)

    def collectives(self) -> list[Collective]:
        """Every collective, in program order, with count, bytes, and reason."""
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
                    where,
                )
            )
        return found


def _calls(program: Program, where: str, graph: fx.Graph, times: int) -> Iterator[tuple[str, fx.Node, int]]:
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        yield where, node, times
        if node.target in BODY_CALLS:
            body = program.bodies[str(node.args[0])]
            length = int(node.args[1]) if node.target in (scan_body, scan_body_backward) else 1  # type: ignore[arg-type]
            late = node.target in (call_body_backward, scan_body_backward)
            inner = body.backward if late else body.forward
            assert inner is not None
            name = f"{body.name}.backward" if late else body.name
            yield from _calls(program, name, inner, times * length)
