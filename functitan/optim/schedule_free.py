"""Schedule-free AdamW: an average of the steps in place of a decaying rate (Defazio et al. 2024, arXiv:2405.15682,
algorithm 1).

There are three points. z takes the steps, x is their average and what to evaluate, and gradients are taken at y between
them. With the bias-corrected second moment v_hat of the gradients g at y, and t counting from 1::

    y <- (1 - b1) z + b1 x
    z <- z - lr (g / (sqrt(v_hat) + eps) + weight_decay y)
    x <- (1 - c) x + c z,   c = w_t / (w_1 + ... + w_t),   w_t = t^r (max_{s <= t} lr_s)^p

The parameters are y; the state holds z, and x follows from both: ``x = z + (y - z) / b1``.
"""

from __future__ import annotations

from typing import Any

import torch

from functitan import tree
from functitan.errors import ArgumentError
from functitan.optim.adamw import bias_correction
from functitan.optim.hyperparams import Hyper, check_shares, current, first
from functitan.optim.transform import GradientTransformation, PyTree


@tree.dataclass
class ScheduleFreeState:
    """The state of :func:`schedule_free_adamw`.

    Attributes:
        step: 0-d int64, the updates made.
        lr, weight_decay: 0-d float64; setting one changes the next update, unless it has a schedule.
        b1: 0-d float64, with which the parameters were made from x and z. Do not set it: x would be read wrongly. Move
            it by a schedule, or by :func:`functitan.optim.inject_hyperparams`; x stays where it is.
        lr_max: 0-d float64, the largest rate so far.
        weights: 0-d float64, the sum of w so far.
        z: where the steps are taken, in the structure of the parameters, at least float32.
        nu: the second moments, likewise.
    """

    step: torch.Tensor
    lr: torch.Tensor
    weight_decay: torch.Tensor
    b1: torch.Tensor
    lr_max: torch.Tensor
    weights: torch.Tensor
    z: Any
    nu: Any


def schedule_free_adamw(
    lr: Hyper,
    *,
    b1: Hyper = 0.9,
    b2: float | torch.Tensor = 0.999,
    eps: float | torch.Tensor = 1e-8,
    weight_decay: Hyper = 0.0,
    weight_power: float = 2.0,
    step_power: float = 0.0,
) -> GradientTransformation:
    """AdamW whose average needs no schedule; evaluate with :func:`functitan.optim.eval_params`.

    Args:
        lr: the learning rate; a warmup, such as ``constant(rate, warmup)``, is all the schedule that it wants. Rates
            are larger than AdamW's.
        b1: the share of x in where gradients are taken, in (0, 1).
        b2, eps: of the second moment, as for :func:`functitan.optim.adamw`.
        weight_decay: the decay, times the learning rate, per step, of y.
        weight_power, step_power: p and r of the weights.

    Returns:
        A transformation with the state :class:`ScheduleFreeState`; updates are at least float32.

    Raises:
        ArgumentError: ``b1`` outside of (0, 1), ``b2`` outside of [0, 1).

    >>> from functitan import optim
    >>> rule, params = optim.schedule_free_adamw(0.5), {"w": torch.tensor(1.0)}
    >>> state = rule.init(params)
    >>> for _ in range(2):
    ...     updates, state = rule.update({"w": torch.tensor(1.0)}, state, params)
    ...     params = optim.apply_updates(params, updates)
    >>> params["w"], optim.eval_params(state, params)["w"]
    (tensor(0.2250), tensor(0.2500))
    """
    check_shares("schedule_free_adamw", b2=b2)
    if isinstance(b1, float | int) and not 0 < b1 < 1:
        raise ArgumentError(
            f"schedule_free_adamw was given b1={b1}; gradients are taken between z and x, at a share above 0 and below "
            "1 of x, such as 0.9."
        )

    def init(params: PyTree) -> ScheduleFreeState:
        leaves = tree.leaves(params)
        device = leaves[0].device if leaves else None
        zero = lambda: torch.zeros((), dtype=torch.float64, device=device)  # noqa: E731
        return ScheduleFreeState(
            step=torch.zeros((), dtype=torch.int64, device=device),
            lr=first(lr, params, torch.float64),
            weight_decay=first(weight_decay, params, torch.float64),
            b1=first(b1, params, torch.float64),
            lr_max=zero(),
            weights=zero(),
            # A copy: donated leaves must not share storage.
            z=tree.map(lambda p: p.to(_wide(p), copy=True), params),
            nu=tree.map(lambda p: torch.zeros_like(p, dtype=_wide(p)), params),
        )

    def update(grads: PyTree, state: ScheduleFreeState, params: PyTree) -> tuple[PyTree, ScheduleFreeState]:
        tree.check_same_structure(grads, params, ("grads", "params"))
        rate, decay, b1_new = (
            current(value, kept, state.step)
            for value, kept in ((lr, state.lr), (weight_decay, state.weight_decay), (b1, state.b1))
        )
        step = state.step + 1
        lr_max = torch.maximum(state.lr_max, rate)
        weight = step.to(torch.float64) ** step_power * lr_max**weight_power
        weights = state.weights + weight
        # All rates so far may be 0, as at the start of a warmup from 0; x is then where z is.
        c = torch.where(weights > 0, weight / weights.clamp(min=torch.finfo(torch.float64).tiny), 1.0)
        correction = bias_correction(b2, step.to(torch.float64))
        nu = tree.map(lambda v, g: (b2 * v + (1 - b2) * g.to(v.dtype).square()).to(v.dtype), state.nu, grads)

        def moved(z: torch.Tensor, v: torch.Tensor, g: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
            direction = g.to(v.dtype) / ((v / correction).sqrt() + eps) + decay * p.to(v.dtype)
            return (z - rate * direction).to(z.dtype)

        z = tree.map(moved, state.z, nu, grads, params)

        def leaf_update(old: torch.Tensor, new: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
            y = p.to(new.dtype)
            x = average(old, y, state.b1)
            x = x + c * (new - x)
            return (new + b1_new * (x - new) - y).to(new.dtype)

        updates = tree.map(leaf_update, state.z, z, params)
        return updates, ScheduleFreeState(step, rate, decay, b1_new, lr_max, weights, z, nu)

    return GradientTransformation(init, update, {"nu": b2})


def average(z: torch.Tensor, y: torch.Tensor, b1: torch.Tensor) -> torch.Tensor:
    """x, from z and y = (1 - b1) z + b1 x."""
    return (z + (y.to(z.dtype) - z) / b1).to(z.dtype)


def _wide(p: torch.Tensor) -> torch.dtype:
    return torch.promote_types(p.dtype, torch.float32)
