"""The global norm, clipping by it, and steps that are not finite."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import torch

from functitan import tree
from functitan.errors import ArgumentError, NonfiniteError
from functitan.optim.transform import GradientTransformation, PyTree, extra_of


def global_norm(values: PyTree) -> torch.Tensor:
    """The Euclidean norm of all elements of all leaves.

    Squares are summed in float64: a float32 square overflows from 1.8e19 on, and a finite gradient would then
    have an infinite norm and be clipped to zero.

    Returns:
        0-d float32; infinite or NaN exactly when an element is, or when the norm exceeds the range of
        float32.

    >>> global_norm({"a": torch.tensor([3.0]), "b": torch.tensor([4.0])})
    tensor(5.)
    """
    sums = [leaf.to(torch.float64).square().sum() for leaf in tree.leaves(values)]
    total = sums[0] if sums else torch.zeros((), dtype=torch.float64)
    for term in sums[1:]:
        total = total + term
    return total.sqrt().to(torch.float32)


def clip_scale(norm: torch.Tensor, max_norm: float | torch.Tensor) -> torch.Tensor:
    """The 0-d factor that brings ``norm`` down to ``max_norm``; 1 where it is below."""
    if isinstance(max_norm, torch.Tensor):
        max_norm = max_norm.to(norm.dtype)
    # The divisor is at least max_norm, so a norm of zero is no special case.
    return max_norm / norm.clamp(min=max_norm)


@tree.dataclass
class ClipState:
    """``norm``: the global norm before clipping, of the last update; 0-d float32."""

    norm: torch.Tensor


def clip_by_global_norm(max_norm: float | torch.Tensor) -> GradientTransformation:
    """Scale all gradients by one factor so that their global norm is at most ``max_norm`` (Pascanu et al.
    2013).

    A gradient that is not finite stays so; :func:`skip_nonfinite` deals with it.
    """

    def init(params: PyTree) -> ClipState:
        return ClipState(_scalar(params, 0.0))

    def update(grads: PyTree, state: ClipState, params: PyTree) -> tuple[PyTree, ClipState]:
        norm = global_norm(grads)
        scale = clip_scale(norm, max_norm)
        return tree.map(lambda g: g * scale.to(g.dtype), grads), ClipState(norm)

    return GradientTransformation(init, update)


def clip_by_value(limit: float | torch.Tensor) -> GradientTransformation:
    """Bring every element into [-limit, limit]; NaN stays NaN.

    It changes the direction of the gradient, which :func:`clip_by_global_norm` does not.

    Raises:
        ArgumentError: a limit that is not above 0.

    >>> rule = clip_by_value(1.0)
    >>> grads = {"w": torch.tensor([-3.0, 0.5])}
    >>> rule.update(grads, rule.init(grads), grads)[0]
    {'w': tensor([-1.0000,  0.5000])}
    """
    if not isinstance(limit, torch.Tensor) and not limit > 0:
        raise ArgumentError(f"clip_by_value was given limit={limit}; every gradient would be 0. Write one above 0.")

    def update(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        return tree.map(lambda g: g.clamp(-limit, limit).to(g.dtype), grads), state

    return GradientTransformation(lambda params: (), update)


@tree.dataclass
class SkipState:
    """The state of :func:`skip_nonfinite`.

    Attributes:
        norm: the global gradient norm of the last step, before clipping; not finite when it was skipped. In mode
            "raise", that of the step that stopped it.
        skipped: how many steps were skipped, 0-d int64.
        inner: the state of the inner transformation.
        mode: "skip" or "raise"; part of the structure.
    """

    norm: torch.Tensor
    skipped: torch.Tensor
    inner: Any
    mode: Literal["skip", "raise"] = dataclasses.field(default="skip", metadata={"static": True})


def skip_nonfinite(
    inner: GradientTransformation,
    max_norm: float | torch.Tensor | None = None,
    *,
    mode: Literal["skip", "raise"] = "skip",
) -> GradientTransformation:
    """Leave parameters and state as they are in a step whose gradient norm is not finite, and count it.

    The decision is a value of the global gradient, so it is the same everywhere. Clipping is done here too,
    because it needs the same norm: one reduction serves both.

    Args:
        inner: the rule to guard; its state, the step count included, stays as it was in a skipped step.
        max_norm: clip by this global norm first; None not to.
        mode: after such a step "skip" goes on with the next. "raise" leaves out every later step too, so that the state
            is the one before the bad step whenever :func:`raise_nonfinite`, which waits for the device, looks at it.

    Returns:
        A transformation with the state :class:`SkipState`.

    Raises:
        ArgumentError: another mode.

    >>> from functitan.optim import sgd
    >>> rule, params = skip_nonfinite(sgd(1.0), mode="raise"), {"w": torch.tensor(1.0)}
    >>> _, state = rule.update({"w": torch.tensor(float("nan"))}, rule.init(params), params)
    >>> updates, state = rule.update(params, state, params)
    >>> updates, int(state.skipped)
    ({'w': tensor(0.)}, 2)
    """
    if mode not in ("skip", "raise"):
        raise ArgumentError(f'skip_nonfinite was given mode="{mode}"; there are "skip" and "raise".')

    def init(params: PyTree) -> SkipState:
        skipped = _scalar(params, 0.0).to(torch.int64)
        return SkipState(_scalar(params, 0.0), skipped, inner.init(params), mode)

    def update(grads: PyTree, state: SkipState, params: PyTree, **extra: PyTree) -> tuple[PyTree, SkipState]:
        norm = global_norm(grads)
        finite = torch.isfinite(norm)
        if mode == "raise":
            norm = torch.where(state.skipped > 0, state.norm, norm)
            finite = torch.isfinite(norm)
        if max_norm is not None:
            scale = clip_scale(norm, max_norm)
            grads = tree.map(lambda g: g * scale.to(g.dtype), grads)
        updates, new = inner.update(grads, state.inner, params, **extra_of([inner], extra)[0])
        updates = tree.map(lambda u: torch.where(finite, u, 0.0), updates)
        kept = tree.map(lambda n, o: torch.where(finite, n, o), new, state.inner)
        return updates, SkipState(norm, state.skipped + (~finite).to(torch.int64), kept, mode)

    return GradientTransformation(init, update, extra=inner.extra)


def raise_nonfinite(state: PyTree) -> None:
    """Raise where a guard of mode "raise" has left a step out; otherwise, and for other modes, do nothing.

    All ranks hold the same counts, so all raise. Call it as often as the loop reads metrics: it waits for the device.

    Args:
        state: of any rule with :func:`skip_nonfinite` in it, from outside of compiled functions.

    Raises:
        NonfiniteError: says the norm and how many steps ago it was.

    >>> from functitan.optim import sgd
    >>> rule, params = skip_nonfinite(sgd(1.0), mode="raise"), {"w": torch.tensor(1.0)}
    >>> _, state = rule.update({"w": torch.tensor(float("nan"))}, rule.init(params), params)
    >>> raise_nonfinite(state)
    Traceback (most recent call last):
    functitan.errors.NonfiniteError: the gradient of the last step has the global norm nan. ...
    """
    if isinstance(state, SkipState) and state.mode == "raise" and int(state.skipped):
        steps = int(state.skipped)
        when = "the last step" if steps == 1 else f"the step {steps} steps ago"
        raise NonfiniteError(
            f"the gradient of {when} has the global norm {float(state.norm)}. Parameters and optimizer state are those "
            'before it: look for the cause there, or go on without such steps by mode="skip".'
        )
    found = tree.children(state)
    for child in found[0] if found is not None else ():
        raise_nonfinite(child)


def _scalar(params: PyTree, value: float) -> torch.Tensor:
    leaves = tree.leaves(params)
    return torch.full((), value, dtype=torch.float32, device=leaves[0].device if leaves else None)
