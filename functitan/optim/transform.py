"""Gradient transformations: an optimizer is a pair of pure functions, and optimizers chain (as in Optax)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from functitan import tree
from functitan.errors import ArgumentError, listed, raise_batch, suggest

PyTree = Any
#: From the 0-d int64 step to a 0-d float32 value; a schedule.
Schedule = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class GradientTransformation:
    """A step rule as two pure functions; neither modifies its inputs.

    Attributes:
        init: ``params -> state``. The state has its final structure and shapes from the start.
        update: ``(grads, state, params) -> (updates, state)``, with gradients and updates in the structure of
            the parameters.
        decay_rates: of the state's moving averages, by field: the share that a step leaves of what was there, a number
            or what gives one. What stores them in fewer bits reads it.
        extra: the names of values that ``update`` reads beside the gradient, as keyword arguments, such as
            ``max_logits`` of :func:`functitan.optim.qk_clip`. What wraps a rule takes and passes on those of the rule.
    """

    init: Callable[[PyTree], PyTree]
    update: Callable[..., tuple[PyTree, PyTree]]
    decay_rates: Mapping[str, object] = field(default_factory=dict, compare=False)
    extra: frozenset[str] = frozenset()


def extra_of(rules: Sequence[GradientTransformation], given: Mapping[str, PyTree]) -> list[dict[str, PyTree]]:
    """For each rule the extra values that it reads, of those that a wrapper of the rules was given.

    Raises:
        ArgumentError: names, together, what a rule reads and was not given, and what was given and no rule reads.
    """
    read = sorted({name for rule in rules for name in rule.extra})
    problems = [
        f"the rule reads {name}, and update was not given it. Write update(grads, state, params, {name}=...)."
        for name in read
        if name not in given
    ]
    problems += [
        f"update was given {name}=, and the rule reads {listed(read) if read else 'nothing'} beside the gradient."
        f"{suggest(name, read)}"
        for name in given
        if name not in read
    ]
    raise_batch(ArgumentError, problems, "the extra values of an update")
    return [{name: given[name] for name in sorted(rule.extra)} for rule in rules]


def chain(*transforms: GradientTransformation) -> GradientTransformation:
    """Apply transformations in order, each to the updates of the one before; the state is the tuple of
    states. Each gets the extra values that it reads.

    >>> double = GradientTransformation(lambda p: (), lambda g, s, p: (tree.map(lambda x: 2 * x, g), s))
    >>> both = chain(double, double)
    >>> params = {"w": torch.tensor(1.0)}
    >>> both.update(params, both.init(params), params)[0]
    {'w': tensor(4.)}
    """

    def init(params: PyTree) -> PyTree:
        return tuple(t.init(params) for t in transforms)

    def update(grads: PyTree, state: PyTree, params: PyTree, **extra: PyTree) -> tuple[PyTree, PyTree]:
        states = []
        for transform, own, read in zip(transforms, state, extra_of(transforms, extra), strict=True):
            grads, own = transform.update(grads, own, params, **read)
            states.append(own)
        return grads, tuple(states)

    return GradientTransformation(init, update, extra=extra_names(transforms))


def extra_names(rules: Iterable[GradientTransformation]) -> frozenset[str]:
    """The extra values that any of the rules reads."""
    return frozenset(name for rule in rules for name in rule.extra)


def apply_updates(params: PyTree, updates: PyTree) -> PyTree:
    """``params + updates`` leaf by leaf, added in the wider dtype and kept in the dtype of the parameter.

    Raises:
        TreeError: the structures differ; the message names the leaves.

    >>> apply_updates({"w": torch.tensor(1.0)}, {"w": torch.tensor(-0.25)})
    {'w': tensor(0.7500)}
    """
    tree.check_same_structure(params, updates, ("params", "updates"))
    return tree.map(lambda p, u: (p + u).to(p.dtype), params, updates)
