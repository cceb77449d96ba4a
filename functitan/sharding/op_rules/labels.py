"""Helpers that make the labels of rules from shapes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from functitan.sharding.op_rules.base import Call, Equation, Labels


def labels(shape: Sequence[int], whole: Collection[int] = ()) -> Labels:
    """One label per dim, by its number; "_" for dims that must be whole, none for a size of 1.

    >>> labels((4, 1, 6), whole={2})
    ('d0', None, '_')
    """
    return tuple("_" if d in whole else None if n == 1 else f"d{d}" for d, n in enumerate(shape))


def normal_dims(dims: Any, ndim: int) -> set[int]:
    """Dims as a set of non-negative numbers; None and an empty list are all dims.

    >>> normal_dims([-1, 0], 3)
    {0, 2}
    """
    if dims is None or (not isinstance(dims, int) and not len(dims)):
        return set(range(ndim))
    return {d % max(ndim, 1) for d in ([dims] if isinstance(dims, int) else dims)} if ndim else set()


def along(call: Call, dims: Any, linear: tuple[frozenset[int], ...] = (), **more: Any) -> Equation:
    """Operands and outputs of one shape, whole along some dims."""
    shape = call.operands[0].shape
    row = labels(shape, normal_dims(dims, len(shape)))
    return Equation((row,) * len(call.operands), (row,) * len(call.outputs), linear, **more)


def all_whole(call: Call) -> Equation:
    """Everything whole."""
    whole = lambda types: tuple(("_",) * t.ndim for t in types)  # noqa: E731
    return Equation(whole(call.operands), whole(call.outputs))
