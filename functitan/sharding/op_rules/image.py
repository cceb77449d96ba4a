"""Ops on images: windows (pooling, im2col) and resampling. Batch and channels split, positions are whole.

Where positions are read by an index of their own (grid_sample), those of the grid split too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from functitan.sharding.layout import Layout
from functitan.sharding.op_rules.base import Call, Equation, Labels, Rule, rule

aten = torch.ops.aten
_FIRST = (frozenset({0}),)


def _row(shape: Sequence[int], space: int) -> Labels:
    """Labels of (batch, channels, positions), or without the batch; the last ``space`` dims are whole."""
    names = ("b", "c")[2 + space - len(shape) :]
    return (*(None if n == 1 else name for name, n in zip(names, shape, strict=False)), *("_",) * space)


def _alike(call: Call, space: int, **more: Any) -> Equation:
    """Operands and outputs that all are images of the same batch and channels."""
    rows = [tuple(_row(t.shape, space) for t in types) for types in (call.operands, call.outputs)]
    return Equation(rows[0], rows[1], **more)


def _space(call: Call) -> int:
    """How many dims are positions, which an unbatched image does not tell: its ops are named by it."""
    return 3 if "3d" in str(call.op) else 2


@rule(aten.avg_pool2d.default, aten._adaptive_avg_pool2d.default, aten.avg_pool2d_backward.default,
      aten._adaptive_avg_pool2d_backward.default, aten.avg_pool3d.default, aten._adaptive_avg_pool3d.default,
      aten.avg_pool3d_backward.default, aten._adaptive_avg_pool3d_backward.default)  # fmt: skip
def average(call: Call) -> Rule:
    """Backward's operands are the cotangent and the input, which lends its shape."""
    return _alike(call, _space(call), linear=_FIRST)


@rule(aten.max_pool2d_with_indices.default, aten.adaptive_max_pool2d.default,
      aten.max_pool3d_with_indices.default, aten.adaptive_max_pool3d.default)  # fmt: skip
def maximum(call: Call) -> Rule:
    """Indices are positions in an image, and images are whole."""
    return _alike(call, _space(call))


@rule(aten.max_pool2d_with_indices_backward.default, aten.adaptive_max_pool2d_backward.default,
      aten.max_pool3d_with_indices_backward.default, aten.adaptive_max_pool3d_backward.default)  # fmt: skip
def maximum_backward(call: Call) -> Rule:
    """Operands are the cotangent, the input and the indices."""
    return _alike(call, _space(call), linear=_FIRST)


@rule(aten.upsample_linear1d.default, aten._upsample_nearest_exact1d.default, aten.upsample_bilinear2d.default,
      aten._upsample_bilinear2d_aa.default, aten.upsample_bicubic2d.default, aten._upsample_bicubic2d_aa.default,
      aten._upsample_nearest_exact2d.default, aten.upsample_nearest3d.default,
      aten._upsample_nearest_exact3d.default, aten.upsample_trilinear3d.default)  # fmt: skip
def upsample(call: Call) -> Rule:
    return _alike(call, call.operands[0].ndim - 2, linear=_FIRST)


@rule(aten.upsample_nearest1d_backward.default, aten.upsample_linear1d_backward.default,
      aten._upsample_nearest_exact1d_backward.default, aten.upsample_nearest2d_backward.default,
      aten.upsample_bilinear2d_backward.default, aten._upsample_bilinear2d_aa_backward.default,
      aten.upsample_bicubic2d_backward.default, aten._upsample_bicubic2d_aa_backward.default,
      aten._upsample_nearest_exact2d_backward.default, aten.upsample_nearest3d_backward.default,
      aten._upsample_nearest_exact3d_backward.default, aten.upsample_trilinear3d_backward.default)  # fmt: skip
def upsample_backward(call: Call) -> Rule:
    """The size of the input is an argument: (batch, channels, positions)."""

    def local(c: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (*c.args[:2], list(outs[0].local_shape), *c.args[3:]), c.kwargs

    return _alike(call, call.operands[0].ndim - 2, linear=_FIRST, local=local)


@rule(aten.im2col.default, aten.col2im.default)
def columns(call: Call) -> Rule:
    """Channels and places in a window are one dim, which is whole."""
    row = lambda shape, lead: (*lead, *("_",) * (len(shape) - len(lead)))  # noqa: E731
    batched = call.operands[0].ndim == (4 if call.op is aten.im2col.default else 3)
    lead: Labels = ("b" if call.operands[0].shape[0] > 1 else None,) if batched else ()
    return Equation((row(call.operands[0].shape, lead),), (row(call.outputs[0].shape, lead),), _FIRST)


@rule(aten.grid_sampler_2d.default, aten.grid_sampler_3d.default)
def grid_sample(call: Call) -> Rule:
    """The image's positions are whole; those of the grid are the output's."""
    image, grid, out = _grid_labels(call.operands[0].shape, call.operands[1].shape)
    return Equation((image, grid), (out,), _FIRST)


@rule(aten.grid_sampler_2d_backward.default, aten.grid_sampler_3d_backward.default)
def grid_sample_backward(call: Call) -> Rule:
    """The image's gradient is summed over the grid's positions, the grid's over channels."""
    image, grid, out = _grid_labels(call.operands[1].shape, call.operands[2].shape)
    # The grid's gradient is made whether it is wanted or not, the image's is not.
    outputs = (image, grid) if call.argument("output_mask")[0] else (grid,)
    return Equation((out, image, grid), outputs, _FIRST)


def _grid_labels(image: Sequence[int], grid: Sequence[int]) -> tuple[Labels, Labels, Labels]:
    """Labels of the image (batch, channels, positions), the grid (batch, places, coordinates), and the samples."""
    batch, channels = ("b" if image[0] > 1 else None), ("c" if image[1] > 1 else None)
    places = tuple(f"p{i}" if n > 1 else None for i, n in enumerate(grid[1:-1]))
    space = ("_",) * (len(image) - 2)
    return (batch, channels, *space), (batch, *places, "_"), (batch, channels, *places)


@rule(aten.affine_grid_generator.default)
def affine_grid(call: Call) -> Rule:
    """The size of the output is an argument, batch first."""
    batch = "b" if call.operands[0].shape[0] > 1 else None

    def local(c: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (c.args[0], [ins[0].local_shape[0], *c.args[1][1:]], *c.args[2:]), c.kwargs

    row = lambda ndim: (batch, *("_",) * (ndim - 1))  # noqa: E731
    return Equation((row(call.operands[0].ndim),), (row(call.outputs[0].ndim),), _FIRST, local=local)
