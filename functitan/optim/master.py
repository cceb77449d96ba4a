"""Parameters in bfloat16 with float32 masters: small updates are not rounded away."""

from __future__ import annotations

from typing import Any

import torch

from functitan import tree
from functitan.optim.transform import GradientTransformation, PyTree, extra_of


@tree.dataclass
class MasterState:
    """The state of :func:`with_master`.

    Attributes:
        master: float32 copies of the parameters that are narrower, None for the others.
        inner: the state of the rule.
    """

    master: Any
    inner: Any


def with_master(rule: GradientTransformation) -> GradientTransformation:
    """Step float32 masters of parameters with a narrower dtype, and give these the masters' rounded values.

    A bfloat16 number has 8 significant bits: an update below 1/512 of it is lost. The master adds them up (Micikevicius
    et al. 2018, arXiv:1710.03740, section 3.1). Parameters of float32 and wider have no master.

    Args:
        rule: the step rule; its ``params`` are the masters, and its state has their dtype.

    Returns:
        A transformation with the state :class:`MasterState`. Its updates are the difference to the rounded master, in
        float32: what rounding leaves out stays in the master and adds up there.

    >>> from functitan.optim import apply_updates, sgd
    >>> rule = with_master(sgd(0.001))
    >>> params = {"w": torch.tensor(1.0, dtype=torch.bfloat16)}
    >>> state = rule.init(params)
    >>> for _ in range(4):
    ...     updates, state = rule.update({"w": torch.tensor(1.0)}, state, params)
    ...     params = apply_updates(params, updates)
    >>> params["w"], state.master["w"]
    (tensor(0.9961, dtype=torch.bfloat16), tensor(0.9960))
    """

    def init(params: PyTree) -> MasterState:
        master = tree.map(lambda p: p.to(torch.float32) if _narrow(p) else None, params)
        return MasterState(master, rule.init(wide_params(params, master)))

    def update(grads: PyTree, state: MasterState, params: PyTree, **extra: PyTree) -> tuple[PyTree, MasterState]:
        tree.check_same_structure(grads, params, ("grads", "params"))
        read = extra_of([rule], extra)[0]
        updates, inner = rule.update(grads, state.inner, wide_params(params, state.master), **read)
        old = dict(tree.flatten_with_paths(state.master)[0])
        new = {
            path: (old[path] + u).to(old[path].dtype) for path, u in tree.flatten_with_paths(updates)[0] if path in old
        }

        def shown(path: str, p: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
            return new[path].to(p.dtype).to(torch.float32) - p.to(torch.float32) if path in new else u

        master = tree.map_with_path(lambda path, _: new[path], state.master)
        return tree.map_with_path(shown, params, updates), MasterState(master, inner)

    return GradientTransformation(init, update, extra=rule.extra)


def _narrow(p: torch.Tensor) -> bool:
    return p.is_floating_point() and p.dtype.itemsize < 4


def wide_params(params: PyTree, master: PyTree) -> PyTree:
    """The parameters with masters in the place of narrow ones."""
    rows = dict(tree.flatten_with_paths(master)[0])
    return tree.map_with_path(lambda path, p: rows.get(path, p), params)
