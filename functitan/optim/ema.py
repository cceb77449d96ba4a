"""An exponential moving average of the parameters, for evaluation (Polyak and Juditsky 1992)."""

from __future__ import annotations

from typing import Any

import torch

from functitan import tree
from functitan.errors import ArgumentError
from functitan.optim.hyperparams import first
from functitan.optim.transform import GradientTransformation, PyTree, extra_of


@tree.dataclass
class EmaState:
    """The state of :func:`with_ema`.

    Attributes:
        decay: 0-d float32.
        average: the average in the structure of the parameters, at least float32; at first the parameters.
        inner: the state of the rule.
    """

    decay: torch.Tensor
    average: Any
    inner: Any


def with_ema(rule: GradientTransformation, decay: float | torch.Tensor = 0.999) -> GradientTransformation:
    """Keep ``average <- decay * average + (1 - decay) * p`` of the parameters after each update.

    The average starts as the parameters, so it needs no bias correction. The updates are the rule's. Put it outside of
    everything that changes the updates; a guard outside it that leaves a step out leaves the average too.

    Args:
        rule: the step rule.
        decay: between 0 and 1; about ``1 / (1 - decay)`` steps are averaged.

    Raises:
        ArgumentError: another decay.

    >>> from functitan.optim import sgd
    >>> rule = with_ema(sgd(1.0), decay=0.75)
    >>> params = {"w": torch.tensor(1.0)}
    >>> updates, state = rule.update(params, rule.init(params), params)
    >>> ema_params(state, params)
    {'w': tensor(0.7500)}
    """
    if isinstance(decay, float | int) and not 0 <= decay < 1:
        raise ArgumentError(f"with_ema was given decay={decay}; write a share of the old average, such as 0.999.")

    def init(params: PyTree) -> EmaState:
        # A copy: donated leaves must not share storage.
        average = tree.map(lambda p: p.to(torch.promote_types(p.dtype, torch.float32), copy=True), params)
        return EmaState(first(decay, params), average, rule.init(params))

    def update(grads: PyTree, state: EmaState, params: PyTree, **extra: PyTree) -> tuple[PyTree, EmaState]:
        updates, inner = rule.update(grads, state.inner, params, **extra_of([rule], extra)[0])
        kept = decay.to(state.decay.dtype, copy=True) if isinstance(decay, torch.Tensor) else state.decay

        def average(a: torch.Tensor, p: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
            # As apply_updates gives it, rounding included.
            new = (p + u).to(p.dtype).to(a.dtype)
            return a + (1 - kept) * (new - a)

        return updates, EmaState(kept, tree.map(average, state.average, params, updates), inner)

    return GradientTransformation(init, update, extra=rule.extra)


def ema_params(state: EmaState, params: PyTree) -> PyTree:
    """The averaged parameters in the dtypes of the parameters, to evaluate with."""
    return tree.map(lambda a, p: a.to(p.dtype), state.average, params)
