"""Graphs to graphs: what passes share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import fx

from functitan.compiler.program import Program
from functitan.compiler.text import body_names, place_name


def copied(graph: fx.Graph) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """A copy of a graph to work on, and the new node of each old one. Fake values are shared, ``meta`` is not."""
    made = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        env[node] = made.node_copy(node, env.__getitem__)
    return made, env


def each_graph(program: Program, change: Callable[[str, fx.Graph], list[str]]) -> tuple[Program, list[str]]:
    """The program with every graph changed by itself, inputs and outputs of each as they were.

    Args:
        program: stays as it is.
        change: given the graph's name for people and a copy to work on, says in sentences what it changed; without any, the
            old graph stays.
    """
    changes: list[str] = []
    names = body_names(program)

    def changed(where: str, graph: fx.Graph) -> fx.Graph:
        made, _ = copied(graph)
        found = change(place_name(where, names), made)
        changes.extend(found)
        return made if found else graph

    bodies = {}
    step = changed("step", program.graph)
    for name, body in program.bodies.items():
        bodies[name] = body.with_graphs(changed)
    return replace(program, graph=step, bodies=bodies), changes
