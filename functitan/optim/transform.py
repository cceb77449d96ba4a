"""Gradient transformations: an optimizer is a pair of pure functions, and optimizers chain (as in Optax)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from functitan import tree

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
    """

    init: Callable[[PyTree], PyTree]
    update: Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]]
    decay_rates: Mapping[str, object] = field(default_factory=dict, compare=False)


def chain(*transforms: GradientTransformation) -> GradientTransformation:
    """Apply transformations in order, each to the updates of the one before; the state is the tuple of
    states.

    >>> double = GradientTransformation(lambda p: (), lambda g, s, p: (tree.map(lambda x: 2 * x, g), s))
    >>> both = chain(double, double)
    >>> params = {"w": torch.tensor(1.0)}
    >>> both.update(params, both.init(params), params)[0]
    {'w': tensor(4.)}
    """

    def init(params: PyTree) -> PyTree:
        return tuple(t.init(params) for t in transforms)

    def update(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        states = []
        for transform, own in zip(transforms, state, strict=True):
            grads, own = transform.update(grads, own, params)
            states.append(own)
        return grads, tuple(states)

    return GradientTransformation(init, update)


def apply_updates(params: PyTree, updates: PyTree) -> PyTree:
    """``params + updates`` leaf by leaf, added in the wider dtype and kept in the dtype of the parameter.

    Raises:
        TreeError: the structures differ; the message names the leaves.

    >>> apply_updates({"w": torch.tensor(1.0)}, {"w": torch.tensor(-0.25)})
    {'w': tensor(0.7500)}
    """
    tree.check_same_structure(params, updates, ("params", "updates"))
    return tree.map(lambda p, u: (p + u).to(p.dtype), params, updates)
