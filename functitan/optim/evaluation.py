"""The parameters to evaluate with, where a rule keeps others than it trains."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from functitan import tree
from functitan.optim.ema import EmaState, ema_params
from functitan.optim.master import MasterState, wide_params
from functitan.optim.schedule_free import ScheduleFreeState, average
from functitan.optim.transform import PyTree


def eval_params(state: PyTree, params: PyTree) -> PyTree:
    """The parameters that the state of an optimizer says to evaluate, save or generate with.

    They are the average x of :func:`functitan.optim.schedule_free_adamw`, or that of
    :func:`functitan.optim.with_ema`, for the leaves that such a rule steps, however it is nested in others; for all
    other leaves, the parameters. A pure function like the rule: compile it for parameters on a mesh.

    Args:
        state: of any rule.
        params: the parameters that the rule trains.

    Returns:
        The structure and dtypes of ``params``.

    >>> from functitan.optim import adamw
    >>> params = {"w": torch.ones(2)}
    >>> eval_params(adamw(0.1).init(params), params) is params
    True
    """
    if isinstance(state, EmaState):
        return ema_params(state, params)
    if isinstance(state, ScheduleFreeState):
        z = dict(tree.flatten_with_paths(state.z)[0])

        def at(path: str, p: torch.Tensor) -> torch.Tensor:
            return average(z[path], p, state.b1).to(p.dtype) if path in z else p

        return tree.map_with_path(at, params)
    if isinstance(state, MasterState):
        # What is averaged is the master; its rounded copy would be a rounded average.
        found = eval_params(state.inner, wide_params(params, state.master))
        return tree.map(lambda x, p: x.to(p.dtype), found, params)
    for child in _children(state):
        params = eval_params(child, params)
    return params


def has_eval_params(state: PyTree) -> bool:
    """Whether :func:`eval_params` gives anything but the parameters."""
    return isinstance(state, EmaState | ScheduleFreeState) or any(map(has_eval_params, _children(state)))


def _children(state: Any) -> Iterator[Any]:
    found = tree.children(state)
    yield from found[0] if found is not None else ()
