"""``ft.shard_map``: a function of local tensors with explicit collectives, inside a function of global ones.

A body is written for axes of any size; the mesh is chosen when the function around it is compiled. With every axis of
size 1 the body is the global function itself, and that is what runs on plain tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from spmd_types.types import I, P, PartitionSpec, R, SpmdType, V

from functitan import _spmd, tree
from functitan.annotations import activate, active
from functitan.annotations import scan as plain_scan
from functitan.errors import ShardingError, TraceError, TreeError, listed

#: What an axis that splits no dim may be, at an input and at an output.
_INPUT, _OUTPUT = (R, I, P), (I, P)


@dataclass(frozen=True)
class Boundary:
    """One entry of in_specs or out_specs.

    Attributes:
        entries: mesh axes per dim, or None: no dim is split.
        types: other types than the usual one of axes that split no dim, by name.
    """

    entries: tuple[Any, ...] | None
    types: tuple[tuple[str, Any], ...] = ()

    def of(self, kind: Any) -> tuple[str, ...]:
        """The axes with a type."""
        return tuple(a for a, t in self.types if t is kind)

    @property
    def axes(self) -> set[str]:
        """The axes that split dims."""
        return {a for e in self.entries or () for a in ((e,) if isinstance(e, str) else e or ())}

    def spec(self, ndim: int) -> PartitionSpec:
        """One entry per dim."""
        return PartitionSpec(*([None] * ndim if self.entries is None else self.entries))


@dataclass(frozen=True)
class LocalFunction:
    """What a shard_map call is made of."""

    f: Callable[..., Any]
    in_specs: Any
    out_specs: Any
    name: str

    def inputs(self, args: tuple[Any, ...]) -> list[Boundary]:
        """The boundary of each input leaf."""
        return boundaries(self.in_specs, args, f"in_specs of shard_map({self.name})", _INPUT)

    def outputs(self, out: Any) -> list[Boundary]:
        """The boundary of each output leaf."""
        return boundaries(self.out_specs, out, f"out_specs of shard_map({self.name})", _OUTPUT)


def shard_map(f: Callable[..., Any], *, in_specs: Any, out_specs: Any, name: str | None = None) -> Callable[..., Any]:
    """A function of global tensors from one of local tensors, as JAX's ``shard_map``.

    The body calls the collectives of spmd_types with names of mesh axes and explicit types; a name such as
    ``"data+fsdp"`` takes several axes together, in the order of the mesh. When the function around
    it is compiled, the body is type-checked by spmd_types, once per mesh and shapes.

    Args:
        f: a pure function of local tensors and pytrees of them. It closes over no tensors.
        in_specs: a PartitionSpec of mesh axes per argument, or a tree of them; one for all leaves below it. An axis
            that this spec does not name, and another does, is R: the gradient leaves as a pending sum. Write
            ``spmd.SpmdType({"tensor": spmd.I}, P(...))`` for another type. Along an axis that no spec of the call
            names all ranks run the body alike, and no collective may use it.
        out_specs: the same for the result. An axis that this spec does not name, and another does, must be I; P only
            where a SpmdType says so.
        name: shown in messages; by default the function's name.

    >>> import spmd_types as spmd
    >>> import functitan as ft
    >>> def total(x):
    ...     return spmd.all_reduce(x.sum(), "data", src=spmd.V, dst=spmd.I)
    >>> f = ft.shard_map(total, in_specs=ft.P("data"), out_specs=ft.P())
    >>> f(torch.arange(4.0))
    tensor(6.)
    >>> mesh = ft.make_mesh({"data": 2}, simulate=True)
    >>> ft.compile(f, mesh=mesh)(torch.arange(4.0))
    tensor(6.)
    """
    local = LocalFunction(f, in_specs, out_specs, name or getattr(f, "__name__", "body"))

    def call(*args: Any) -> Any:
        annotator = active()
        if annotator is not None:
            return annotator.local_map(local, args)
        return plain(local, args)

    return call


def plain(local: LocalFunction, args: tuple[Any, ...]) -> Any:
    """The body with every axis of size 1."""
    local.inputs(args)
    leaves, in_tree = tree.flatten(args)
    found: list[Any] = []

    def run(*flat: Any) -> list[torch.Tensor]:
        with one_device(local.name):
            out = local.f(*tree.unflatten(in_tree, flat))
        local.outputs(out)
        found[:] = [tree.structure(out)]
        return leaves_only_tensors(out, local.name)

    outs: Any = _OneDevice.apply(run, local.name, *leaves)
    return tree.unflatten(found[0], outs)


@contextmanager
def one_device(name: str) -> Iterator[None]:
    """Run a body inside this block with every axis of size 1."""
    with _spmd.groups(None), _spmd.Ranked(None, {}), activate(InBody(name, None, {})):
        yield


class _OneDevice(torch.autograd.Function):
    """A body on plain tensors. Its backward calls collectives too, and so must find their groups."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., list[torch.Tensor]], name: str, *flat: Any) -> Any:
        with torch.enable_grad():
            ctx.inputs = [
                x.detach().requires_grad_(n) if isinstance(x, torch.Tensor) else x
                for x, n in zip(flat, ctx.needs_input_grad[2:], strict=True)
            ]
            ctx.outs = run(*ctx.inputs)
        ctx.name = name
        outs = [o.detach() for o in ctx.outs]
        ctx.mark_non_differentiable(*[d for o, d in zip(ctx.outs, outs, strict=True) if not o.requires_grad])
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> Any:
        live = [(o, c) for o, c in zip(ctx.outs, cotangents, strict=True) if o.requires_grad]
        wanted = [x for x in ctx.inputs if isinstance(x, torch.Tensor) and x.requires_grad]
        with one_device(ctx.name):
            found = torch.autograd.grad([o for o, _ in live], wanted, [c for _, c in live], allow_unused=True)
        given = iter(found)
        row = [next(given) if isinstance(x, torch.Tensor) and x.requires_grad else None for x in ctx.inputs]
        return (None, None, *row)


