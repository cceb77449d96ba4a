"""The negative log-likelihood in ops that a split class dim goes through: a lookup, and a comparison with the classes.

A lookup in split classes is a sum over ranks of one number per row; its gradient is pointwise, because each rank can
tell which of its classes is the target. So no logits are gathered.
"""

from __future__ import annotations

import torch


def nll(
    x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, reduction: int, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss, and the total weight that a mean divides by; classes are dim 1, or 0 of a vector."""
    dim = 0 if x.ndim < 2 else 1
    kept = target != ignore_index
    place = torch.where(kept, target, 0)
    picked = torch.gather(x, dim, place.unsqueeze(dim)).squeeze(dim)
    scale = kept.to(x.dtype)
    if weight is not None:
        scale = scale * _weights(weight, place)
    loss = -torch.where(kept, picked, 0) * scale
    total = scale.sum()
    if reduction == 0:
        return loss, x.new_zeros(())
    return (loss.sum() / total if reduction == 1 else loss.sum()), total


def nll_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: torch.Tensor,
) -> torch.Tensor:
    dim = 0 if x.ndim < 2 else 1
    kept = target != ignore_index
    place = torch.where(kept, target, 0)
    scale = -kept.to(x.dtype)
    if weight is not None:
        scale = scale * _weights(weight, place)
    if reduction == 1:
        grad = grad / total_weight
    shape = [-1 if d == dim else 1 for d in range(x.ndim)]
    classes = torch.arange(x.shape[dim], device=x.device).reshape(shape)
    return torch.where(place.unsqueeze(dim) == classes, (grad * scale).unsqueeze(dim), 0)


def _weights(weight: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    return weight.index_select(0, place.reshape(-1)).reshape(place.shape)
