"""What a sharding rule is, and the registry of rules.

Most rules are equations over labels: ``mk,kn->mn``. A label that two dims share is one index set and must be split the
same way; a label that no output has is contracted, and leaves a pending sum over the axes that split it; ``_`` is a
dim that must be whole; ``(gr)`` is a dim that is the join of two labels; ``...`` are leading dims that broadcast.
``linear`` says through which operands a pending sum may pass: ``[{0}, {1}]`` through either alone (a product),
``[{0, 1}]`` only through both together (a sum).

Views are dim maps (they regroup digits); factories make any layout of themselves; and an op that shards only in parts
is decomposed when it must.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from functitan.errors import ShardingError
from functitan.sharding.layout import Dim, Layout

#: A dim of an equation: a label, "_" (whole), None (size 1: no index), or sub-labels with sizes, major to minor.
Factor = tuple[str, int]
Label = str | None | tuple[Factor, ...]
Labels = tuple[Label, ...]


@dataclass(frozen=True)
class TensorType:
    """Global shape and dtype of a value."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Call:
    """One op call as a rule sees it.

    Attributes:
        op: the overload.
        args, kwargs: its arguments; tensors stand as ``Operand(i)``.
        operands: the global types of the tensor arguments in order, nested lists included.
        outputs: the global types of the outputs; those that were not asked for (None) are left out.
        zeros: the operands that are known to be all zeros.
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    operands: tuple[TensorType, ...]
    outputs: tuple[TensorType, ...]
    zeros: frozenset[int] = frozenset()

    def argument(self, name: str, default: Any = None) -> Any:
        """An argument by its schema name, given by position or name or left out."""
        for i, a in enumerate(self.op._schema.arguments):
            if a.name == name:
                if name in self.kwargs:
                    return self.kwargs[name]
                if i < len(self.args):
                    return self.args[i]
                return a.default_value if a.has_default_value() else default
        return default


@dataclass(frozen=True)
class Operand:
    """A place for tensor argument number ``index``."""

    index: int


#: Makes the local call: (call, layouts of operands, layouts of outputs) -> arguments for the same op on local tensors.
LocalArguments = Callable[[Call, Sequence[Layout], Sequence[Layout]], tuple[tuple[Any, ...], dict[str, Any]]]
#: Emits other local ops instead: (emitter, call, local operands, layouts of operands, layouts of outputs) -> outputs.
Emit = Callable[[Any, Call, Sequence[Any], Sequence[Layout], Sequence[Layout]], list[Any]]

#: What to write instead: (call, layouts of operands) -> text.
Advice = Callable[[Call, Sequence[Layout | None]], str]


@dataclass(frozen=True)
class Equation:
    """A rule over labels.

    Attributes:
        inputs, outputs: labels of every operand and output.
        linear: groups of operands through which a pending sum may pass, all of a group together.
        reduce: what joins the parts of a contracted label: "sum" leaves a pending sum, "max" and the like are
            reduced at once.
        refs: operands that only lend their layout; their values are not read.
        through_storage: the op acts on a stored parameter as it is (a cast), without gathering it.
        local: local arguments, when sizes stand among them.
        emit: other local ops, when the op itself is not the local one.
        otherwise: what to use instead where a dim that must be whole is split.
        apart: (output, label): the output does not have the label because it does not depend on it, so that
            splitting the label leaves nothing pending there.
        advice: (call, layouts of operands) -> what to write where the operands cannot all keep their layouts; by
            default the ``constrain`` that would settle it.
    """

    inputs: tuple[Labels, ...]
    outputs: tuple[Labels, ...]
    linear: tuple[frozenset[int], ...] = ()
    reduce: str = "sum"
    refs: frozenset[int] = frozenset()
    through_storage: bool = False
    local: LocalArguments | None = None
    emit: Emit | None = None
    otherwise: Decompose | None = None
    apart: frozenset[tuple[int, str]] = frozenset()
    advice: Advice | None = None


@dataclass(frozen=True)
class DimMap:
    """A view: digits are regrouped, values stay.

    Attributes:
        forward: (digits of the operand's dims, axis sizes) -> digits of the output's; may raise Unsplittable.
        backward: the inverse, for values that can be made in any layout.
        local: the local op and its arguments after the operand, given the output's local shape.
    """

    forward: Callable[[Sequence[Dim], dict[str, int]], tuple[Dim, ...]]
    backward: Callable[[Sequence[Dim], dict[str, int]], tuple[Dim, ...]] | None
    local: Callable[[Sequence[int]], tuple[Any, tuple[Any, ...]]]


@dataclass(frozen=True)
class Expand:
    """A broadcast view: ``new`` are the output dims that the operand does not have or has with size 1.

    Attributes:
        source: per output dim the operand's dim, or None for a new one.
    """

    source: tuple[int | None, ...]


@dataclass(frozen=True)
class Factory:
    """An op that makes a value from sizes alone, in any layout.

    Attributes:
        emit: (emitter, call, layout) -> the local value.
        like: the operand whose layout is taken where nothing asks for another.
        zero: whether the value is all zeros.
    """

    emit: Callable[[Any, Call, Layout], Any]
    like: int | None = None
    zero: bool = False


@dataclass(frozen=True)
class Decompose:
    """Use ``function`` in place of the op; it is traced on the call's global types.

    Attributes:
        function: takes the op's arguments.
        key: what it depends on beside the call, so that it is traced once for each.
    """

    function: Callable[..., Any]
    key: Any = None


Rule = Equation | DimMap | Expand | Factory | Decompose
RuleFunction = Callable[[Call], Rule]
_RULES: dict[Any, RuleFunction] = {}
_FAMILY: dict[Any, str] = {}


def rule(*targets: Any) -> Callable[[RuleFunction], RuleFunction]:
    """Register a rule function for overloads or whole packets."""

    def register(f: RuleFunction) -> RuleFunction:
        for target in targets:
            overloads = [getattr(target, o) for o in target.overloads()] if hasattr(target, "overloads") else [target]
            for overload in overloads:
                _RULES[overload] = f
                _FAMILY[overload] = f.__module__.rsplit(".", 1)[-1]
        return f

    return register


def find_rule(op: Any) -> RuleFunction | None:
    """The rule function of an overload, or None."""
    return _RULES.get(op)


def covered() -> dict[str, list[str]]:
    """The covered ops by family, for ``functitan rules``."""
    families: dict[str, list[str]] = {}
    for op, family in _FAMILY.items():
        if family == "refused":  # these only say what to write instead
            continue
        families.setdefault(family, []).append(str(op))
    return {family: sorted(ops) for family, ops in sorted(families.items())}


def register_rule(op: Any, equation: str, *, linear: Sequence[set[int]] = (), reduce: str = "sum") -> None:
    """Give an op of your own a sharding rule in one line.

    Args:
        op: an op packet or overload, such as ``torch.ops.mylib.scaled_softmax``.
        equation: one group of labels per tensor operand and output, such as ``"..._,_->..._"``.
        linear: groups of operands through which pending sums may pass, such as ``[{0}]``.
        reduce: how a contracted label is joined: "sum", "max" or "min".

    The rule is proved by value when a program that uses it is verified.
    """
    groups = tuple(frozenset(g) for g in linear)

    def from_text(call: Call) -> Equation:
        return parse(equation, call, linear=groups, reduce=reduce)

    rule(op)(from_text)


def parse(
    equation: str,
    call: Call,
    *,
    linear: Sequence[frozenset[int]] = (),
    reduce: str = "sum",
    refs: frozenset[int] = frozenset(),
    local: LocalArguments | None = None,
    emit: Emit | None = None,
) -> Equation:
    """An equation's text with the sizes of a call.

    Raises:
        ShardingError: another number of operands, outputs or dims than the call has.
    """
    left, _, right = equation.partition("->")
    sides = [left.split(",") if left.strip() else [], right.split(",")]
    types = [call.operands, call.outputs]
    for kind, texts, found in zip(("operands", "outputs"), sides, types, strict=True):
        if len(texts) != len(found):
            raise ShardingError(
                f'the rule "{equation}" of {call.op} names {len(texts)} {kind}; the call has {len(found)} tensors there.'
            )
    sizes: dict[str, int] = {}
    rows = [
        [_tokens(t.strip(), typ.ndim, equation, call) for t, typ in zip(texts, found, strict=True)]
        for texts, found in zip(sides, types, strict=True)
    ]
    for row, found in zip(rows, types, strict=True):
        for tokens, typ in zip(row, found, strict=True):
            for token, size in zip(tokens, typ.shape, strict=True):
                if len(token) == 1 or token.startswith("."):
                    sizes[token] = max(size, sizes.get(token, 1))

    def label(token: str, size: int) -> Label:
        if token == "_":
            return "_"
        if not token.startswith("("):
            return None if size == 1 else token
        inner = list(token[1:-1])
        known = math.prod(sizes[c] for c in inner if c in sizes)
        return tuple((c, sizes.get(c, size // known)) for c in inner)

    made = [
        tuple(
            tuple(label(token, size) for token, size in zip(tokens, typ.shape, strict=True))
            for tokens, typ in zip(row, found, strict=True)
        )
        for row, found in zip(rows, types, strict=True)
    ]
    return Equation(made[0], made[1], tuple(linear), reduce, refs, local=local, emit=emit)


def _tokens(text: str, ndim: int, equation: str, call: Call) -> list[str]:
    """One token per dim: a letter, "_", "(ab)", or ".i" for the i-th dim from the right under "..."."""
    tokens: list[str] = []
    i = 0
    while i < len(text):
        if text.startswith("...", i):
            tokens.append("...")
            i += 3
        elif text[i] == "(":
            end = text.index(")", i)
            tokens.append(text[i : end + 1])
            i = end + 1
        else:
            tokens.append(text[i])
            i += 1
    if "..." in tokens:
        at = tokens.index("...")
        n = ndim - (len(tokens) - 1)
        tokens[at : at + 1] = [f".{j}" for j in range(n - 1, -1, -1)]
    if len(tokens) != ndim:
        raise ShardingError(
            f'the rule "{equation}" of {call.op} gives {len(tokens)} labels to a tensor of {ndim} dims.'
        )
    return tokens


@dataclass
class Conflict:
    """Operands that cannot all keep their layout.

    Attributes:
        what: one sentence on the axis or label.
        operands: the operands that disagree.
    """

    what: str
    operands: tuple[int, ...]


@dataclass
class Solution:
    """How a call runs: the layouts that its operands must have and those that its outputs get.

    Where there are conflicts, ``advice`` is what the rule says to write; empty for a ``constrain``.
    """

    operands: list[Layout]
    outputs: list[Layout]
    conflicts: list[Conflict] = field(default_factory=list)
    masked: frozenset[tuple[int, str]] = frozenset()
    advice: str = ""
