"""Hyperparameters as 0-d tensors: kept in the state, scheduled, or set between steps, without a recompilation."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from functitan import tree
from functitan.errors import ArgumentError, listed, raise_batch, suggest
from functitan.ops.check import shaped
from functitan.optim.transform import GradientTransformation, PyTree, Schedule

#: A number that the state keeps, a schedule of the 0-d int64 step, or a 0-d tensor that is taken as it is.
Hyper = float | Schedule | torch.Tensor


def first(value: Hyper, params: PyTree, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The leaf that ``init`` puts into the state for a hyperparameter."""
    if isinstance(value, torch.Tensor):
        # A copy: donated leaves must not share storage.
        return value.to(dtype, copy=True)
    leaves = tree.leaves(params)
    device = leaves[0].device if leaves else None
    if callable(value):
        return value(torch.zeros((), dtype=torch.int64, device=device)).to(dtype)
    return torch.full((), value, dtype=dtype, device=device)


def current(value: Hyper, kept: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """The hyperparameter of the update after ``step`` updates, in the dtype of the state's leaf."""
    if isinstance(value, torch.Tensor):
        return value.to(kept.dtype, copy=True)
    return value(step).to(kept.dtype) if callable(value) else kept


def share_problems(**rates: Hyper) -> list[str]:
    """What is wrong with the rates of running averages that are numbers.

    >>> share_problems(b1=0.9, b2=1.0)
    ['b2=1.0: it is the share of an average that a step keeps, from 0 to below 1.']
    """
    numbers = {name: value for name, value in rates.items() if isinstance(value, float | int)}
    return [
        f"{name}={value}: it is the share of an average that a step keeps, from 0 to below 1."
        for name, value in numbers.items()
        if not 0 <= value < 1
    ]


def check_shares(rule: str, **rates: Hyper) -> None:
    """Raise one ArgumentError for all of :func:`share_problems`."""
    raise_batch(ArgumentError, share_problems(**rates), f"the settings of {rule}")


@tree.dataclass
class InjectState:
    """The state of a rule of :func:`inject_hyperparams`.

    Attributes:
        step: 0-d int64, the updates made.
        hyperparams: by argument name a 0-d float64. Setting one changes the next update, unless it has a schedule: then
            it is the value of the last update.
        inner: the state of the rule.
    """

    step: torch.Tensor
    hyperparams: dict[str, torch.Tensor]
    inner: Any


def inject_hyperparams(
    factory: Callable[..., GradientTransformation], static: Sequence[str] = ()
) -> Callable[..., GradientTransformation]:
    """A factory whose numbers are leaves of the state, and may be schedules (Optax's function of this name).

    Args:
        factory: a function that makes a rule. What becomes a leaf is handed to it as a 0-d float64 tensor at every
            update, so it must compute with it as with one; of this package's rules, all take tensors for their rates,
            decays and ``eps``, except the ``eps`` of the orthogonalisation.
        static: arguments that are passed on as they are: numbers that decide what is computed, and functions that
            are no schedules, such as ``decay`` of :func:`functitan.optim.adamw`.

    Returns:
        A function with the arguments of ``factory``. Those it is called with that are floats, 0-d floating tensors or
        functions (schedules of the 0-d int64 step) are injected; what is not written, and integers, are not. The rule
        has the state :class:`InjectState`.

    Raises:
        ArgumentError: a name in ``static`` that ``factory`` does not take; a schedule that gives no 0-d tensor.

    >>> from functitan.optim import adamw, constant
    >>> rule = inject_hyperparams(adamw)(lr=0.1, b1=constant(0.8, warmup=2), weight_decay=0.0)
    >>> params = {"w": torch.tensor(1.0)}
    >>> state = rule.init(params)
    >>> sorted(state.hyperparams), float(state.hyperparams["b1"])
    (['b1', 'lr', 'weight_decay'], 0.4000000059604645)
    >>> state = state.replace(hyperparams={**state.hyperparams, "lr": torch.tensor(0.5, dtype=torch.float64)})
    >>> rule.update(params, state, params)[0]
    {'w': tensor(-0.5000)}
    """
    signature = inspect.signature(factory)
    name_of = getattr(factory, "__name__", "the factory")
    taken = [p.name for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    open_ended = len(taken) < len(signature.parameters)
    raise_batch(
        ArgumentError,
        [
            f'static names "{name}", and {name_of} takes {listed(taken)}.{suggest(name, taken)}'
            for name in static
            if name not in taken and not open_ended
        ],
        "inject_hyperparams",
    )

    def make(*args: Any, **kwargs: Any) -> GradientTransformation:
        given = signature.bind(*args, **kwargs).arguments
        for p in signature.parameters.values():
            if p.kind is p.VAR_KEYWORD:
                given |= given.pop(p.name, {})
        injected: dict[str, Hyper] = {
            name: value for name, value in given.items() if name not in static and _is_hyper(value)
        }
        fixed = {name: value for name, value in given.items() if name not in injected}

        for name, value in injected.items():
            if callable(value):
                _check_schedule(name_of, name, value)
        # What the rule says of itself does not depend on the values.
        example = factory(**fixed, **{name: first(value, (), torch.float64) for name, value in injected.items()})

        def init(params: PyTree) -> InjectState:
            leaves = tree.leaves(params)
            step = torch.zeros((), dtype=torch.int64, device=leaves[0].device if leaves else None)
            values = {name: first(value, params, torch.float64) for name, value in injected.items()}
            return InjectState(step, values, factory(**fixed, **values).init(params))

        def update(grads: PyTree, state: InjectState, params: PyTree, **extra: PyTree) -> tuple[PyTree, InjectState]:
            # A number or a tensor was a first value: from then on the state has it.
            values = {
                name: current(value, state.hyperparams[name], state.step)
                if callable(value)
                else state.hyperparams[name]
                for name, value in injected.items()
            }
            updates, inner = factory(**fixed, **values).update(grads, state.inner, params, **extra)
            return updates, InjectState(state.step + 1, values, inner)

        return GradientTransformation(init, update, example.decay_rates, example.extra)

    return make


def _is_hyper(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.ndim == 0 and value.is_floating_point()
    return isinstance(value, float) or (callable(value) and not isinstance(value, type))


def _check_schedule(factory: str, name: str, schedule: Callable[[torch.Tensor], Any]) -> None:
    try:
        value = schedule(torch.zeros((), dtype=torch.int64))
    except Exception as error:
        found, cause = f"raises {type(error).__name__}: {error}", error
    else:
        if isinstance(value, torch.Tensor) and not value.ndim and value.is_floating_point():
            return
        found = f"gives {shaped(value)}" if isinstance(value, torch.Tensor) else f"gives a {type(value).__name__}"
        cause = None
    raise ArgumentError(
        f'argument "{name}" of {factory} is a function, and for the 0-d int64 step 0 it {found}; a schedule gives a '
        f'0-d floating tensor. Write static=("{name}",) if it is no schedule.'
    ) from cause
