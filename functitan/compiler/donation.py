"""Which result of a program may take the memory of which donated input, and when.

An input's memory may be written over once nothing reads it any more, under its own name or as a view of it. Views are
known from the fake values: a view shares its operand's fake storage. Bodies are looked into: a body that returns one
of its inputs, or a view of it, hands the memory on.
"""

from __future__ import annotations

import torch
from torch import fx

from functitan.compiler import nodes
from functitan.compiler.body_calls import BODY_CALLS
from functitan.compiler.program import LoweredBody, Program

_WAIT = torch.ops._c10d_functional.wait_tensor.default


def successors(program: Program) -> dict[int, int]:
    """For each flat output that replaces a donated input: that input.

    An input has one successor, of its shape, dtype and layout; among several the one whose path agrees longest from
    the end, so that a parameter replaces itself wherever the function puts its state.
    """
    free: dict[object, list[int]] = {}
    for i in program.donated:
        free.setdefault((program.in_types[i], program.in_layouts[i]), []).append(i)
    found: dict[int, int] = {}
    for j, path in enumerate(program.outputs):
        candidates = free.get((program.out_types[j], program.out_layouts[j]))
        if candidates:
            found[j] = max(candidates, key=lambda i: _common_end(program.inputs[i], path))
            candidates.remove(found[j])
    return found


def _common_end(a: str, b: str) -> int:
    """How many last parts two paths share."""
    count = 0
    for x, y in zip(reversed(a.split("/")), reversed(b.split("/")), strict=False):
        if x != y:
            break
        count += 1
    return count


def overwritable(program: Program, views: dict[fx.Node, set[fx.Node]]) -> dict[fx.Node, fx.Node]:
    """From a result's node to the node of the donated input that it may be written over, after its last reader.

    Left out are results that several outputs share, and inputs of which an output is a view.

    Args:
        program: with its donated inputs.
        views: from :func:`holders`.
    """
    places = [n for n in program.graph.nodes if n.op == "placeholder" and "coordinate" not in n.meta]
    output = next(n for n in reversed(program.graph.nodes) if n.op == "output")
    outs: list[fx.Node] = list(nodes.args(output)[0])
    returned = {root for out in outs for root in views[out]}
    return {
        outs[j]: places[i]
        for j, i in successors(program).items()
        if outs[j].op == "call_function" and outs.count(outs[j]) == 1 and places[i] not in returned
    }


def holders(program: Program) -> dict[fx.Node, set[fx.Node]]:
    """Per value of the step the inputs whose memory it is a view of; an input is a view of itself."""
    found: dict[fx.Node, set[fx.Node]] = {}
    for node in program.graph.nodes:
        if node.op == "placeholder":
            found[node] = {node}
        elif node.target in BODY_CALLS:
            body = program.bodies[str(nodes.args(node)[0])]
            groups = [a for a in nodes.args(node) if isinstance(a, list | tuple)]
            inputs = [x for group in groups for x in group]
            handed = passed_on(body, backward=len(groups) > 1)
            found[node] = {root for k in handed if k < len(inputs) for root in found[inputs[k]]}
        else:
            found[node] = {root for used in node.all_input_nodes if _shares(node, used) for root in found[used]}
    return found


def passed_on(body: LoweredBody, backward: bool) -> set[int]:
    """The inputs of a body's forward or backward graph, by number, of which a result is, or is a view.

    What its other graphs started for it is numbered after the inputs of the call. Bodies that it calls are taken to
    hand on all that they are given.
    """
    graph = body.backward if backward else body.forward
    assert graph is not None
    places = [n for n in graph.nodes if n.op == "placeholder" and "coordinate" not in n.meta]
    roots: dict[fx.Node, set[int]] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            roots[node] = {places.index(node)} if node in places else set()
            continue
        whole = node.op == "output" or node.target in BODY_CALLS
        roots[node] = {k for used in node.all_input_nodes if whole or _shares(node, used) for k in roots[used]}
    output = next(n for n in reversed(graph.nodes) if n.op == "output")
    return roots[output]


def _shares(node: fx.Node, used: fx.Node) -> bool:
    """Whether a value may share memory with one that it is computed from. Of several outputs each may.

    A collective reads its operand until it has been waited for.
    """
    mine, theirs = node.meta.get("val"), used.meta.get("val")
    if not isinstance(mine, torch.Tensor) or not isinstance(theirs, torch.Tensor):
        return True
    if node.target is _WAIT or "collective" in node.meta or "owned" in node.meta:
        return True
    return mine.untyped_storage()._cdata == theirs.untyped_storage()._cdata
