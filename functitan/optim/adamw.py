"""AdamW: Adam with decoupled weight decay (Loshchilov and Hutter 2019, arXiv:1711.05101)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from functitan import tree
from functitan.optim.hyperparams import Hyper, check_shares, current, first
from functitan.optim.transform import GradientTransformation, PyTree


@tree.dataclass
class AdamWState:
    """The state of :func:`adamw`.

    Attributes:
        step: 0-d int64, the updates made.
        lr: 0-d float32. For a constant rate it is the rate, and setting it changes the next update without a
            recompilation; under a schedule it is the rate of the last update.
        weight_decay: 0-d float32.
        mu, nu: first and second moments in the structure of the parameters, at least float32.
    """

    step: torch.Tensor
    lr: torch.Tensor
    weight_decay: torch.Tensor
    mu: Any
    nu: Any


def adamw(
    lr: Hyper,
    *,
    b1: float | torch.Tensor = 0.9,
    b2: float | torch.Tensor = 0.95,
    eps: float | torch.Tensor = 1e-8,
    weight_decay: Hyper = 0.1,
    decay: Callable[[str], bool] | None = None,
) -> GradientTransformation:
    """``-lr * (mu_hat / (sqrt(nu_hat) + eps) + weight_decay * p)`` with bias-corrected moments.

    As in torch and in Optax (with ``eps_root=0``) ``eps`` stands outside of the root of the corrected moment, and the decay
    is of the parameters before the step, times the rate. torch rounds ``p * (1 - lr * weight_decay)`` before it subtracts
    the step; here both are one update, as in Optax, so that 100 steps are within 1e-5 of torch's, not its bits. Defaults
    are those that language models are trained with: torch has ``b2=0.999, weight_decay=0.01``, Optax ``0.999`` and 1e-4.

    Args:
        lr: the learning rate, or a schedule of the 0-d int64 step, which counts from 0.
        b1, b2: the decay rates of the moments; for schedules of them see :func:`functitan.optim.inject_hyperparams`.
        eps: added to the root of the second moment.
        weight_decay: the decay, times the learning rate, per step; or a schedule.
        decay: whether the parameter of this path decays; by default every parameter does.

    Returns:
        A transformation with the state :class:`AdamWState`; updates have the moments' dtype.

    Raises:
        ArgumentError: a decay rate of a moment outside of [0, 1).

    >>> rule = adamw(0.1, weight_decay=0.0)
    >>> params = {"w": torch.tensor(1.0)}
    >>> rule.update({"w": torch.tensor(5.0)}, rule.init(params), params)[0]
    {'w': tensor(-0.1000)}
    """
    check_shares("adamw", b1=b1, b2=b2)

    def init(params: PyTree) -> AdamWState:
        leaves = tree.leaves(params)
        device = leaves[0].device if leaves else None
        step = torch.zeros((), dtype=torch.int64, device=device)
        # Two calls for the moments: donated leaves must not share storage.
        return AdamWState(
            step, first(lr, params), first(weight_decay, params), tree.map(_zeros, params), tree.map(_zeros, params)
        )

    def update(grads: PyTree, state: AdamWState, params: PyTree) -> tuple[PyTree, AdamWState]:
        tree.check_same_structure(grads, params, ("grads", "params"))
        rate = current(lr, state.lr, state.step)
        rate_of_decay = current(weight_decay, state.weight_decay, state.step)
        step = state.step + 1
        correction1, correction2 = bias_correction(b1, step), bias_correction(b2, step)
        # Cast back: a 0-d float64 b would widen 0-d moments.
        mu = tree.map(lambda m, g: (b1 * m + (1 - b1) * g.to(m.dtype)).to(m.dtype), state.mu, grads)
        nu = tree.map(lambda v, g: (b2 * v + (1 - b2) * g.to(v.dtype).square()).to(v.dtype), state.nu, grads)

        def leaf_update(path: str, m: torch.Tensor, v: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
            direction = (m / correction1) / ((v / correction2).sqrt() + eps)
            if decay is None or decay(path):
                direction = direction + rate_of_decay * p.to(m.dtype)
            return (-rate * direction).to(m.dtype)

        updates = tree.map_with_path(leaf_update, mu, nu, params)
        return updates, AdamWState(step, rate, rate_of_decay, mu, nu)

    return GradientTransformation(init, update, {"mu": b1, "nu": b2})


def adam(
    lr: Hyper,
    *,
    b1: float | torch.Tensor = 0.9,
    b2: float | torch.Tensor = 0.999,
    eps: float | torch.Tensor = 1e-8,
) -> GradientTransformation:
    """``-lr * mu_hat / (sqrt(nu_hat) + eps)``: Adam (Kingma and Ba 2015, arXiv:1412.6980), which is
    :func:`adamw` without decay.

    Returns:
        A transformation with the state :class:`AdamWState`, whose ``weight_decay`` is 0.

    >>> rule = adam(0.1)
    >>> params = {"w": torch.tensor(1.0)}
    >>> rule.update({"w": torch.tensor(5.0)}, rule.init(params), params)[0]
    {'w': tensor(-0.1000)}
    """
    return adamw(lr, b1=b1, b2=b2, eps=eps, weight_decay=0.0, decay=lambda path: False)


def bias_correction(b: float | torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """``1 - b^step``, without the cancellation that a power near 1 has in float32."""
    if isinstance(b, torch.Tensor):
        return -torch.expm1(step * b.log())
    return -torch.expm1(step * (math.log(b) if b else -math.inf))


def _zeros(p: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32))
