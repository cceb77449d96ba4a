"""Row lookup in a table, and its gradient as one op that sums the rows.

Legend: V rows of the table (vocabulary), D width.
"""

from __future__ import annotations

from typing import Any

import torch

from functitan.errors import ArgumentError
from functitan.ops.check import IndexRangeError, require_integer, shaped


def embedding(idx: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
    """The rows of ``weight_VD`` that ``idx`` names: ``weight_VD[idx]``.

    Args:
        idx: integers of any shape, in [0, V).
        weight_VD: (V, D), any floating dtype.

    Returns:
        (*idx.shape, D), contiguous, in the table's dtype. The gradient of the table is dense, and is summed
        in float32 (float64 for a float64 table).

    Raises:
        ArgumentError: a table that is not a matrix, or indices that are not integers.
        IndexRangeError: an index outside the table, on CPU. (Accelerators do not check.)

    >>> embedding(torch.tensor([[2, 0]]), torch.eye(3))
    tensor([[[0., 0., 1.],
             [1., 0., 0.]]])
    """
    if weight_VD.ndim != 2:
        raise ArgumentError(f"embedding needs a table (V, D); found {shaped(weight_VD)}.")
    require_integer("embedding", "the indices", idx)
    return _embedding(weight_VD, idx)


def accumulate_rows(grad: torch.Tensor, idx: torch.Tensor, rows: int) -> torch.Tensor:
    """Sum the rows of ``grad`` (*idx, D) into a table (rows, D) by index, in grad's dtype.

    Half-precision rows are summed in float32, because a frequent token adds up thousands of them.
    """
    wide = torch.float32 if grad.dtype in (torch.bfloat16, torch.float16) else grad.dtype
    table = torch.zeros((rows, grad.shape[-1]), dtype=wide, device=grad.device)
    # Faster on CPU than torch's own embedding_dense_backward, up to three times for narrow rows (measured).
    table.index_add_(0, idx.reshape(-1), grad.reshape(-1, grad.shape[-1]).to(wide))
    return table.to(grad.dtype)


def take_rows(weight: torch.Tensor, idx: torch.Tensor) -> torch.Tensor:
    """The rows of a table as (*idx, D); indices must be inside."""
    return weight.index_select(0, idx.reshape(-1)).reshape(*idx.shape, weight.shape[1])


@torch.library.custom_op("functitan::embedding", mutates_args=())
def _embedding(weight: torch.Tensor, idx: torch.Tensor) -> torch.Tensor:
    try:
        return take_rows(weight, idx.long())
    except (IndexError, RuntimeError):
        low, high = (int(idx.min()), int(idx.max())) if idx.numel() else (0, 0)
        if low >= 0 and high < weight.shape[0]:
            raise
        raise IndexRangeError(
            f"embedding looks up rows {low} to {high} in a table of {weight.shape[0]} rows. "
            "Declare the table with the vocabulary size of the tokenizer, or limit the ids with "
            f"ids.clamp(0, {weight.shape[0] - 1})."
        ) from None


@_embedding.register_fake
def _(weight, idx):  # type: ignore[no-untyped-def]
    return weight.new_empty((*idx.shape, weight.shape[1]))


@torch.library.custom_op("functitan::embedding_backward", mutates_args=())
def _embedding_backward(grad: torch.Tensor, idx: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    # ``weight`` tells the shape (and, to a sharding rule, the layout) of the gradient; its values are not
    # read.
    return accumulate_rows(grad, idx.long(), weight.shape[0])


@_embedding_backward.register_fake
def _(grad, idx, weight):  # type: ignore[no-untyped-def]
    return grad.new_empty(weight.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradient(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
    weight, idx = ctx.saved_tensors
    return _embedding_backward(grad, idx, weight), None


def _setup_backward(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _gradient_backward(ctx: Any, grad_table: torch.Tensor) -> tuple[torch.Tensor, None, None]:
    # Summing rows is linear, and its transpose is the lookup.
    (idx,) = ctx.saved_tensors
    return _embedding(grad_table, idx), None, None


_embedding.register_autograd(_gradient, setup_context=_setup)
_embedding_backward.register_autograd(_gradient_backward, setup_context=_setup_backward)
