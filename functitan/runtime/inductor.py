"""Run a program with every graph compiled once by torch's inductor: the backend "inductor".

A body is compiled forward and backward, whatever the number of its calls; the step around the bodies is cut into
pieces (:mod:`functitan.runtime.pieces`). There are no guards: a program has one signature.
"""

from __future__ import annotations

import contextlib
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
from functitan.runtime.outer_graph import OuterGraph, strided
from functitan.runtime.pieces import Piece, cut
from functitan.sharding.processes import first_of_machine

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
        super().__init__(program, coordinates)

    def _build(self) -> None:
        # Processes compile the same graphs: the first of a machine does, the others find them on disk.
        shared = self._program.mesh.kind == "process" and self._program.mesh.size > 1 and _torch.inductor_caches()
        alone = first_of_machine() if shared else contextlib.nullcontext()
        try:
            with alone, _torch.kernels_built_together():
                super()._build()
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

    def _finish(self, graph: fx.Graph, name: str, env: dict[fx.Node, fx.Node], carried: int) -> fx.Graph:
        views: dict[fx.Node, set[fx.Node]] = {n: set() for n in graph.nodes}
        over: dict[fx.Node, fx.Node] = {}
        if name == self._program.name:
            views = {env[n]: {env[r] for r in roots} for n, roots in self._donation[0].items()}
            over = {env[out]: env[place] for out, place in self._donation[1].items()}
        inputs = [n for n in graph.nodes if n.op == "placeholder"]
        places = [n for n in inputs if "coordinate" not in n.meta]
        # The step's are the user's.
        known = set(inputs).difference(places if name == self._program.name else ())
        outer = OuterGraph(known, carried)
        for item in cut(graph, over, views):
            if isinstance(item, Piece):
                outer.add_piece(item, self._compiled(item, name))
                self.written |= {places.index(place) for place in item.writes.values()}
            else:
                outer.add(item)
        outer.graph.lint()
        return outer.graph

    def _compiled(self, piece: Piece, name: str) -> Callable[..., Any]:
        """The compiled code of a piece, made once for all that are the same."""
        key = signature(piece)
        if key not in self._pieces:
            hits = _torch.inductor_cache_hits()
            self._pieces[key] = compiled(piece, name)
            self.from_cache.append(_torch.inductor_cache_hits() > hits)
        return self._pieces[key]


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
    """A piece as a function of its operands in the memory order of their fake values."""
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
    """A compiled piece; what it returns is in the memory order of its fake values."""
    strides = [n.meta["val"].stride() for n in piece.outs]
    results = _results(piece)
    misplaced: list[int] | None = None

    def call(*operands: torch.Tensor) -> list[torch.Tensor]:
        nonlocal misplaced
        found = results(artifact(*operands), operands)
        if misplaced is None:  # once: the order is a property of the code
            misplaced = [i for i, x in enumerate(found) if strided(x, strides[i]) is not x]
        for i in misplaced:
            found[i] = strided(found[i], strides[i])
        return found

    return call


def _flat_call(artifact: Callable[..., Any], piece: Piece) -> Callable[..., Any]:
    """A compiled piece that takes and returns its values with one dim, scalars aside."""
    wide = [n.meta["val"].ndim > 0 for n in piece.inputs]
    wide_outs = [n.meta["val"].ndim > 0 for n in piece.outs if n not in piece.writes]
    results = _results(piece)

    def call(*operands: torch.Tensor) -> list[torch.Tensor]:
        shape = operands[wide.index(True)].shape
        flat = artifact(*(x.view(-1) if w else x for x, w in zip(operands, wide, strict=True)))
        return results([x.view(shape) if w else x for x, w in zip(flat, wide_outs, strict=True)], operands)

    return call


def _results(piece: Piece) -> Callable[..., list[torch.Tensor]]:
    """The results of a piece, in order: of what its code returns, and of the operands that it writes to."""
    fresh = [n for n in piece.outs if n not in piece.writes]
    if len(fresh) == len(piece.outs):
        return lambda found, operands: list(found)
    place = {n: (1, piece.inputs.index(piece.writes[n])) for n in piece.writes}
    where = [place.get(n) or (0, fresh.index(n)) for n in piece.outs]
    return lambda *sides: [sides[side][i] for side, i in where]
