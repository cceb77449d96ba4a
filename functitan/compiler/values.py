"""Values during lowering: a global value and the local nodes that hold it in one or more layouts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from functitan.sharding.layout import Layout
from functitan.sharding.op_rules.base import Call, Equation, TensorType


@dataclass(eq=False)
class Value:
    """A global value.

    Attributes:
        type: global shape and dtype.
        layout: its own layout; None for a value that is made on demand in any layout (a factory and what is pointwise
            in it), so that each rank makes only its part.
        versions: the local nodes by layout.
        make: makes the local node for a layout, where that is cheaper than resharding.
        free: dims that ``make`` can split in any way at no cost, of a value that has a layout: no operand has them, as
            the vocabulary in ``arange(V) == labels[..., None]``. What is pointwise in such values stays so.
        settled_only: whether ``make`` makes no pending sums.
        preferred: the layout that a value without one takes where nothing asks for another.
        source: the global node, for the decision where a pending sum is resolved.
        param: the path of the parameter that this is, or is a cast or slice of.
        passed: the axes over which some reader took a pending sum as it is.
        resolved: the layouts in which readers needed it settled.
        zero: whether it is known to be all zeros.
    """

    type: TensorType
    layout: Layout | None
    versions: dict[tuple[Layout, bool], fx.Node] = field(default_factory=dict)
    make: Callable[[Layout], fx.Node] | None = None
    free: frozenset[int] = frozenset()
    settled_only: bool = False
    preferred: Layout | None = None
    source: fx.Node | None = None
    param: str = ""
    passed: set[str] = field(default_factory=set)
    resolved: list[Layout] = field(default_factory=list)
    zero: bool = False


@dataclass(eq=False)
class Applied:
    """How a rule was applied to a call.

    Attributes:
        call: the global call.
        operands, outputs: the layouts it was given and gave.
        emit: makes the local ops: (emitter, local operands) -> local outputs.
        reduce: how the parts of a contracted dim were joined; anything but "sum" at once.
        equation: the rule, when it is one.
    """

    call: Call
    operands: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    emit: Callable[[Any, list[Any]], list[Any]]
    reduce: str = "sum"
    equation: Equation | None = None

    @property
    def key(self) -> Any:
        """Calls with equal keys are checked once."""
        c = self.call
        return (str(c.op), repr(c.args), repr(sorted(c.kwargs.items())), c.operands, self.operands, self.outputs)


class Opaque:
    """The token of a region call: what its backward call needs to know."""

    def __init__(self, lowered: object, saved: list[fx.Node], inputs: list[fx.Node]) -> None:
        self.lowered = lowered
        self.saved = saved
        self.inputs = inputs
