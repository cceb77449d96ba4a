"""Run a program with every graph compiled once by torch's inductor: the backend "inductor".

A body is compiled forward and backward, whatever the number of its calls; the step around the bodies is cut into
pieces (:mod:`functitan.runtime.pieces`). There are no guards: a program has one signature.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from functitan import _torch
from functitan.compiler.donation import holders, overwritable
from functitan.compiler.program import Program
from functitan.errors import FunctitanError
from functitan.runtime.eager import Eager
from functitan.runtime.pieces import Piece, cut, renames

aten = torch.ops.aten


class BackendError(FunctitanError):
    """A backend cannot compile a program here."""


class Inductor(Eager):
    """Runs a program on one rank with compiled graphs. Donated inputs are written over by what replaces them.

    Attributes:
        from_cache: per graph that was compiled, whether inductor had it on disk.
    """

    def __init__(self, program: Program, coordinates: dict[str, int]) -> None:
        self.from_cache: list[bool] = []
        self._pieces: dict[Any, Callable[..., Any]] = {}
        views = holders(program)
        self._donation = (views, overwritable(program, views))
        try:
            with _torch.kernels_built_together():
                super().__init__(program, coordinates)
        except _torch.MissingCompilerError as error:
            raise BackendError(
                f'the backend "inductor" needs a C++ compiler, and none was found ({str(error).splitlines()[0]}). '
                'Install one, or use backend="eager" (--backend eager).'
            ) from None
        except _torch.FailedCompilerError as error:
            raise BackendError(
                f'the C++ compiler failed on a kernel of the backend "inductor"; backend="eager" (--backend eager) needs '
                f"none. {error}"
            ) from None

    def _finish(self, graph: fx.Graph, name: str, env: dict[fx.Node, fx.Node]) -> fx.Graph:
        views: dict[fx.Node, set[fx.Node]] = {n: set() for n in graph.nodes}
        over: dict[fx.Node, fx.Node] = {}
        if name == self._program.name:
            views = {env[n]: {env[r] for r in roots} for n, roots in self._donation[0].items()}
            over = {env[out]: env[place] for out, place in self._donation[1].items()}
        places = [n for n in graph.nodes if n.op == "placeholder" and "coordinate" not in n.meta]
        outer = fx.Graph()
        made: dict[fx.Node, fx.Node] = {}
        for item in cut(graph, over, views):
            if isinstance(item, Piece):
                self._place(outer, made, item, name)
                self.written |= {places.index(place) for place in item.writes.values()}
            elif renames(item):
                made[item] = made[item.all_input_nodes[0]]
            else:
                made[item] = outer.node_copy(item, made.__getitem__)
        outer.lint()
        return outer

    def _place(self, outer: fx.Graph, made: dict[fx.Node, fx.Node], piece: Piece, name: str) -> None:
        """Append a compiled piece to the outer graph."""
        key = signature(piece)
        if key not in self._pieces:
            hits = _torch.inductor_cache_hits()
            self._pieces[key] = compiled(piece, name)
            self.from_cache.append(_torch.inductor_cache_hits() > hits)
        call = outer.call_function(self._pieces[key], tuple(made[n] for n in piece.inputs))
        for i, node in enumerate(piece.outs):
            made[node] = outer.call_function(operator.getitem, (call, i))


def signature(piece: Piece) -> Any:
    """Equal for pieces that are the same code: the calls, and the types of inputs, but for the shape of flat ones."""
    number = {n: i for i, n in enumerate([*piece.inputs, *piece.calls])}

    def known(value: Any) -> Any:
        return map_arg(value, lambda n: _Number(number[n]))

    calls = tuple((n.target, repr(known(n.args)), repr(known(n.kwargs))) for n in piece.calls)
    types = tuple(_type(n.meta["val"], piece.flat) for n in piece.inputs)
    writes = tuple((number[out], number[place]) for out, place in piece.writes.items())
    return calls, types, tuple(number[n] for n in piece.outs), writes, piece.flat


class _Number(int):
    """Stands for a node, which a plain integer among the arguments does not."""

    def __repr__(self) -> str:
        return f"%{int(self)}"


def _type(val: torch.Tensor, flat: bool) -> Any:
    return (val.dtype, val.ndim > 0) if flat else (val.dtype, tuple(val.shape), tuple(val.stride()))


def compiled(piece: Piece, name: str) -> Callable[..., Any]:
    """A piece as a function of its operands, which are brought into the memory order that it was compiled for."""
    graph = fx.Graph()
    own: dict[fx.Node, fx.Node] = {}
    values = [n.meta["val"] for n in piece.inputs]
    if piece.flat:
        values = _torch.flat_fakes(values)
    for i, node in enumerate(piece.inputs):
        own[node] = graph.placeholder(f"input_{i}")
        # Inductor takes symbols from here; what else it needs it finds out by itself.
        own[node].meta = {"val": values[i]} if piece.flat else {}
    for node in piece.calls:
        own[node] = graph.node_copy(node, own.__getitem__)
        own[node].meta = {}
    for out, place in piece.writes.items():
        graph.call_function(aten.copy_.default, (own[place], own[out]))
    fresh = [n for n in piece.outs if n not in piece.writes]
    graph.output(tuple(own[n] for n in fresh))
    artifact = _torch.compile_graph(fx.GraphModule(torch.nn.Module(), graph), values)
    call = _flat_call(artifact, piece) if piece.flat else _call(artifact, piece)
    call.__name__ = "compiled_" + "".join(c if c.isalnum() else "_" for c in name)
    return call


def _call(artifact: Callable[..., Any], piece: Piece) -> Callable[..., Any]:
    strides = [tuple(n.meta["val"].stride()) for n in piece.inputs]
    if not piece.writes:
        return lambda *operands: artifact(*map(_strided, operands, strides))
    # Where each result is: among what the artifact returns, or the operand that it was written to.
    fresh = [n for n in piece.outs if n not in piece.writes]
    where = [(0, fresh.index(n)) if n in fresh else (1, piece.inputs.index(piece.writes[n])) for n in piece.outs]

    def call(*operands: torch.Tensor) -> list[torch.Tensor]:
        ready = list(map(_strided, operands, strides))
        found = (artifact(*ready), ready)
        return [found[side][i] for side, i in where]

    return call


def _flat_call(artifact: Callable[..., Any], piece: Piece) -> Callable[..., Any]:
    fresh = [n for n in piece.outs if n not in piece.writes]
    where = [(0, fresh.index(n)) if n in fresh else (1, piece.inputs.index(piece.writes[n])) for n in piece.outs]
    shaped = next(i for i, n in enumerate(piece.inputs) if n.meta["val"].ndim)

    def call(*operands: torch.Tensor) -> list[torch.Tensor]:
        ready = [x.contiguous() for x in operands]
        shape = ready[shaped].shape
        found = ([_shaped(x, shape) for x in artifact(*(x.view(-1) if x.ndim else x for x in ready))], ready)
        return [found[side][i] for side, i in where]

    return call


def _shaped(x: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    return x.view(shape) if x.ndim else x


def _strided(x: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    if x.stride() == stride or x.numel() <= 1:
        return x
    return torch.empty_strided(x.shape, stride, dtype=x.dtype, device=x.device).copy_(x)
