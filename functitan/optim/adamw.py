"""AdamW: Adam with decoupled weight decay (Loshchilov and Hutter 2019, arXiv:1711.05101)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from functitan import tree
from functitan.optim.transform import GradientTransformation, PyTree, Schedule


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
    lr: float | Schedule,
    *,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    decay: Callable[[str], bool] | None = None,
) -> GradientTransformation:
    """``-lr * (mu_hat / (sqrt(nu_hat) + eps) + weight_decay * p)`` with bias-corrected moments.

    Args:
        lr: the learning rate, or a schedule of the 0-d int64 step, which counts from 0.
        b1, b2: the decay rates of the moments.
        eps: added to the root of the second moment.
        weight_decay: the decay, times the learning rate, per step.
        decay: whether the parameter of this path decays; by default every parameter does.

    Returns:
        A transformation with the state :class:`AdamWState`; updates have the moments' dtype.

    >>> rule = adamw(0.1, weight_decay=0.0)
    >>> params = {"w": torch.tensor(1.0)}
    >>> rule.update({"w": torch.tensor(5.0)}, rule.init(params), params)[0]
    {'w': tensor(-0.1000)}
    """

    def init(params: PyTree) -> AdamWState:
        leaves = tree.leaves(params)
        device = leaves[0].device if leaves else None
        step = torch.zeros((), dtype=torch.int64, device=device)
        rate = lr(step) if callable(lr) else torch.full((), lr, dtype=torch.float32, device=device)
        rate_of_decay = torch.full((), weight_decay, dtype=torch.float32, device=device)
        # Two calls: donated leaves must not share storage.
        return AdamWState(step, rate, rate_of_decay, tree.map(_zeros, params), tree.map(_zeros, params))

    def update(grads: PyTree, state: AdamWState, params: PyTree) -> tuple[PyTree, AdamWState]:
        tree.check_same_structure(grads, params, ("grads", "params"))
        rate = lr(state.step) if callable(lr) else state.lr
        step = state.step + 1
        # 1 - b^t, without the cancellation that a power near 1 has in float32.
        correction1 = -torch.expm1(step * math.log(b1))
        correction2 = -torch.expm1(step * math.log(b2))
        mu = tree.map(lambda m, g: b1 * m + (1 - b1) * g.to(m.dtype), state.mu, grads)
        nu = tree.map(lambda v, g: b2 * v + (1 - b2) * g.to(v.dtype).square(), state.nu, grads)

        def leaf_update(path: str, m: torch.Tensor, v: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
            direction = (m / correction1) / ((v / correction2).sqrt() + eps)
            if decay is None or decay(path):
                direction = direction + state.weight_decay * p.to(m.dtype)
            return -rate * direction

        updates = tree.map_with_path(leaf_update, mu, nu, params)
        return updates, AdamWState(step, rate, state.weight_decay, mu, nu)

    return GradientTransformation(init, update)


def adam(lr: float | Schedule, *, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8) -> GradientTransformation:
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


def _zeros(p: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32))
