"""The one place where private spmd_types APIs are used, so that an upgrade of it is one file's work.

A body runs here on the local tensors of no rank in particular: its process groups have names (the mesh axes) and
sizes, so no default group is needed. What it asks of a rank's place is noted by the axis, never answered by a number.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from spmd_types import _collectives, _local, _mesh_axis, _state
from spmd_types._checker import typecheck as _typecheck
from spmd_types._dist import set_dist
from spmd_types._mesh_axis import MeshAxis, flatten_axes
from spmd_types._traceback import traceback_filtering
from spmd_types._type_attr import maybe_get_axis_local_type as type_of

from functitan import _torch
from functitan.errors import TraceError

__all__ = ["ONE", "Ranked", "groups", "placed", "type_of", "typecheck"]
c10d = torch.ops._c10d_functional

Axes = Sequence[tuple[str, int]]
#: Between the names of axes that a collective takes together, in mesh order.
JOIN = "+"
#: The group of every axis of size 1.
ONE = "functitan:one"
#: Ops of spmd_types that take a rank as a number.
SPLIT = torch.ops.spmd_types.replicate_to_varying.default
PLACE = torch.ops.spmd_types.varying_to_partial.default
FIRST = torch.ops.spmd_types.replicate_to_partial.default
#: What reads the dtype options of a call, in each module of collectives.
_OPTIONS = "_process_dtype_options"


class _Dist:
    """What spmd_types asks torch.distributed, answered without processes: groups are axis names.

    Writes into given tensors become functional collectives, which is what a trace can hold.
    """

    ReduceOp = torch.distributed.ReduceOp
    ProcessGroup = torch.distributed.ProcessGroup

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self._sizes = sizes
        self._names = list(sizes)

    def get_world_size(self, group: str) -> int:
        return self._sizes[group]

    def get_rank(self, group: str) -> int:
        return self._names.index(group)  # not a rank: ops that take it are replaced, and know the axis by it

    def all_reduce(self, x: torch.Tensor, op: Any = None, group: str = ONE) -> None:
        x.copy_(c10d.wait_tensor(c10d.all_reduce(x, "sum", group)))

    def all_gather_into_tensor(self, out: torch.Tensor, x: torch.Tensor, group: str) -> None:
        out.copy_(c10d.wait_tensor(c10d.all_gather_into_tensor(x.contiguous(), self._sizes[group], group)))

    def reduce_scatter_tensor(self, out: torch.Tensor, x: torch.Tensor, op: Any, group: str) -> None:
        n = self._sizes[group]
        out.copy_(c10d.wait_tensor(c10d.reduce_scatter_tensor(x.contiguous(), "sum", n, group)))

    def all_to_all(self, outs: list[torch.Tensor], parts: list[torch.Tensor], group: str) -> None:
        n = self._sizes[group]
        shapes = {tuple(p.shape) for p in (*parts, *outs)}
        if len(parts) != n or len(shapes) != 1:
            where = f'axis "{group}"' if group != ONE else "an axis (on one device, where shapes are found)"
            raise TraceError(
                f"all_to_all sends {len(parts)} parts of shapes {sorted(shapes)} over {where} of size {n}; it sends one "
                "part of one shape to each rank. Use src=S(i), dst=S(j), which cuts a dim by the axis's size."
            )
        sent = torch.stack([p.contiguous() for p in parts])
        outs[:] = c10d.wait_tensor(c10d.all_to_all_single(sent, [1] * n, [1] * n, group)).unbind(0)

    def __getattr__(self, name: str) -> Any:
        raise TraceError(
            f"a collective with split_sizes needs torch.distributed.{name}, which depends on the rank; a shard_map body "
            "is the same on all ranks. Pad to equal parts, and send the counts as data."
        )


def _no_rank(group: Any = None) -> int:
    """Stands for ``torch.distributed.get_rank`` while a body runs: its number would be part of the program."""
    raise TraceError(
        "torch.distributed.get_rank() in a shard_map body: a program is the same on all ranks. Write "
        "ft.axis_index(axis), a 0-d tensor, and torch.where for a choice."
    )


class _AnyAxis(dict[str, Any]):
    """The axes by name where each has size 1, whatever it is called."""

    def get(self, name: str, default: Any = None) -> Any:
        return MeshAxis.of(1, 1)


class _Contiguous:
    """An autograd function of spmd_types that asserts a contiguous operand, given one.

    A gradient such as that of a bare sum is expanded, and no user can make it contiguous.
    """

    def __init__(self, function: Any) -> None:
        self._function = function

    def apply(self, x: torch.Tensor, *args: Any) -> Any:
        return self._function.apply(x.contiguous(), *args)


class Ranked(_torch.TorchDispatchMode):
    """Collectives over axes of size 1 are copies; ops that take a rank are computed from the rank's coordinate.

    Args:
        axes: name and size of the axes, or None where each has size 1.
        coordinates: 0-d integers by axis name, of axes larger than 1.
    """

    def __init__(self, axes: Axes | None, coordinates: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._names = list(_group_sizes(axes))
        self._sizes = dict(axes or ())
        self._coordinates = coordinates

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "_c10d_functional" and args[-1] == ONE:
            return args[0].clone()
        if func in (SPLIT, PLACE, FIRST):
            axis = self._names[args[1] if func is FIRST else args[3]]
            return placed(func, axis, joint_index(axis, self._sizes, self._coordinates), args)
        return func(*args, **(kwargs or {}))


def joint_index(axis: str, sizes: Mapping[str, int], coordinates: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The rank's index on an axis, or on several together, the first the major one; 0 where the size is 1."""
    index = torch.zeros((), dtype=torch.int64)
    for part in axis.split(JOIN):
        if part in coordinates:
            index = index * sizes[part] + coordinates[part]
    return index


