"""Trace a function on fake global tensors into one ATen graph.

The trace is global and knows no mesh: annotations become nodes (``functitan.constrain`` and friends) that the
lowering reads. Every node remembers the user's line it comes from, and whether it belongs to backward; nodes of
backward take the line of the forward op that they differentiate.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from functitan import _torch, tree
from functitan.annotations import Annotator, activate
from functitan.compiler import markers, nodes, source
from functitan.compiler.decompose import decompositions
from functitan.compiler.explain import explained
from functitan.compiler.functionalize import functionalize, is_mutable
from functitan.errors import TraceError, raise_batch
from functitan.ops.global_rng import draws, global_rng_error
from functitan.ops.intercept import OwnOps


@dataclass
class Traced:
    """A function's global graph.

    Attributes:
        graph: the ATen graph; its placeholders are the flat inputs.
        inputs: a name per placeholder, for messages: the path of the leaf.
        out_tree: the structure of the result.
        bodies: traced bodies of regions and scans by key, nested ones included.
        fake_mode: the mode that the fake values of the graph belong to.
        name: the function's name.
    """

    graph: fx.Graph
    inputs: list[str]
    out_tree: tree.TreeDef
    fake_mode: _torch.FakeTensorMode
    name: str
    bodies: dict[str, Any] = field(default_factory=dict)


class Recorder(_torch.TorchDispatchMode):
    """Notes the user's line of every traced node, and refuses writes to what the function did not make itself."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: dict[int, source.SourceLine | None] = {}
        self._made: set[int] = set()
        self._alive: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        before = _torch.last_traced_node()
        number = _torch.backward_sequence_number()
        if func._schema.is_mutable:
            self._refuse_foreign_writes(func, args, kwargs)
        out = func(*args, **kwargs)
        self._note_made(func, args, kwargs, out)
        node = _torch.last_traced_node()
        if node is None or node is before:
            return out
        if number is None:
            line = source.current_line()
            self._lines[_torch.next_sequence_number() - 1] = line
        else:
            line = self._lines.get(number)
        while node is not None and node is not before and node.op != "root":
            node.meta.setdefault("line", line)
            node.meta.setdefault("backward", number is not None)
            node = node.prev
        return out

    def _note_made(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Remember what the function makes: not views of what it got, nor what an annotation, an identity, gives."""
        if func in markers.IDENTITIES:
            return
        given = {t.untyped_storage()._cdata for t in tree.leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for t in tree.leaves(out):
            if isinstance(t, torch.Tensor) and t.untyped_storage()._cdata not in given:
                self._made.add(t.untyped_storage()._cdata)
                self._alive.append(t)

    def _refuse_foreign_writes(self, func: Any, args: Any, kwargs: Any) -> None:
        for i, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            if isinstance(value, torch.Tensor) and value.untyped_storage()._cdata not in self._made:
                name = func._schema.name.split("::")[-1]
                pure = name.removesuffix("_")
                instead = (
                    f"x = x.{pure}(...)"
                    if pure != name and hasattr(torch.Tensor, pure)
                    else "torch.where(mask, new, x), x.index_put(...) or x.slice_scatter(...) for a part of it"
                )
                raise TraceError(
                    f"{source.at(source.current_line())}{name} writes into a tensor of shape {tuple(value.shape)} that "
                    "the "
                    "function did not make: an argument, a captured tensor, or one of these after ft.constrain. "
                    "Compiled "
                    f"functions are pure; write the form that returns a new tensor: {instead}."
                )


def abstract(rows: Sequence[tuple[str, Any]], name: str, mode: _torch.FakeTensorMode) -> list[torch.Tensor]:
    """Fake tensors with the global shapes and dtypes of input leaves, given with their paths.

    Raises:
        TraceError: leaves without shape and dtype: numbers and strings are configuration, not state.
    """
    problems = [
        f"argument {path} of {name} is {leaf!r} of type {type(leaf).__name__}; the leaves of a compiled function's "
        "arguments are tensors or Arrays. Write torch.tensor(...) for a number that changes between calls, or close "
        "over "
        "one that does not."
        for path, leaf in rows
        if not isinstance(getattr(leaf, "dtype", None), torch.dtype) or getattr(leaf, "shape", None) is None
    ]
    raise_batch(TraceError, problems, f"the arguments of {name}")
    with mode:
        return [
            torch.empty(tuple(leaf.shape), dtype=leaf.dtype, device=getattr(leaf, "device", None) or "cpu")
            for _, leaf in rows
        ]


def make_graph(f: Callable[..., Sequence[Any]], inputs: Sequence[torch.Tensor], annotator: Annotator) -> fx.Graph:
    """Trace a function of flat fake tensors; the one place where a graph is made."""

    def recorded(*flat: torch.Tensor) -> list[Any]:
        with activate(annotator), OwnOps(), Recorder():
            return list(f(*flat))

    module = _torch.make_fx(recorded, decomposition_table=decompositions(), _allow_non_fake_inputs=True)(*inputs)
    if is_mutable(module.graph):
        module = functionalize(module, inputs, decompositions())
    nodes.lift_constants(module)
    graph = module.graph
    for node in graph.nodes:
        if draws(node.target) and not markers.is_marker(node.target):
            line = node.meta.get("line")
            raise TraceError(f"{source.at(line)}{global_rng_error(str(node.target))}")
    nodes.drop_dead(graph)
    return graph


def argument_names(f: Callable[..., Any], n: int) -> list[str]:
    """The names of a function's first ``n`` parameters, for messages and paths."""
    try:
        parameters = inspect.signature(f).parameters
    except (TypeError, ValueError):
        parameters = {}
    positional = [p.name for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return [positional[i] if i < len(positional) else f"arg{i}" for i in range(n)]


def trace(f: Callable[..., Any], args: Sequence[Any], names: Sequence[str] | None = None) -> Traced:
    """Trace ``f(*args)`` on global fake tensors.

    Args:
        f: a pure function of pytrees of tensors.
        args: pytrees whose leaves have a shape and a dtype: tensors, Arrays, ShapeDtypeStructs.
        names: argument names for messages.

    Raises:
        TraceError: the function cannot be traced; the message names the user's line.
    """
    from functitan.compiler.region import TracingAnnotator

    name = getattr(f, "__name__", type(f).__name__)
    names = names or argument_names(f, len(args))
    rows = [
        ("/".join([n, p]) if p else n, leaf)
        for n, a in zip(names, args, strict=True)
        for p, leaf in tree.flatten_with_paths(a)[0]
    ]
    mode = _torch.FakeTensorMode(allow_non_fake_inputs=True)
    fakes = abstract(rows, name, mode)
    in_tree = tree.structure(tuple(args))
    traced = Traced(fx.Graph(), [p for p, _ in rows], in_tree, mode, name)

    def flat(*values: torch.Tensor) -> list[Any]:
        out = f(*tree.unflatten(in_tree, values))
        leaves, traced.out_tree = tree.flatten(out)
        problems = [
            f"output {path or 'value'} of {name} is {leaf!r} of type {type(leaf).__name__}; the leaves of a compiled "
            "function's result are tensors. Return torch.tensor(...), or keep the value outside."
            for path, leaf in zip(tree.paths(out), leaves, strict=True)
            if not isinstance(leaf, torch.Tensor)
        ]
        raise_batch(TraceError, problems, f"the outputs of {name}")
        return leaves

    def run() -> fx.Graph:
        with mode:
            return make_graph(flat, fakes, TracingAnnotator(traced))

    traced.graph = explained(name, run)
    return traced
