"""Bodies of shard_map: functions of local tensors.

In the global trace a call is one node forward and one backward; its shapes are found with every axis of size 1, where
the body is a function of global tensors. For a mesh, at lowering, the body is traced on local shapes, forward and
backward jointly.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from functitan import _spmd, _torch, tree
from functitan.compiler import markers, source
from functitan.compiler.trace import make_graph
from functitan.errors import TraceError
from functitan.sharding.mesh import Mesh
from functitan.sharding.shard_map import Boundary, InBody, LocalFunction, leaves_only_tensors, one_device

_numbers = itertools.count()
Type = tuple[tuple[int, ...], torch.dtype]


@dataclass(eq=False)
class LocalBody:
    """A shard_map body in a trace; types are global.

    Attributes:
        key: what nodes call it by.
        name: for messages.
        flat: flat local inputs -> flat local outputs.
        inputs, outputs: the boundaries of the leaves.
        paths: how messages name the outputs.
        input_dtypes: what the body is traced with.
        needs: which inputs have a gradient asked of them.
        output_types: shape and dtype of each output.
        differentiable: which outputs have a cotangent.
        gradient_of: the inputs that have a gradient, in the order of the gradients.
        wide: whether its floating dtypes are rewritten to float64 after tracing.
    """

    key: str
    name: str
    flat: Callable[..., list[torch.Tensor]]
    inputs: list[Boundary]
    input_dtypes: list[torch.dtype]
    needs: list[bool]
    outputs: list[Boundary] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    out_tree: Any = None
    output_types: list[Type] = field(default_factory=list)
    differentiable: list[bool] = field(default_factory=list)
    gradient_of: list[int] = field(default_factory=list)
    gradient_types: list[Type] = field(default_factory=list)
    wide: bool = False

    def axes(self, mesh: Mesh) -> tuple[tuple[str, int], ...]:
        """The axes that the body is local over: those that a spec names. Along others all ranks do the same."""
        named = {a for b in (*self.inputs, *self.outputs) for a in (*b.axes, *(n for n, _ in b.types))}
        return tuple((a, n) for a, n in mesh.axes if a in named)

    def widened(self, key: str, dtype: Callable[[torch.dtype], torch.dtype]) -> LocalBody:
        """The same body with other dtypes."""
        types = [[(s, dtype(d)) for s, d in row] for row in (self.output_types, self.gradient_types)]
        made = replace(self, key=key, output_types=types[0], gradient_types=types[1], wide=True)
        markers.BODIES[key] = made
        return made


class LocalCall(torch.autograd.Function):
    """A shard_map in a trace: one node forward, one node backward."""

    @staticmethod
    def forward(ctx: Any, body: LocalBody, *inputs: torch.Tensor) -> Any:
        *outs, token = markers.ops.local_map(list(inputs), body.key)
        ctx.body = body
        ctx.save_for_backward(token)
        ctx.mark_non_differentiable(*[o for o, d in zip(outs, body.differentiable, strict=True) if not d])
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> Any:
        body = ctx.body
        if torch.is_grad_enabled():
            raise TraceError(
                f"a second derivative through shard_map({body.name}): collectives of spmd_types have first derivatives. "
                "Take the second derivative of a function of global tensors."
            )
        (token,) = ctx.saved_tensors
        given = [c for c, d in zip(cotangents, body.differentiable, strict=True) if d]
        found = markers.ops.local_map_backward(token, given, body.key)
        gradients: list[torch.Tensor | None] = [None] * len(body.inputs)
        for i, g in zip(body.gradient_of, found, strict=True):
            gradients[i] = g
        return (None, *gradients)


def local_body(local: LocalFunction, args: tuple[Any, ...], mode: _torch.FakeTensorMode) -> LocalBody:
    """The body of a call; global output types and gradients are those with every axis of size 1."""
    leaves, in_tree = tree.flatten(args)
    for path, leaf in zip(tree.paths(args), leaves, strict=True):
        if not isinstance(leaf, torch.Tensor):
            raise TraceError(
                f"shard_map({local.name}): argument {path} is {leaf!r}; the arguments of a body are tensors. Close over "
                "a constant."
            )
    bounds = local.inputs(args)
    found: dict[str, Any] = {}

    def flat(*values: torch.Tensor) -> list[torch.Tensor]:
        out = local.f(*tree.unflatten(in_tree, values))
        found.update(tree=tree.structure(out), paths=tree.paths(out), outputs=local.outputs(out))
        return leaves_only_tensors(out, local.name)

    body = LocalBody(
        f"{local.name}_{next(_numbers)}",
        local.name,
        flat,
        bounds,
        [t.dtype for t in leaves],
        [t.requires_grad for t in leaves],
    )
    with _torch.outside_trace(mode), torch.set_grad_enabled(torch.is_grad_enabled()), one_device(body.name):
        inputs = [_fresh(tuple(t.shape), t.dtype, n) for t, n in zip(leaves, body.needs, strict=True)]
        with _Foreign(body.name, inputs), _said_of_one_device(body.name):
            outs = flat(*inputs)
        live = [o for o in outs if o.requires_grad]
        wanted = [i for i, n in enumerate(body.needs) if n]
        grads = (
            torch.autograd.grad(
                live,
                [inputs[i] for i in wanted],
                [torch.empty(o.shape, dtype=o.dtype) for o in live],
                allow_unused=True,
            )
            if live
            else ()
        )
    body.outputs, body.paths, body.out_tree = found["outputs"], found["paths"], found["tree"]
    body.output_types = [(tuple(o.shape), o.dtype) for o in outs]
    body.differentiable = [o.requires_grad for o in outs]
    for i, g in zip(wanted, grads, strict=False):
        if g is not None:
            body.gradient_of.append(i)
            body.gradient_types.append((tuple(g.shape), g.dtype))
    markers.BODIES[body.key] = body
    return body


@contextlib.contextmanager
def _said_of_one_device(name: str) -> Iterator[None]:
    """Errors of torch say what shapes the body saw."""
    try:
        yield
    except _torch.DATA_DEPENDENT_ERRORS:
        raise
    except RuntimeError as e:
        if source.raised_by_user(e.__traceback__):
            raise
        raise TraceError(
            f"{source.at(source.line_of(e.__traceback__))}shard_map({name}): with every axis of size 1, where a body is a "
            f"function of global tensors, torch refuses this line: {str(e).strip().rstrip('.')}. Write sizes that depend on "
            "the mesh by ft.axis_size(axis)."
        ) from None


class _Foreign(_torch.TorchDispatchMode):
    """Refuses tensors that a body closes over: nothing says how they are laid out."""

    def __init__(self, name: str, inputs: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._name = name
        self._known = {id(t): t for t in inputs}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for t in tree.leaves((args, kwargs or {})):
            if isinstance(t, _torch.FakeTensor) and id(t) not in self._known:
                raise TraceError(
                    f"shard_map({self._name}): the body closes over a tensor of shape {tuple(t.shape)}; nothing says how "
                    "it is laid out. Pass it as an argument, with a spec in in_specs."
                )
        out = func(*args, **(kwargs or {}))
        self._known.update({id(t): t for t in tree.leaves(out) if isinstance(t, torch.Tensor)})
        return out


@dataclass(eq=False)
class LocalGraph:
    """A body traced on local shapes.

    Attributes:
        graph: inputs, coordinates, cotangents -> outputs, gradients.
        inputs, coordinates, tangents: its placeholders; coordinates by axis.
        outs, gradients: its results.
    """

    graph: fx.Graph
    inputs: list[fx.Node]
    coordinates: dict[str, fx.Node]
    tangents: list[fx.Node]
    outs: list[fx.Node]
    gradients: list[fx.Node]


def trace_local(
    body: LocalBody,
    shapes: Sequence[Sequence[int]],
    axes: _spmd.Axes,
    mode: _torch.FakeTensorMode,
    reduce_dtype: torch.dtype,
) -> LocalGraph:
    """Trace forward and backward of a body on local shapes; sums of backward are in ``reduce_dtype`` at least."""
    live = [a for a, n in axes if n > 1]
    n_in = len(shapes)

    def run(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        coordinates = dict(zip(live, values[n_in:], strict=True))
        with _spmd.Ranked(axes, coordinates), activate_body(body, axes, coordinates):
            return body.flat(*values[:n_in])

    def joint(*values: torch.Tensor) -> list[torch.Tensor]:
        given, cotangents = values[: n_in + len(live)], list(values[n_in + len(live) :])
        outs = run(given)
        pairs = zip([o for o, d in zip(outs, body.differentiable, strict=True) if d], cotangents, strict=True)
        with_gradient = [(o, c) for o, c in pairs if o.requires_grad]
        if not body.gradient_of or not with_gradient:
            return [*outs, *(torch.zeros_like(given[i]) for i in body.gradient_of)]
        wanted = [given[i] for i in body.gradient_of]
        coordinates = dict(zip(live, given[n_in:], strict=True))
        with _spmd.Ranked(axes, coordinates):
            found = torch.autograd.grad(
                [o for o, _ in with_gradient], wanted, [c for _, c in with_gradient], allow_unused=True
            )
        return [*outs, *(torch.zeros_like(x) if g is None else g for x, g in zip(wanted, found, strict=True))]

    with mode, _spmd.groups(axes, reduce_dtype), torch.enable_grad():
        inputs = [_fresh(tuple(s), d, n) for s, d, n in zip(shapes, body.input_dtypes, body.needs, strict=True)] + [
            torch.empty((), dtype=torch.int64) for _ in live
        ]
        probe = run(inputs)
        tangents = [torch.empty(o.shape, dtype=o.dtype) for o, d in zip(probe, body.differentiable, strict=True) if d]
        graph = make_graph(joint, [*inputs, *tangents], InBody(body.name, dict(axes), {}))
    if body.wide:
        from functitan.compiler.precision import graph_to_float64

        graph = graph_to_float64(graph, mode)
    places = [n for n in graph.nodes if n.op == "placeholder"]
    results: Any = next(n for n in graph.nodes if n.op == "output").args[0]
    n_outs = len(body.outputs)
    return LocalGraph(
        graph,
        places[:n_in],
        dict(zip(live, places[n_in : n_in + len(live)], strict=True)),
        places[n_in + len(live) :],
        list(results[:n_outs]),
        list(results[n_outs:]),
    )


def activate_body(body: LocalBody, axes: _spmd.Axes, coordinates: dict[str, torch.Tensor]) -> Any:
    """Annotations inside this block are those of a body."""
    from functitan.annotations import activate

    return activate(InBody(body.name, dict(axes), coordinates))


def _fresh(shape: tuple[int, ...], dtype: torch.dtype, needs: bool) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype).requires_grad_(needs)
