"""Run a program's graphs op by op on one rank's tensors: the backend "eager"."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from functitan.compiler import nodes
from functitan.compiler import program as targets
from functitan.compiler.emit import group
from functitan.compiler.owned import Exchange
from functitan.compiler.program import LoweredBody, Program
from functitan.runtime.plans import check_plans
from functitan.runtime.scan import Stages, TensorOps, scan_backward, scan_forward
from functitan.sharding.processes import bound_group


class Eager:
    """Runs a program on one rank. Graphs become Python functions once; a call has no interpreter.

    Args:
        program: what to run.
        coordinates: this rank's index on every axis.
    """

    def __init__(self, program: Program, coordinates: dict[str, int]) -> None:
        #: The flat inputs whose memory a run writes to: none here.
        self.written: set[int] = set()
        self._program = program
        check_plans(program)
        self._coordinates = {a: torch.tensor(v) for a, v in coordinates.items()}
        self._functions: dict[str, Callable[[list[Any]], list[Any]]] = {}
        self._bind()
        self._build()

    def run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """The flat outputs for the flat inputs; the list of inputs is emptied, so that what it alone holds can go."""
        return self._step(inputs)

    def _bind(self) -> None:
        """Make the groups of all collectives, which takes all processes; nothing after it does."""
        for _, graph in self._program.graphs():
            for node in graph.nodes:
                if isinstance(node.target, Exchange):
                    bound_group(self._program.mesh, group(node.target.group))
                elif "collective" in node.meta:
                    bound_group(self._program.mesh, str(nodes.args(node)[-1]))

    def _build(self) -> None:
        """Make a Python function of every graph."""
        # Inner bodies come after the ones that call them.
        for body in reversed(self._program.bodies.values()):
            for name, graph in body.graphs():
                self._functions[name] = self._function(graph, name, _carried(body, name))
        self._step = self._function(self._program.graph, self._program.name)

    def _function(self, graph: fx.Graph, name: str, carried: int = 0) -> Callable[[list[Any]], list[Any]]:
        """A graph as a Python function of the list of its inputs without coordinates, which it empties.

        The leading ``carried`` results are inputs of the next call.
        """
        copy = fx.Graph()
        env: dict[fx.Node, fx.Node] = {}
        axes: list[str | None] = []
        for node in graph.nodes:
            env[node] = copy.node_copy(node, env.__getitem__)
            if node.op == "placeholder":
                axes.append(node.meta.get("coordinate"))
            elif node.target in targets.BODY_CALLS:
                env[node].target = self._bound(node)
            elif isinstance(node.target, Exchange):
                env[node].target = self._exchange(node.target)
            elif "collective" in node.meta:
                *args, axes_name = env[node].args
                env[node].args = (*args, bound_group(self._program.mesh, str(axes_name)))
        fixed = [self._coordinates[a] for a in axes if a is not None]
        run = fx.GraphModule(torch.nn.Module(), _emptying(self._finish(copy, name, env, carried))).forward
        return functools.partial(run, *fixed) if fixed else run

    def _finish(self, graph: fx.Graph, name: str, env: dict[fx.Node, fx.Node], carried: int) -> fx.Graph:
        """What runs for a bound graph; ``env`` has its node for every node of the program's graph."""
        return graph

    def _exchange(self, target: Exchange) -> Callable[..., Any]:
        """An all-to-all of the parts that this rank's plan says."""
        gets, sends = target.splits(target.place([self._coordinates[a] for a in target.axes]))
        name = bound_group(self._program.mesh, group(target.group))

        def exchange(send: torch.Tensor, *coordinates: torch.Tensor) -> torch.Tensor:
            return torch.ops._c10d_functional.all_to_all_single(send, gets, sends, name)

        return exchange

    def _bound(self, node: fx.Node) -> Callable[..., Any]:
        """What a body call does here."""
        body: LoweredBody = self._program.bodies[str(nodes.args(node)[0])]
        ops = TensorOps()

        def stages(late: str) -> Stages:
            made = self._functions
            finish = tuple(made[name] for name in body.finish_names) if late else ()
            return Stages(made[body.name + late], made.get(f"{body.name}.starts{late}"), finish)

        def call(name: str, inputs: list[Any]) -> list[Any]:
            return stages("").main(inputs)

        def call_backward(name: str, kept: list[Any], saved: list[Any], cotangents: list[Any]) -> list[Any]:
            return stages(".backward").main([*kept, *saved, *cotangents])

        def scan(name: str, length: int, inputs: list[Any]) -> list[Any]:
            return scan_forward(body, length, inputs, stages(""), ops)

        def scan_back(name: str, length: int, kept: list[Any], saved: list[Any], cotangents: list[Any]) -> list[Any]:
            return scan_backward(body, length, kept, saved, cotangents, stages(".backward"), ops)

        return {
            targets.call_body: call,
            targets.call_body_backward: call_backward,
            targets.scan_body: scan,
            targets.scan_body_backward: scan_back,
        }[node.target]  # type: ignore[index]


def _carried(body: LoweredBody, name: str) -> int:
    """How many leading results of one of a body's graphs are carried on to the next step of a scan."""
    if name == body.name:
        return body.n_carry
    return sum(j < body.n_carry for j in body.gradient_of) if name == f"{body.name}.backward" else 0


def _emptying(graph: fx.Graph) -> fx.Graph:
    """The graph with its coordinates and one more input, the list of its others; an input lives no longer than what
    reads it.

    The arguments of a Python call live as long as the call.
    """
    made = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    places = [n for n in graph.nodes if n.op == "placeholder"]
    for node in places:
        if "coordinate" in node.meta:
            env[node] = made.node_copy(node)
    box = made.placeholder("inputs")
    for node in reversed(places):
        if node not in env:
            env[node] = made.call_method("pop", (box,))
    for node in graph.nodes:
        if node.op != "placeholder":
            env[node] = made.node_copy(node, env.__getitem__)
    return made
