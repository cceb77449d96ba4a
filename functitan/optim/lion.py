"""Lion: the sign of an interpolated momentum (Chen et al. 2023, arXiv:2302.06675, algorithm 2)."""

from __future__ import annotations

from typing import Any

import torch

from functitan import tree
from functitan.optim.hyperparams import Hyper, check_shares, current, first
from functitan.optim.transform import GradientTransformation, PyTree


@tree.dataclass
class LionState:
    """The state of :func:`lion`.

    Attributes:
        step: 0-d int64, the updates made.
        lr, weight_decay: 0-d float32; ``lr`` is under a schedule the rate of the last update.
        mu: the momentum in the structure of the parameters, at least float32.
    """

    step: torch.Tensor
    lr: torch.Tensor
    weight_decay: torch.Tensor
    mu: Any


def lion(
    lr: Hyper, *, b1: float | torch.Tensor = 0.9, b2: float | torch.Tensor = 0.99, weight_decay: Hyper = 0.0
) -> GradientTransformation:
    """``-lr * (sign(b1 * m + (1 - b1) * g) + weight_decay * p)``, then ``m <- b2 * m + (1 - b2) * g``.

    Args:
        lr: the learning rate, or a schedule of the 0-d int64 step, which counts from 0. Every entry moves by it, so
            rates are a third to a tenth of AdamW's, and the decay as much larger.
        b1: of the momentum in the update.
        b2: of the momentum that is kept.
        weight_decay: the decay, times the learning rate, per step; or a schedule.

    Returns:
        A transformation with the state :class:`LionState`; updates have the momentum's dtype.

    Raises:
        ArgumentError: ``b1`` or ``b2`` outside of [0, 1).

    >>> rule = lion(0.5)
    >>> params = {"w": torch.tensor([3.0, -0.25])}
    >>> rule.update(params, rule.init(params), params)[0]
    {'w': tensor([-0.5000,  0.5000])}
    """
    check_shares("lion", b1=b1, b2=b2)

    def init(params: PyTree) -> LionState:
        leaves = tree.leaves(params)
        device = leaves[0].device if leaves else None
        step = torch.zeros((), dtype=torch.int64, device=device)
        mu = tree.map(lambda p: torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)), params)
        return LionState(step, first(lr, params), first(weight_decay, params), mu)

    def update(grads: PyTree, state: LionState, params: PyTree) -> tuple[PyTree, LionState]:
        tree.check_same_structure(grads, params, ("grads", "params"))
        rate = current(lr, state.lr, state.step)
        decay = current(weight_decay, state.weight_decay, state.step)

        def leaf_update(m: torch.Tensor, g: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
            sign = (b1 * m + (1 - b1) * g.to(m.dtype)).sign()
            return -rate * (sign + decay * p.to(m.dtype))

        updates = tree.map(leaf_update, state.mu, grads, params)
        mu = tree.map(lambda m, g: (b2 * m + (1 - b2) * g.to(m.dtype)).to(m.dtype), state.mu, grads)
        return updates, LionState(state.step + 1, rate, decay, mu)

    return GradientTransformation(init, update, {"mu": b2})
