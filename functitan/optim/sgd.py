"""Stochastic gradient descent with momentum (Polyak 1964; Nesterov's form of Sutskever et al. 2013)."""

from __future__ import annotations

from typing import Any

import torch

from functitan import tree
from functitan.errors import ArgumentError
from functitan.optim.hyperparams import Hyper, check_shares, current, first
from functitan.optim.transform import GradientTransformation, PyTree


@tree.dataclass
class SgdState:
    """The state of :func:`sgd`.

    Attributes:
        step: 0-d int64, the updates made.
        lr, momentum, weight_decay: 0-d float32; ``lr`` is under a schedule the rate of the last update. Setting one
            changes the next update without a recompilation.
        mu: the momentum in the structure of the parameters, at least float32; None without momentum.
    """

    step: torch.Tensor
    lr: torch.Tensor
    momentum: torch.Tensor
    weight_decay: torch.Tensor
    mu: Any


def sgd(
    lr: Hyper, *, momentum: Hyper = 0.0, nesterov: bool = False, weight_decay: Hyper = 0.0
) -> GradientTransformation:
    """``-lr * m`` with ``m <- momentum * m + g``, as ``torch.optim.SGD`` without dampening.

    Args:
        lr: the learning rate, or a schedule of the 0-d int64 step, which counts from 0.
        momentum: 0.0 for none, and no state for it; or a schedule.
        nesterov: ``-lr * (g + momentum * m)`` instead.
        weight_decay: ``weight_decay * p`` is added to the gradient (an L2 penalty, not a decoupled decay); or a schedule.

    Returns:
        A transformation with the state :class:`SgdState`; updates are at least float32.

    Raises:
        ArgumentError: Nesterov without momentum, a momentum outside of [0, 1).

    >>> rule = sgd(0.5, momentum=0.5)
    >>> params = {"w": torch.tensor(1.0)}
    >>> updates, state = rule.update(params, rule.init(params), params)
    >>> updates["w"], rule.update(params, state, params)[0]["w"]
    (tensor(-0.5000), tensor(-0.7500))
    """
    check_shares("sgd", momentum=momentum)
    # A schedule, or a tensor, is momentum whatever its value.
    plain = isinstance(momentum, float | int) and not momentum
    if nesterov and plain:
        raise ArgumentError("sgd(nesterov=True) has momentum=0.0, and looks ahead along it. Write momentum=0.9.")

    def init(params: PyTree) -> SgdState:
        leaves = tree.leaves(params)
        device = leaves[0].device if leaves else None
        step = torch.zeros((), dtype=torch.int64, device=device)
        mu = None if plain else tree.map(lambda p: torch.zeros_like(p, dtype=_wide(p)), params)
        return SgdState(step, first(lr, params), first(momentum, params), first(weight_decay, params), mu)

    def update(grads: PyTree, state: SgdState, params: PyTree) -> tuple[PyTree, SgdState]:
        tree.check_same_structure(grads, params, ("grads", "params"))
        rate, beta, decay = (
            current(value, kept, state.step)
            for value, kept in ((lr, state.lr), (momentum, state.momentum), (weight_decay, state.weight_decay))
        )
        full = tree.map(lambda g, p: g.to(_wide(p)) + decay * p.to(_wide(p)), grads, params)
        mu, direction = state.mu, full
        if not plain:
            mu = tree.map(lambda m, g: beta * m + g, state.mu, full)
            direction = tree.map(lambda m, g: g + beta * m, mu, full) if nesterov else mu
        updates = tree.map(lambda d: -rate * d, direction)
        return updates, SgdState(state.step + 1, rate, beta, decay, mu)

    return GradientTransformation(init, update, {"mu": momentum})


def _wide(p: torch.Tensor) -> torch.dtype:
    return torch.promote_types(p.dtype, torch.float32)
