"""Prefetch: a step of a scan starts the parameter gathers of a later one, and ends the gradient reductions of the one
before; so do regions that are called one after another (:mod:`functitan.compiler.passes.regions`).

A body's forward and backward graphs are cut at the collectives of parameters: what leads to a gather from stored
parameters alone is started so many steps before it is waited for, and what follows a gradient's reduction waits until
the next step's backward is done. In between, links and compute units work at the same time. The numbers are the same;
the gathered parameters of so many more steps are held at one time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import fx

from functitan.compiler import nodes
from functitan.compiler.body_calls import scan_body
from functitan.compiler.passes.bucket import adds_gradient, gathers_parameter
from functitan.compiler.passes.regions import inline_stages
from functitan.compiler.passes.settings import Passes
from functitan.compiler.program import LoweredBody, Program
from functitan.compiler.split import ancestors, depends_on, extract
from functitan.compiler.text import body_names


def prefetch(program: Program, settings: Passes) -> tuple[Program, list[str]]:
    """Start the gathers of bodies ``settings.prefetch`` steps or regions ahead, and wait late for their reductions."""
    scanned = {str(nodes.args(n)[0]) for _, g in program.graphs() for n in g.nodes if n.target is scan_body}
    names = body_names(program)
    changes: list[str] = []
    regions: dict[str, LoweredBody] = {}
    bodies: dict[str, LoweredBody] = {}
    inlined = lambda _, graph: inline_stages(graph, regions, settings.prefetch)  # noqa: E731
    for name, body in reversed(program.bodies.items()):  # callers stand before the bodies that they call
        of, step = ("steps", "step") if name in scanned else ("calls of regions", "call of a region")
        if regions:
            body = body.with_graphs(inlined)
        cut, gathers, reductions = _staged(body, settings.prefetch)
        parts = []
        if gathers:
            times = f"{settings.prefetch} {of if settings.prefetch > 1 else step}"
            parts.append(f"{gathers} {'gathers are' if gathers > 1 else 'gather is'} started {times} ahead")
        if reductions:
            which = "reductions of gradients are" if reductions > 1 else "reduction of gradients is"
            parts.append(f"{reductions} {which} waited for one {step} later")
        bodies[name] = cut
        if parts:
            changes.append(f"{names[name]}: {', '.join(parts)}")
        if parts and name not in scanned:
            regions[name] = cut
            bodies[name] = replace(cut, ahead=0, forward_starts=None, backward_starts=None, backward_finish=())
    graph = inlined("step", program.graph) if regions else program.graph
    return replace(program, graph=graph, bodies=dict(reversed(bodies.items()))), changes[::-1]


def _staged(body: LoweredBody, ahead: int) -> tuple[LoweredBody, int, int]:
    """The body with its graphs cut, and how many gathers and reductions were moved."""
    starts, forward, n = _cut_starts(body.forward, lambda places: places[body.n_carry : body.n_inputs])
    gathers, reductions = n, 0
    late_starts, backward = None, body.backward
    finish: list[fx.Graph] = []
    if backward is not None:
        kept = len(body.saved_inputs)
        late_starts, backward, n = _cut_starts(backward, lambda places: places[:kept])
        gathers += n
        carried = sum(i < body.n_carry for i in body.gradient_of)
        backward, rest, reductions = _cut_finish(backward, carried)
        while rest is not None:  # a sum over other axes of what was scattered waits a step of its own
            done, rest, n = _cut_finish(rest, 0)
            finish.append(done)
            reductions += n
    made = replace(
        body,
        forward=forward,
        backward=backward,
        ahead=ahead if gathers else 0,
        forward_starts=starts,
        backward_starts=late_starts,
        backward_finish=tuple(finish),
    )
    return made, gathers, reductions


def _cut_starts(
    graph: fx.Graph, given: Callable[[list[fx.Node]], list[fx.Node]]
) -> tuple[fx.Graph | None, fx.Graph, int]:
    """Take the gathers that only some inputs lead to, without another collective before, out of a graph."""
    coordinates, places, results = _parts(graph)
    inputs = given(places)
    free = _computed_from({*coordinates, *inputs}, graph)
    sends = {n for n in graph.nodes if "collective" in n.meta}
    first = [n for n in graph.nodes if n in free and gathers_parameter(n) and ancestors([n]) & sends == {n}]
    if not first:
        return None, graph, 0
    effects = [n for n in graph.nodes if nodes.has_effect(n)]
    starts = extract(graph, [*coordinates, *inputs], first, [])
    return starts, extract(graph, [*coordinates, *places, *first], results, effects), len(first)


def _cut_finish(graph: fx.Graph, carried: int) -> tuple[fx.Graph, fx.Graph | None, int]:
    """Cut a backward graph where reductions lead to nothing but gradients that no step waits for."""
    coordinates, places, results = _parts(graph)
    needed = ancestors(results[:carried])
    ends = {n for n in graph.nodes if adds_gradient(n) and n not in needed}
    first = [n for n in graph.nodes if n in ends and ancestors([n]) & ends == {n}]
    if not first:
        return graph, None, 0
    late = {n for n in depends_on(graph, first) if n.op != "output"} - set(first)
    effects = [n for n in graph.nodes if nodes.has_effect(n)]
    remade = _computed_from(set(coordinates), graph)
    left = results[carried:]
    crossing = {a for n in late for a in n.all_input_nodes} | set(left)
    handed = [n for n in graph.nodes if n in crossing and n not in late and n not in remade]
    main = extract(graph, [*coordinates, *places], [*results[:carried], *handed], [n for n in effects if n not in late])
    return main, extract(graph, [*coordinates, *handed], left, [n for n in effects if n in late]), len(first)


def _parts(graph: fx.Graph) -> tuple[list[fx.Node], list[fx.Node], list[fx.Node]]:
    """A graph's coordinates, other inputs, and results."""
    places = [n for n in graph.nodes if n.op == "placeholder"]
    coordinates = [n for n in places if "coordinate" in n.meta]
    output = next(n for n in reversed(graph.nodes) if n.op == "output")
    return coordinates, [n for n in places if n not in coordinates], list(nodes.args(output)[0])


def _computed_from(roots: set[fx.Node], graph: fx.Graph) -> set[fx.Node]:
    """The nodes that need no other inputs than the roots."""
    found = set(roots)
    for node in graph.nodes:
        if node.op == "call_function" and found.issuperset(node.all_input_nodes):
            found.add(node)
    return found
