"""Gradients of parameters in a trace: shown as outputs, or taken as inputs.

An optimizer may amplify the last bits of a gradient (AdamW's first step is its sign), so a check compares gradients by
themselves, and updates on *given* gradients.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import fx

from functitan import tree
from functitan.compiler import markers, nodes
from functitan.compiler.split import depends_on
from functitan.compiler.trace import Traced

_PARAM_GRADIENT = markers.ops.param_gradient.default


@dataclass(frozen=True)
class Exposed:
    """A trace whose gradients stand after its outputs.

    Attributes:
        traced: the trace; its graph has ``len(params)`` more outputs, and as many more inputs when given.
        params: for each gradient the index of the input that is its parameter, or None when it is not an input.
        places: for each gradient which use of a parameter, counted in program order, it belongs to.
        after: for each original output, whether it is computed from gradients.
    """

    traced: Traced
    params: list[int | None]
    places: list[int]
    after: list[bool]


def expose(traced: Traced, *, given: bool) -> Exposed:
    """Show the gradients of the outermost derivatives as outputs; with ``given``, continue from inputs instead."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    old = [n for n in traced.graph.nodes if nodes.is_call(n, _PARAM_GRADIENT)]
    places = [n for n in traced.graph.nodes if n.op == "placeholder"]
    output = next(n for n in traced.graph.nodes if n.op == "output")
    extra: dict[fx.Node, fx.Node] = {}
    for node in places:
        env[node] = graph.node_copy(node, env.__getitem__)
    if given:
        for i, node in enumerate(old):
            extra[node] = graph.placeholder(f"gradient_{i}")
            extra[node].meta = dict(node.meta)
    shown = []
    for node in traced.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        env[node] = graph.node_copy(node, env.__getitem__)
        if node in old:
            shown.append(env[node])
            if given:
                env[node] = extra[node]
    graph.output([*(env[n] for n in nodes.args(output)[0]), *shown])
    late = depends_on(traced.graph, old) if old else set()
    made = replace(traced, graph=graph, inputs=[*traced.inputs, *(f"gradient {i}" for i in range(len(extra)))])
    plain = tree.unflatten(traced.out_tree, list(range(traced.out_tree.num_leaves)))
    made.out_tree = tree.structure((plain, list(range(len(shown)))))
    roots = [_root(nodes.args(n)[1]) for n in old]
    params = [places.index(r) if r in places else None for r in roots]
    return Exposed(made, params, [int(nodes.args(n)[2]) for n in old], [n in late for n in nodes.args(output)[0]])


def _root(node: fx.Node) -> fx.Node:
    """The value that a node is an alias of."""
    while node.op == "call_function" and str(node.target) in ("aten.detach.default", "aten.alias.default"):
        node = nodes.args(node)[0]  # type: ignore[assignment]
    return node