def _group_sizes(axes: Axes | None) -> dict[str, int]:
    """The size of every group by name: of single axes, of several together, and of axes of size 1."""
    sizes = {a: n for a, n in axes or () if n > 1}
    several = (c for k in range(2, len(sizes) + 1) for c in itertools.combinations(sizes, k))
    return {**sizes, **{JOIN.join(c): math.prod(sizes[a] for a in c) for c in several}, ONE: 1}


def placed(func: Any, axis: str, index: torch.Tensor, args: tuple[Any, ...]) -> torch.Tensor:
    """What an op that takes a rank gives, from the rank's coordinate as a tensor."""
    x = args[0]
    if func is FIRST:
        return torch.where(index == 0, x, torch.zeros_like(x))
    n, dim, stack = args[1], args[2], args[4]
    if func is SPLIT:
        dim %= x.ndim
        if x.shape[dim] % n:
            raise TraceError(
                f'convert over axis "{axis}" of size {n} splits dim {dim} of size {x.shape[dim]}, which does not divide. '
                f"Use a size such as {-(-x.shape[dim] // n) * n}."
            )
        wide = x if stack else x.reshape(*x.shape[:dim], n, x.shape[dim] // n, *x.shape[dim + 1 :])
        return wide.index_select(dim, index.reshape(1)).squeeze(dim)
    dim %= x.ndim + bool(stack)
    mine = (torch.arange(n) == index).reshape(n, *[1] * (x.ndim - dim))
    wide = x.unsqueeze(dim)
    wide = torch.where(mine, wide, torch.zeros_like(wide))
    return wide if stack else wide.reshape(*x.shape[:dim], n * x.shape[dim], *x.shape[dim + 1 :])


@contextlib.contextmanager
def groups(axes: Axes | None, reduce_dtype: torch.dtype = torch.float32) -> Iterator[None]:
    """Collectives of spmd_types take the names of these axes inside this block; None: any name, of size 1.

    What the backward of a collective adds up over ranks it adds up in at least ``reduce_dtype``, unless the call says
    otherwise.
    """
    sizes = {a: n for a, n in axes or () if n > 1}
    names: dict[str, Any] = {} if axes is not None else _AnyAxis()
    of_axis: dict[Any, str] = {MeshAxis.of(1, 1): ONE}
    stride = 1
    for a, n in reversed(axes or ()):
        names[a] = MeshAxis.of(n, stride if n > 1 else 1)
        of_axis[names[a]] = a if n > 1 else ONE
        stride *= n
    every = [a for a, _ in axes or ()]
    for row in (c for k in range(2, len(every) + 1) for c in itertools.combinations(every, k)):
        live = [a for a in row if a in sizes]
        names[JOIN.join(row)] = flatten_axes(tuple(names[a] for a in live)) if live else MeshAxis.of(1, 1)
        if len(live) > 1:
            of_axis[names[JOIN.join(row)]] = JOIN.join(live)
    if axes is not None:
        names[ONE] = MeshAxis.of(1, 1)  # collectives name their group again, and in backward
    group_sizes = _group_sizes(axes)
    made = {name: _torch.placeholder_group(n) for name, n in group_sizes.items()}
    known, reduce = dict(_mesh_axis._mesh_axis_names), _collectives._AllReduce
    options = getattr(_collectives, _OPTIONS)
    for name, group in made.items():  # torch keeps only a weak reference
        _torch.register_group(name, group)
    set_dist(_Dist(group_sizes))
    get_rank, torch.distributed.get_rank = torch.distributed.get_rank, _no_rank
    _state._push_mesh(frozenset(names[a] for a in sizes), names, of_axis)  # type: ignore[arg-type]
    # Messages name axes by this table, which torch's groups fill with descriptions of their own.
    _mesh_axis._mesh_axis_names.clear()
    _mesh_axis._mesh_axis_names.update({names[a]: {a} for a in sizes})
    _collectives._AllReduce = _Contiguous(reduce)  # type: ignore[misc, assignment]
    for module in (_collectives, _local):
        setattr(module, _OPTIONS, _reduced_in(reduce_dtype, options))
    try:
        with _torch.quiet_warnings():
            yield
    finally:
        _collectives._AllReduce = reduce  # type: ignore[misc]
        for module in (_collectives, _local):
            setattr(module, _OPTIONS, options)
        _mesh_axis._mesh_axis_names.clear()
        _mesh_axis._mesh_axis_names.update(known)
        _state._pop_mesh()
        set_dist(None)
        torch.distributed.get_rank = get_rank
        for name in made:
            _torch.unregister_group(name)


def _reduced_in(dtype: torch.dtype, process: Any) -> Any:
    """spmd_types' reading of dtype options, with a dtype for the sums of backward."""

    def read(op_dtype: Any, out_dtype: Any, backward_options: Any, **rest: Any) -> Any:
        given = dict(backward_options or {})
        if rest["backward_has_reduction"] and "op_dtype" not in given:
            given["op_dtype"] = torch.promote_types(out_dtype or op_dtype or rest["input_dtype"], dtype)
        return process(op_dtype, out_dtype, given, **rest)

    return read


@contextlib.contextmanager
def typecheck() -> Iterator[None]:
    """Check R, I, V and P of every op in this block."""
    with _typecheck(strict_mode="strict", local=True), traceback_filtering("off"):
        yield