def axis_index(axis: str) -> torch.Tensor:
    """Inside a shard_map body: this rank's index on a mesh axis, or on several ("data+fsdp"), as a 0-d integer."""
    return _body("axis_index").index(axis)


def axis_size(axis: str) -> int:
    """Inside a shard_map body: the size of a mesh axis, or of several together ("data+fsdp")."""
    return _body("axis_size").size(axis)


def _body(what: str) -> InBody:
    body = active()
    if not isinstance(body, InBody):
        raise ShardingError(
            f"{what} was called outside a shard_map body; a function of global tensors has no place on the mesh."
        )
    return body


class InBody:
    """What annotations are inside a body: they speak of global tensors, and here are none.

    Args:
        name: the body's.
        sizes: axis sizes; None where each axis has size 1.
        coordinates: the rank's index by axis, of axes larger than 1.
    """

    def __init__(self, name: str, sizes: dict[str, int] | None, coordinates: dict[str, torch.Tensor]) -> None:
        self._name, self._sizes, self._coordinates = name, sizes, coordinates

    def size(self, axis: str) -> int:
        if self._sizes is None:
            return 1
        for part in axis.split(_spmd.JOIN):
            if part not in self._sizes:
                raise ShardingError(unnamed(self._name, part, list(self._sizes)))
        return math.prod(self._sizes[part] for part in axis.split(_spmd.JOIN))

    def index(self, axis: str) -> torch.Tensor:
        self.size(axis)
        return _spmd.joint_index(axis, self._sizes or {}, self._coordinates)

    def constrain(self, x: torch.Tensor, spec: Any, pending: Any, what: str = "") -> torch.Tensor:
        raise ShardingError(
            f"constrain in the shard_map body {self._name}: its tensors are local and have no spec. Call a collective, "
            "or write the spec in in_specs or out_specs."
        )

    def constrain_like(self, x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return x

    def local_map(self, local: LocalFunction, args: tuple[Any, ...]) -> Any:
        raise ShardingError(
            f"shard_map({local.name}) in the shard_map body {self._name}: its tensors are local already. Call "
            f"{local.name} itself."
        )

    def checkpoint_name(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x

    def region(self, f: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        return f(*args)

    def scan(self, f: Callable[..., Any], init: Any, xs: Any, length: int, options: dict[str, Any]) -> Any:
        def step(carry: Any, x: Any) -> Any:
            with activate(self):
                return f(carry, x)

        with activate(None):
            return plain_scan(step, init, xs, length)

    def use_params(self, params: Any, pending: tuple[str, ...]) -> Any:
        return params

    def mark_gradients(self, gradients: Any, params: Any) -> Any:
        return gradients


def boundaries(specs: Any, value: Any, what: str, allowed: Sequence[Any]) -> list[Boundary]:
    """Specs laid over the leaves of a value: one above several leaves is that of each."""
    if isinstance(specs, PartitionSpec | SpmdType):
        return [_boundary(specs, what, allowed)] * len(tree.leaves(value))
    mine, theirs = tree.children(specs), tree.children(value)
    if mine is None or theirs is None or mine[1] != theirs[1]:
        said = f"the keys {theirs[1]}" if theirs is not None else f"a {type(value).__name__}"
        raise TreeError(
            f"{what}: {specs!r} stands where the value has {said}. Write one PartitionSpec for all leaves below, or a "
            "tree of the same keys."
        )
    return [b for s, v in zip(mine[0], theirs[0], strict=True) for b in boundaries(s, v, what, allowed)]


def _boundary(spec: PartitionSpec | SpmdType, what: str, allowed: Sequence[Any]) -> Boundary:
    if isinstance(spec, PartitionSpec):
        return Boundary(tuple(spec))
    entries = None if spec.partition_spec is None else tuple(spec.partition_spec)
    types = []
    for axis, kind in spec.local_type.items():
        if kind is V and entries is not None:
            continue
        if not isinstance(axis, str) or kind not in allowed:
            names = " or ".join(t.name for t in allowed)
            raise ShardingError(
                f"{what} gives axis {axis!r} the type {kind}; a type here is {names} of a mesh axis's name. Name an axis "
                "that splits a dim in the PartitionSpec."
            )
        types.append((axis, kind))
    return Boundary(entries, tuple(types))


def unnamed(name: str, axis: str, axes: Sequence[str]) -> str:
    """The message for an axis that a body uses and no spec of its call names."""
    return (
        f'the shard_map body {name} uses axis "{axis}", and no spec of it does (they name {listed(axes)}): over such an '
        f'axis all ranks run the body alike. Name "{axis}" on a dim in in_specs, or write '
        f'spmd.SpmdType({{"{axis}": spmd.R}}, P(...)) for an input that all ranks along it have whole.'
    )


def leaves_only_tensors(out: Any, name: str) -> list[torch.Tensor]:
    """The leaves of a body's result."""
    for path, leaf in zip(tree.paths(out), tree.leaves(out), strict=True):
        if not isinstance(leaf, torch.Tensor):
            raise TraceError(
                f"shard_map({name}): output {path or 'value'} is {leaf!r}; the outputs of a body are tensors."
            )
    return tree.leaves(out)
