"""Reductions: sums are contractions; a maximum over a split dim is a local maximum and a reduction of maxima."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from functitan.sharding.op_rules.base import Call, Decompose, Equation, Label, Rule, rule
from functitan.sharding.op_rules.labels import normal_dims

aten = torch.ops.aten
_FIRST = (frozenset({0}),)


def reduction(call: Call, dims: Sequence[int] | None, *, reduce: str, whole: bool = False) -> Equation:
    """The labels of a reduction over ``dims`` (None or empty: all), with or without kept dims.

    Args:
        whole: the reduced dims must not be split.
    """
    x, out = call.operands[0], call.outputs[0]
    gone = normal_dims(dims, x.ndim)
    labels: list[Label] = []
    kept: list[Label] = []
    keepdim = out.ndim == x.ndim
    for d, size in enumerate(x.shape):
        label: Label = None if size == 1 else "_" if whole and d in gone else f"d{d}"
        labels.append(label)
        if d not in gone:
            kept.append(label)
        elif keepdim:
            kept.append(None)
    floats = out.dtype.is_floating_point or out.dtype.is_complex
    linear = _FIRST if reduce == "sum" and (floats or not x.dtype.is_floating_point) and x.dtype != torch.bool else ()
    outputs = tuple(tuple(kept) for _ in call.outputs)
    return Equation((tuple(labels),), outputs, linear, reduce)


def _dims(call: Call) -> list[int] | None:
    dim = call.argument("dim")
    if dim is None:
        return None
    return [dim] if isinstance(dim, int) else list(dim)


@rule(aten.sum.default, aten.sum.dim_IntList)
def sum_(call: Call) -> Rule:
    return reduction(call, _dims(call), reduce="sum")


@rule(aten.count_nonzero.default, aten.count_nonzero.dim_IntList)
def count(call: Call) -> Rule:
    """A sum, though not of what it reads."""
    return replace(reduction(call, _dims(call), reduce="sum"), linear=())


@rule(aten.amax.default, aten.max.default, aten.any.default, aten.any.dim, aten.any.dims)
def largest(call: Call) -> Rule:
    return reduction(call, _dims(call), reduce="max")


@rule(aten.amin.default, aten.min.default, aten.all.default, aten.all.dim, aten.all.dims)
def smallest(call: Call) -> Rule:
    return reduction(call, _dims(call), reduce="min")


@rule(aten.prod.default, aten.prod.dim_int)
def product(call: Call) -> Rule:
    return reduction(call, _dims(call), reduce="product")


# --- where the place is asked for, too -------------------------------------------------------------------------


def _first(x: torch.Tensor, best: torch.Tensor, dim: int | None, keepdim: bool) -> torch.Tensor:
    """The first place of a value along a dim: what torch returns where several are equal. NaN is found as NaN."""
    shape = [x.shape[d] if dim is None or d == dim % x.ndim else 1 for d in range(x.ndim)]
    size = math.prod(shape)
    place = torch.arange(size, device=x.device).reshape(shape)
    here = x == best
    if x.dtype.is_floating_point:
        here = here | torch.isnan(x)
    found = torch.where(here, place, size)
    return torch.amin(found, [] if dim is None else [dim], keepdim)


def _argmax_parts(x: torch.Tensor, dim: int | None = None, keepdim: bool = False) -> torch.Tensor:
    return _first(x, torch.amax(x, [] if dim is None else [dim], True), dim, keepdim)


def _argmin_parts(x: torch.Tensor, dim: int | None = None, keepdim: bool = False) -> torch.Tensor:
    return _first(x, torch.amin(x, [] if dim is None else [dim], True), dim, keepdim)


def _max_parts(x: torch.Tensor, dim: int, keepdim: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.amax(x, dim, keepdim), _argmax_parts(x, dim, keepdim)


def _min_parts(x: torch.Tensor, dim: int, keepdim: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.amin(x, dim, keepdim), _argmin_parts(x, dim, keepdim)


_PARTS = {
    aten.argmax.default: _argmax_parts,
    aten.argmin.default: _argmin_parts,
    aten.max.dim: _max_parts,
    aten.min.dim: _min_parts,
}


@rule(*_PARTS)
def place(call: Call) -> Rule:
    """Fused along a whole dim; along a split one, the largest value first and then where it stands."""
    eq = reduction(call, _dims(call), reduce="max", whole=True)
    return replace(eq, otherwise=Decompose(_PARTS[call.op]))
