"""Lookups in a dim of which a rank holds one block: what the lowering puts in place of whole-dim lookups.

Rank ``coord`` holds the entries [coord * local, (coord + 1) * local) of the dim. An entry that another rank
holds reads as zero, so the sum over the ranks is the whole lookup: each result is a pending sum. The
coordinate is a 0-d tensor, never a number, because the lowered text is the same on all ranks.

Legend: Vl rows of the local block, D width.
"""

from __future__ import annotations

import torch

from functitan.ops.embedding import accumulate_rows, take_rows


def _localize(index: torch.Tensor, coord: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions in the local block, and a bool mask of those that are inside it."""
    local = index.long() - coord.long() * size
    return local, (local >= 0) & (local < size)


@torch.library.custom_op("functitan::embedding_shard", mutates_args=())
def embedding_shard(weight_local: torch.Tensor, idx: torch.Tensor, coord: torch.Tensor) -> torch.Tensor:
    """Rows of this rank's block of the table (Vl, D) as (*idx, D), and zeros where another rank holds the
    row.

    Indices are global and may have any integer dtype; one outside the whole table is zero on every rank.

    >>> embedding_shard(torch.ones(2, 1), torch.tensor([0, 2, 3]), torch.tensor(1)).flatten()
    tensor([0., 1., 1.])
    """
    if weight_local.shape[0] == 0:
        return weight_local.new_zeros((*idx.shape, weight_local.shape[1]))
    local, inside = _localize(idx, coord, weight_local.shape[0])
    rows = take_rows(weight_local, local.where(inside, 0))
    return rows.masked_fill_(~inside[..., None], 0)


@embedding_shard.register_fake
def _(weight_local, idx, coord):  # type: ignore[no-untyped-def]
    return weight_local.new_empty((*idx.shape, weight_local.shape[1]))


@torch.library.custom_op("functitan::embedding_shard_backward", mutates_args=())
def embedding_shard_backward(
    grad: torch.Tensor, idx: torch.Tensor, weight_local: torch.Tensor, coord: torch.Tensor
) -> torch.Tensor:
    """The gradient (Vl, D) of this rank's block, in grad's dtype; ``weight_local`` only tells the shape.

    >>> idx, coord = torch.tensor([0, 2, 2]), torch.tensor(1)
    >>> embedding_shard_backward(torch.ones(3, 1), idx, torch.ones(2, 1), coord).flatten()
    tensor([2., 0.])
    """
    if weight_local.shape[0] == 0:
        return grad.new_zeros(weight_local.shape)
    local, inside = _localize(idx, coord, weight_local.shape[0])
    # Rows of other ranks add zeros to row 0, so that shapes do not depend on data.
    return accumulate_rows(grad.masked_fill(~inside[..., None], 0), local.where(inside, 0), weight_local.shape[0])


@embedding_shard_backward.register_fake
def _(grad, idx, weight_local, coord):  # type: ignore[no-untyped-def]
    return grad.new_empty(weight_local.shape)


@torch.library.custom_op("functitan::take_shard", mutates_args=())
def take_shard(x_local: torch.Tensor, index: torch.Tensor, coord: torch.Tensor, dim: int) -> torch.Tensor:
    """``torch.gather(x, dim, index)`` from this rank's block of ``dim``; zeros where another rank holds the
    entry.

    The result has index's shape and x's dtype. ``dim`` may be negative.

    >>> take_shard(torch.tensor([[5.0, 6.0]]), torch.tensor([[1, 2]]), torch.tensor(1), 1)
    tensor([[0., 5.]])
    """
    size = x_local.shape[dim]
    if size == 0:
        return x_local.new_zeros(index.shape)
    local, inside = _localize(index, coord, size)
    return torch.gather(x_local, dim, local.where(inside, 0)).masked_fill_(~inside, 0)


@take_shard.register_fake
def _(x_local, index, coord, dim):  # type: ignore[no-untyped-def]
    return x_local.new_empty(index.shape)


@torch.library.custom_op("functitan::put_shard", mutates_args=())
def put_shard(grad: torch.Tensor, index: torch.Tensor, coord: torch.Tensor, dim: int, local_size: int) -> torch.Tensor:
    """The adjoint of :func:`take_shard`: zeros with ``local_size`` entries in ``dim``, plus the entries held
    here.

    ``grad`` and ``index`` have one shape; the result has it too, but for ``dim``. Entries that fall on one
    place are summed, in float32 for half precision.

    >>> put_shard(torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([[1, 2, 2]]), torch.tensor(1), 1, 2)
    tensor([[6., 0.]])
    """
    local, inside = _localize(index, coord, local_size)
    shape = list(grad.shape)
    shape[dim] = local_size
    if local_size == 0:
        return grad.new_zeros(shape)
    wide = torch.float32 if grad.dtype in (torch.bfloat16, torch.float16) else grad.dtype
    entries = grad.to(wide).masked_fill(~inside, 0)
    total = torch.zeros(shape, dtype=wide, device=grad.device)
    return total.scatter_add_(dim, local.where(inside, 0), entries).to(grad.dtype)


@put_shard.register_fake
def _(grad, index, coord, dim, local_size):  # type: ignore[no-untyped-def]
    shape = list(grad.shape)
    shape[dim] = local_size
    return grad.new_empty(shape)
