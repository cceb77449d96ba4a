"""A matmul per group of consecutive rows: the experts of a mixture applied to tokens sorted by expert.

Legend: T rows (tokens), E groups (experts), D in, F out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from functitan.errors import ArgumentError
from functitan.ops.check import require_integer, shaped


def grouped_mm(x_TD: torch.Tensor, w_EDF: torch.Tensor, offsets_E: torch.Tensor) -> torch.Tensor:
    """Multiply the rows of each group by the matrix of the group.

    Group e is the rows [offsets[e-1], offsets[e]), with offsets[-1] read as 0; groups may be empty. Rows from
    the last offset on belong to no group and give zeros: buffers have fixed sizes here, and a tail is unused.

    Args:
        x_TD: (T, D), floating.
        w_EDF: (E, D, F), same dtype; any strides.
        offsets_E: (E,), integers that do not decrease, each at most T: the end of every group.

    Returns:
        (T, F), contiguous, in the dtype of the operands.

    Raises:
        ArgumentError: shapes or dtypes that do not fit; on CPU also offsets that decrease or exceed T.

    >>> x, w = torch.ones(4, 1), torch.tensor([[[2.0]], [[3.0]], [[5.0]]])
    >>> grouped_mm(x, w, torch.tensor([1, 1, 3])).flatten()
    tensor([2., 5., 5., 0.])
    """
    found = f"found x {shaped(x_TD)}, w {shaped(w_EDF)}, offsets {shaped(offsets_E)}"
    if x_TD.ndim != 2 or w_EDF.ndim != 3 or x_TD.shape[1] != w_EDF.shape[1]:
        raise ArgumentError(f"grouped_mm needs x (T, D) and w (E, D, F) that agree in D; {found}.")
    if x_TD.dtype != w_EDF.dtype or not x_TD.is_floating_point():
        raise ArgumentError(f"grouped_mm needs x and w in one floating dtype; {found}. Cast with .to(dtype).")
    require_integer("grouped_mm", "the offsets", offsets_E)
    if tuple(offsets_E.shape) != (w_EDF.shape[0],):
        raise ArgumentError(
            f"grouped_mm needs one offset per group, the end of its rows, ({w_EDF.shape[0]},); {found}. "
            "From the sizes of the groups: torch.cumsum(sizes, 0)."
        )
    return _grouped_mm(x_TD, w_EDF, offsets_E)


def _groups(offsets: torch.Tensor, rows: int) -> Iterator[tuple[int, int, int]]:
    """Each group that has rows, as (group, start, end)."""
    start = 0
    for group, end in enumerate(offsets.tolist()):
        if not start <= end <= rows:
            raise ArgumentError(
                f"grouped_mm needs offsets that do not decrease and end within the {rows} rows; group "
                f"{group} runs from {start} to {end}. Ends of groups are torch.cumsum(sizes, 0)."
            )
        if end > start:
            yield group, start, end
        start = end


def _use_fused(*operands: torch.Tensor) -> bool:
    """Whether torch's grouped kernel takes these operands: bfloat16 on CUDA, in rows of 16 bytes.

    Not run on a GPU so far. On CPU torch loops over the groups too, and takes no float64.
    """
    return all(t.is_cuda and t.dtype == torch.bfloat16 and t.shape[-1] % 8 == 0 for t in operands)


@torch.library.custom_op("functitan::grouped_mm", mutates_args=())
def _grouped_mm(x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    rows = x.shape[0]
    if _use_fused(x, w):
        y = torch.nn.functional.grouped_mm(x.contiguous(), w, offs=offsets.to(torch.int32))
        # The kernel leaves the rows after the last group unwritten.
        tail = torch.arange(rows, device=x.device) >= offsets[-1]
        return y.masked_fill(tail[:, None], 0.0)
    y = x.new_zeros((rows, w.shape[2]))
    for group, start, end in _groups(offsets, rows):
        torch.mm(x[start:end], w[group], out=y[start:end])
    return y


@_grouped_mm.register_fake
def _(x, w, offsets):  # type: ignore[no-untyped-def]
    return x.new_empty((x.shape[0], w.shape[2]))


@torch.library.custom_op("functitan::grouped_mm_dw", mutates_args=())
def _grouped_mm_dw(x: torch.Tensor, dy: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Per group x^T dy over its rows: (T, D), (T, F) to (E, D, F); an empty group gives zeros."""
    if _use_fused(x, dy):
        dw = torch.nn.functional.grouped_mm(x.contiguous().t(), dy.contiguous(), offs=offsets.to(torch.int32))
        empty = torch.diff(offsets, prepend=offsets.new_zeros(1)) == 0
        return dw.masked_fill(empty[:, None, None], 0.0)
    dw = x.new_zeros((offsets.shape[0], x.shape[1], dy.shape[1]))
    for group, start, end in _groups(offsets, x.shape[0]):
        torch.mm(x[start:end].t(), dy[start:end], out=dw[group])
    return dw


@_grouped_mm_dw.register_fake
def _(x, dy, offsets):  # type: ignore[no-untyped-def]
    return x.new_empty((offsets.shape[0], x.shape[1], dy.shape[1]))


def _setup(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradient(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
    x, w, offsets = ctx.saved_tensors
    need_x, need_w, _ = ctx.needs_input_grad
    dx = _grouped_mm(dy, w.transpose(1, 2), offsets) if need_x else None
    dw = _grouped_mm_dw(x, dy, offsets) if need_w else None
    return dx, dw, None


def _gradient_dw(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
    x, dy, offsets = ctx.saved_tensors
    need_x, need_dy, _ = ctx.needs_input_grad
    dx = _grouped_mm(dy, g.transpose(1, 2), offsets) if need_x else None
    ddy = _grouped_mm(x, g, offsets) if need_dy else None
    return dx, ddy, None


_grouped_mm.register_autograd(_gradient, setup_context=_setup)
_grouped_mm_dw.register_autograd(_gradient_dw, setup_context=_setup)
