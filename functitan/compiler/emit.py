"""Builds a lowered graph: local ops on local shapes, with explicit collectives.

Rank coordinates are 0-d integer inputs of the graph, never constants, so that the text is the same on every rank.
Collectives are torch's functional ones, with the mesh axis names as the group name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree

from functitan import _torch
from functitan.compiler.reshard import Move
from functitan.compiler.source import SourceLine
from functitan.sharding.layout import Dim, Layout
from functitan.sharding.op_rules.base import TensorType

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


@dataclass(frozen=True)
class Origin:
    """Where a lowered node comes from.

    Attributes:
        line: the user's line, or None.
        backward: whether it belongs to a gradient.
        why: for a reshard, what asked for it.
        param: the path of the parameter that it moves, if one.
        gather: whether it gathers a stored parameter for use.
    """

    line: SourceLine | None = None
    backward: bool = False
    why: str = ""
    param: str = ""
    gather: bool = False


class Constant:
    """A tensor that a graph holds."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.__name__ = "constant"

    def __call__(self) -> torch.Tensor:
        return self.tensor


class Emitter:
    """Appends local ops to a graph.

    Attributes:
        graph: the graph that is built.
        sizes: axis sizes of the mesh.
        origin: attached to the nodes that are made next.
    """

    def __init__(self, sizes: dict[str, int], mode: _torch.FakeTensorMode) -> None:
        self.graph = fx.Graph()
        self.sizes = sizes
        self.mode = mode
        self.origin = Origin()
        self.coordinates: dict[str, fx.Node] = {}
        for axis, n in sizes.items():
            if n > 1:
                node = self.graph.placeholder(f"coord_{axis}")
                node.meta["val"] = self.fake((), torch.int64)
                node.meta["coordinate"] = axis
                self.coordinates[axis] = node

    def fake(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A fake local tensor."""
        with self.mode:
            return torch.empty(tuple(shape), dtype=dtype)

    def placeholder(self, name: str, typ: TensorType, layout: Layout) -> fx.Node:
        """An input with a layout."""
        node = self.graph.placeholder(name)
        node.meta["val"] = self.fake(layout.local_shape, typ.dtype)
        self.annotate(node, layout, typ)
        return node

    def annotate(self, node: fx.Node, layout: Layout, typ: TensorType) -> None:
        """Note the layout and global type of a node's value."""
        node.meta["layout"], node.meta["type"] = layout, typ

    def constant(self, tensor: torch.Tensor) -> fx.Node:
        """A tensor that every rank holds whole."""
        node = self.graph.call_function(Constant(tensor), ())
        node.meta["val"] = self.fake(tensor.shape, tensor.dtype)
        node.meta["origin"] = self.origin
        return node

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """A local op; its fake value is computed from those of its operands."""
        node = self.graph.call_function(target, args, kwargs)
        node.meta["origin"] = self.origin
        read = lambda a: a.meta["val"] if isinstance(a, fx.Node) else a  # noqa: E731
        real_args, real_kwargs = _pytree.tree_map(read, (args, kwargs))
        with self.mode:
            node.meta["val"] = target(*real_args, **real_kwargs)
        return node

    def opaque(self, target: Callable[..., Any], args: tuple[Any, ...], value: Any) -> fx.Node:
        """A call whose fake value is given: of a lowered body."""
        node = self.graph.call_function(target, args)
        node.meta["origin"] = self.origin
        node.meta["val"] = value
        return node

    def global_index(self, dim: Dim, device: Any = None) -> fx.Node:
        """The global indices of a rank's part of a dim, as a 1-D int64 tensor."""
        options = {"dtype": torch.int64} | ({"device": device} if device is not None else {})
        strides: list[int] = []
        stride = 1
        for d in reversed(dim):
            strides.append(stride)
            stride *= d if isinstance(d, int) else self.sizes[d]
        index: fx.Node | None = None
        shape: list[int] = []
        offset: fx.Node | None = None
        for d, stride in zip(dim, reversed(strides), strict=True):
            if isinstance(d, str):
                part = self.call(aten.mul.Scalar, self.coordinates[d], stride)
                offset = part if offset is None else self.call(aten.add.Tensor, offset, part)
                continue
            row = self.call(aten.arange.start_step, 0, d * stride, stride, **options)
            shape.append(d)
            if index is None:
                index = row
            else:
                column = self.call(aten.reshape.default, index, [math.prod(shape[:-1]), 1])
                index = self.call(aten.add.Tensor, column, row)
        if index is None:
            index = self.call(aten.arange.start_step, 0, 1, 1, **options)
        elif len(shape) > 1:
            index = self.call(aten.reshape.default, index, [math.prod(shape)])
        return index if offset is None else self.call(aten.add.Tensor, index, offset)

    # --- moves -------------------------------------------------------------------------------------------------

    def move(self, x: fx.Node, move: Move) -> fx.Node:
        """One step of a reshard."""
        n = math.prod(self.sizes[a] for a in move.axes)
        if move.kind == "slice":
            return self._slice(x, move)
        if move.kind == "mask":
            return self._mask(x, move)
        if move.kind == "all_reduce":
            return self._collective(move, c10d.all_reduce.default, x, "sum", group(move.axes))
        if move.kind == "all_gather":
            full = self._collective(move, c10d.all_gather_into_tensor.default, x, n, group(move.axes))
            return self._join(full, move.before, move.after, move.axes, move.dim)
        parts = self._split(x, move.before, move.after, move.axes, move.dim)
        if move.kind == "reduce_scatter":
            out = self._collective(move, c10d.reduce_scatter_tensor.default, parts, "sum", n, group(move.axes))
            return self._shaped(out, move.after.local_shape)
        rows = parts.meta["val"].shape[0]
        out = self._collective(
            move, c10d.all_to_all_single.default, parts, [rows // n] * n, [rows // n] * n, group(move.axes)
        )
        between = self._between(move)
        return self._join(out, between, move.after, move.axes, move.source)

    def _collective(self, move: Move, target: Any, x: fx.Node, *args: Any) -> fx.Node:
        node = self.call(target, self.contiguous(x), *args)
        node.meta["collective"] = move
        return self.call(c10d.wait_tensor.default, node)

    def reduce(self, x: fx.Node, axes: tuple[str, ...], how: str, layout: Layout) -> fx.Node:
        """An all-reduce with another operation than a sum."""
        n = math.prod(self.sizes[a] for a in axes)
        val = x.meta["val"]
        nbytes = math.ceil(2 * val.numel() * (n - 1) / n * val.dtype.itemsize)
        boolean = val.dtype == torch.bool
        if boolean:  # no reduction of booleans in gloo or NCCL
            x = self.call(aten._to_copy.default, x, dtype=torch.uint8)
        node = self.call(c10d.all_reduce.default, self.contiguous(x), how, group(axes))
        node.meta["collective"] = Move("all_reduce", axes, layout, layout, 0, -1, nbytes)
        out = self.call(c10d.wait_tensor.default, node)
        return self.call(aten._to_copy.default, out, dtype=torch.bool) if boolean else out

    def contiguous(self, x: fx.Node) -> fx.Node:
        """A value in memory order, as collectives read it."""
        # A strided or expanded operand would send other values.
        if x.meta["val"].is_contiguous():
            return x
        return self.call(aten.clone.default, x, memory_format=torch.contiguous_format)

    def _shaped(self, x: fx.Node, shape: Sequence[int]) -> fx.Node:
        if tuple(x.meta["val"].shape) == tuple(shape):
            return x
        return self.call(aten.reshape.default, x, list(shape))

    def _cut(self, layout: Layout, axes: tuple[str, ...], dim: int) -> tuple[int, int]:
        """The local sizes before and after the digits of ``axes`` in a dim."""
        digits = layout.dims[dim]
        first, last = digits.index(axes[0]), digits.index(axes[-1])
        before = math.prod(d for d in digits[:first] if isinstance(d, int))
        after = math.prod(d for d in digits[last + 1 :] if isinstance(d, int))
        return before, after

    def _split(self, x: fx.Node, before: Layout, after: Layout, axes: tuple[str, ...], dim: int) -> fx.Node:
        """Bring the part of a dim that each rank of the axes gets to the front: [n * first, ...]."""
        n = math.prod(self.sizes[a] for a in axes)
        pre, post = self._cut(after, axes, dim)
        shape = list(x.meta["val"].shape)
        wide = [*shape[:dim], pre, n, post, *shape[dim + 1 :]]
        x = self._shaped(x, wide)
        front = math.prod(wide[: dim + 1])
        if front != 1:
            order = [dim + 1, *(i for i in range(len(wide)) if i != dim + 1)]
            x = self.call(aten.permute.default, x, order)
        rest = [s for i, s in enumerate(wide) if i != dim + 1]
        flat = [n * rest[0], *rest[1:]]
        return self._shaped(x, flat) if front == 1 else self.call(aten.reshape.default, x, flat)

    def _join(self, x: fx.Node, before: Layout, after: Layout, axes: tuple[str, ...], dim: int) -> fx.Node:
        """The inverse for gathered parts: put the leading ranks' digit into its place in a dim."""
        n = math.prod(self.sizes[a] for a in axes)
        pre, post = self._cut(before, axes, dim)
        local = list(before.local_shape)
        wide = [n, *local[:dim], pre, post, *local[dim + 1 :]]
        if math.prod(wide[1 : dim + 2]) != 1:
            x = self._shaped(x, wide)
            order = [*range(1, dim + 2), 0, *range(dim + 2, len(wide))]
            x = self.call(aten.permute.default, x, order)
        return self._shaped(x, after.local_shape)

    def _between(self, move: Move) -> Layout:
        """The layout of what an all-to-all received, with the joined axis still in its old place."""
        dims = list(move.before.dims)
        dims[move.dim] = move.after.dims[move.dim]
        gone = [d for d in dims[move.dim] if d not in move.axes]
        dims[move.dim] = tuple(gone)
        return Layout(tuple(dims))

    def _slice(self, x: fx.Node, move: Move) -> fx.Node:
        n = math.prod(self.sizes[a] for a in move.axes)
        pre, post = self._cut(move.after, move.axes, move.dim)
        shape = list(x.meta["val"].shape)
        wide = [*shape[: move.dim], pre, n, post, *shape[move.dim + 1 :]]
        index = self.coordinate(move.axes)
        row = self.call(aten.reshape.default, index, [1])
        x = self.call(aten.index_select.default, self._shaped(x, wide), move.dim + 1, row)
        return self._shaped(x, move.after.local_shape)

    def coordinate(self, axes: Sequence[str]) -> fx.Node:
        """The rank's index among the ranks of several axes, major to minor, as a 0-d integer."""
        index = self.coordinates[axes[0]]
        for axis in axes[1:]:
            scaled = self.call(aten.mul.Scalar, index, self.sizes[axis])
            index = self.call(aten.add.Tensor, scaled, self.coordinates[axis])
        return index

    def _mask(self, x: fx.Node, move: Move) -> fx.Node:
        first = self.call(aten.eq.Scalar, self.coordinates[move.axes[0]], 0)
        zero = self.call(aten.zeros_like.default, x)
        return self.call(aten.where.self, first, x, zero)


def group(axes: Sequence[str]) -> str:
    """The name of the group over some axes: the axis names, major to minor.

    >>> group(["data", "fsdp"])
    'data+fsdp'
    """
    return "+".join(axes)
