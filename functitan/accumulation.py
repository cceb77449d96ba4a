"""Gradient accumulation: a batch in microbatches, one after the other, inside one function.

A loss is a sum and a count. Both are added up over the microbatches and divided once by whoever has all of them, so
that a token weighs the same whichever microbatch it is in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from functitan import tree
from functitan.annotations import mark_gradients, scan
from functitan.autodiff import value_and_grad
from functitan.errors import TreeError
from functitan.shapes import eval_shape

PyTree = Any
#: ``(params, batch) -> (sum, count)``, or ``(sum, count, largest)``
Loss = Callable[[PyTree, PyTree], tuple[Any, ...]]


def accumulate_grads(
    loss: Loss, microbatches: int, *, pending: str | tuple[str, ...] | None = None
) -> Callable[[PyTree, PyTree], tuple[tuple[Any, ...], PyTree]]:
    """A function that sums a loss, its count and its gradient over microbatches, by one scan.

    Microbatch i holds the rows i, i + n, i + 2n, ... of the batch, for n microbatches: so the rows of each lie over the
    ranks as those of the batch do, and none moves.

    Args:
        loss: ``(params, batch) -> (sum, count)``, 0-d: a sum over what counts, and how many or how much that is. A third
            result is a tree of values of which the batch has the largest of its microbatches, such as attention logits.
        microbatches: how many; every leaf of the batch has a leading dim that it divides.
        pending: mesh axes over which gradients stay pending sums until the last microbatch, and are reduced once.
            Without them each microbatch reduces its gradient over ranks, and the sum is stored as the parameters are.

    Returns:
        ``(params, batch) -> ((sum, count), gradient)``, each of the whole batch, or with the third result of the loss
        ``((sum, count, largest), gradient)``. The gradient is that of the sum: divide
        both by the count. It is added up in at least float32 and has the parameters' dtypes.

    Raises:
        TreeError: less than one microbatch; a leaf of the batch that does not divide, by path.

    >>> def loss(params, batch):
    ...     return ((params["w"] * batch["x"] - 1) ** 2).sum(), torch.tensor(batch["x"].numel())
    >>> params, batch = {"w": torch.tensor(2.0)}, {"x": torch.arange(4.0)}
    >>> accumulate_grads(loss, 2)(params, batch)
    ((tensor(36.), tensor(4)), {'w': tensor(44.)})
    """
    if microbatches < 1:
        raise TreeError(f"microbatches={microbatches}: a batch is cut into at least 1.")

    def split(params: PyTree, row: PyTree) -> tuple[torch.Tensor, tuple[Any, ...]]:
        total, *rest = loss(params, row)
        return total, tuple(rest)

    def call(params: PyTree, batch: PyTree) -> tuple[tuple[Any, ...], PyTree]:
        rows = _rows(batch, microbatches)
        types = eval_shape(loss, params, tree.map(lambda x: x[0], rows))
        device = tree.leaves(batch)[0].device
        zeros = [torch.zeros(t.shape, dtype=t.dtype, device=device) for t in types[:2]]
        sums = tree.map(lambda p: torch.zeros(p.shape, dtype=_sum_dtype(p), device=p.device), params)

        def microbatch(carry: Any, row: PyTree) -> tuple[Any, Any]:
            total, count, grads = carry
            (own, (labels, *largest)), grad = value_and_grad(split, has_aux=True, pending=pending)(params, row)
            added = tree.map(lambda a, g: a + g.to(a.dtype), grads, grad)
            return (total + own, count + labels, added), largest or None

        (total, count, grads), largest = scan(microbatch, (*zeros, sums), rows, name="microbatch")
        grads = mark_gradients(grads, params)
        most = () if largest is None else tree.map(lambda x: x.amax(0), largest)
        return (total, count, *most), tree.map(lambda g, p: g.to(p.dtype), grads, params)

    return call


def _rows(batch: PyTree, microbatches: int) -> PyTree:
    """Every leaf (B, ...) of a batch as (n, B / n, ...), for a scan over microbatches.

    Raises:
        TreeError: leaves that do not divide, by path.
    """
    wrong = [
        f"{path or 'batch'}: {tuple(x.shape)}"
        for path, x in tree.flatten_with_paths(batch)[0]
        if not x.ndim or x.shape[0] % microbatches
    ]
    if wrong:
        raise TreeError(
            f"a batch is cut into {microbatches} microbatches along dim 0, which does not divide: {'; '.join(wrong)}. "
            f"Use a multiple of {microbatches} rows."
        )
    # Row i of a rank's part goes to microbatch i mod n: a dim that is split over ranks is split as before.
    return tree.map(lambda x: x.reshape(-1, microbatches, *x.shape[1:]).transpose(0, 1), batch)


def _sum_dtype(p: torch.Tensor) -> torch.dtype:
    return torch.promote_types(p.dtype, torch.float32)
