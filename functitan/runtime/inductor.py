"""Run a program with every graph compiled once by torch's inductor: the backend "inductor".

A body is compiled forward and backward, whatever the number of its calls; the step around the bodies is cut where it
calls them, and each piece is compiled. There are no guards: a program has one signature. What inductor cannot take
(calls of bodies, values that are not tensors, effects, collectives that end in another graph) stays Python between the pieces.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from functitan import _torch
from functitan.compiler import nodes
from functitan.compiler.emit import Constant
from functitan.compiler.program import BODY_CALLS
from functitan.errors import FunctitanError
from functitan.runtime.eager import Eager

_WAIT = torch.ops._c10d_functional.wait_tensor.default


class BackendError(FunctitanError):
    """A backend cannot compile a program here."""


class Inductor(Eager):
    """Runs a program on one rank with compiled graphs."""

    def _finish(self, graph: fx.Graph, name: str) -> Callable[..., Any]:
        return fx.GraphModule(torch.nn.Module(), cut(graph, name)).forward


def cut(graph: fx.Graph, name: str) -> fx.Graph:
    """The graph with every run of compilable calls in one compiled piece.

    A run ends where a call that stays outside needs what it computed.
    """
    outer = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    run: list[fx.Node] = []
    pieces = 0

    def flush() -> None:
        nonlocal pieces
        if run:
            _place(outer, env, list(run), f"{name}.{pieces}")
            pieces += 1
            run.clear()

    for node in graph.nodes:
        if node.op == "call_function" and not _outside(node):
            run.append(node)
            continue
        if any(a in run for a in node.all_input_nodes):
            flush()
        env[node] = outer.node_copy(node, env.__getitem__)
    flush()
    outer.lint()
    return outer


def _outside(node: fx.Node) -> bool:
    """Whether a call stays Python: bodies, parts of other sizes on each rank, what comes from them, constants, effects."""
    if isinstance(node.target, Constant) or node.target in BODY_CALLS or nodes.has_effect(node):
        return True
    if "collective" in node.meta and any(user.op == "output" for user in node.users):
        return True  # started here, waited for in another graph
    if node.target is _WAIT and nodes.args(node)[0].op == "placeholder":
        return True
    source = nodes.args(node)[0] if node.target is operator.getitem else node
    return "body" in source.meta or "owned" in source.meta  # type: ignore[union-attr]


def _place(outer: fx.Graph, env: dict[fx.Node, fx.Node], run: list[fx.Node], name: str) -> None:
    """Append a compiled piece to the outer graph."""
    inside = set(run)
    inputs = list(dict.fromkeys(a for n in run for a in n.all_input_nodes if a not in inside))
    outs = [n for n in run if any(u not in inside for u in n.users)]
    piece = fx.Graph()
    own: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        own[node] = piece.placeholder(node.name)
        own[node].meta = {"val": node.meta["val"]}
    for node in run:
        own[node] = piece.node_copy(node, own.__getitem__)
        own[node].meta = {"val": node.meta["val"]}
    piece.output(tuple(own[n] for n in outs))
    call = outer.call_function(_compiled(piece, name), tuple(env[n] for n in inputs))
    for i, node in enumerate(outs):
        env[node] = outer.call_function(operator.getitem, (call, i))


def _compiled(piece: fx.Graph, name: str) -> Callable[..., Any]:
    """A piece as a compiled function; operands are brought into the strides that it was compiled for."""
    values = [n.meta["val"] for n in piece.nodes if n.op == "placeholder"]
    module = fx.GraphModule(torch.nn.Module(), piece)
    try:
        artifact = _torch.compile_graph(module, values)
    except _torch.MissingCompilerError as error:
        raise BackendError(
            f'the backend "inductor" needs a C++ compiler, and none was found ({str(error).splitlines()[0]}). Install '
            'one, or use backend="eager" (--backend eager).'
        ) from None
    strides = [tuple(v.stride()) for v in values]

    def call(*operands: torch.Tensor) -> Sequence[torch.Tensor]:
        return artifact(*map(_strided, operands, strides))

    call.__name__ = "compiled_" + "".join(c if c.isalnum() else "_" for c in name)
    return call


def _strided(x: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    if x.stride() == stride or x.numel() <= 1:
        return x
    return torch.empty_strided(x.shape, stride, dtype=x.dtype, device=x.device).copy_(x)
