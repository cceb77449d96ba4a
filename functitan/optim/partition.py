"""Different rules for different leaves, chosen by path: one leaf, one rule, and a table that says which."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from functitan import tree
from functitan.columns import columns
from functitan.errors import ArgumentError, listed, raise_batch, suggest
from functitan.optim.transform import GradientTransformation, PyTree, extra_names, extra_of

#: Pairs of pattern and label, in order; the first pattern that matches a leaf's path gives its label. A text is a
#: glob for the whole path, in which ``*`` also matches "/"; a compiled regular expression matches the whole path.
Labels = Sequence[tuple[str | re.Pattern[str], str]]


@tree.dataclass
class PartitionState:
    """The state of :func:`partition`: by label the state of its rule, over the tree with None for other leaves."""

    groups: dict[str, Any]


def label_tree(params: PyTree, labels: Labels) -> PyTree:
    """The label of every leaf, in the structure of the parameters.

    Leaves may be anything with a path: tensors, Arrays, or declarations.

    Raises:
        ArgumentError: names, together, every leaf that no pattern matches and every pattern that gives no leaf its
            label.

    >>> label_tree({"embed": 0, "wq": 1, "wk": 2}, [("w?", "muon"), ("*", "adamw")])
    {'embed': 'adamw', 'wq': 'muon', 'wk': 'muon'}
    """
    paths = tree.paths(params)
    chosen: list[str] = []
    used: set[int] = set()
    problems: list[str] = []
    for path in paths:
        at = next((i for i, (pattern, _) in enumerate(labels) if _matches(pattern, path)), None)
        if at is None:
            problems.append(
                f"leaf {path} matches no pattern; the patterns are {listed(_text(p) for p, _ in labels)}."
                f'{suggest(path, [_text(p) for p, _ in labels])} Add ("{path}", label), or ("*", label) as the last one.'
            )
            continue
        used.add(at)
        chosen.append(labels[at][1])
    for i, (pattern, label) in enumerate(labels):
        if i not in used:
            problems.append(_unused(pattern, label, paths, labels[:i]))
    raise_batch(ArgumentError, problems, "the labels of an optimizer")
    return tree.unflatten(tree.structure(params), chosen)


def masks(params: PyTree, labels: Labels) -> dict[str, PyTree]:
    """By label, a tree of bools that says which leaves have it; every leaf is True in exactly one.

    Raises:
        ArgumentError: as :func:`label_tree`.

    >>> masks({"embed": 0, "wq": 1}, [("w?", "muon"), ("*", "adamw")])
    {'muon': {'embed': False, 'wq': True}, 'adamw': {'embed': True, 'wq': False}}
    """
    found = label_tree(params, labels)
    names = dict.fromkeys(label for _, label in labels)
    return {name: tree.map(lambda own, name=name: own == name, found) for name in names}


def table(params: PyTree, labels: Labels) -> str:
    """Which rule steps each leaf, a line per leaf: path, shape, label.

    Raises:
        ArgumentError: as :func:`label_tree`.

    >>> import torch
    >>> print(table({"wq": torch.ones(2, 3), "norm": torch.ones(2)}, [("w?", "muon"), ("*", "adamw")]))
    parameter  shape  rule
    norm       2      adamw
    wq         2x3    muon
    """
    rows: list[tuple[object, ...]] = [("parameter", "shape", "rule")]
    found = tree.leaves(label_tree(params, labels))
    for (path, leaf), label in zip(tree.flatten_with_paths(params)[0], found, strict=True):
        rows.append((path, "x".join(map(str, leaf.shape)) or "scalar", label))
    return columns(rows)


def partition(rules: Mapping[str, GradientTransformation], labels: Labels) -> GradientTransformation:
    """Step each leaf by the rule of its label (Optax's ``partition``, by path).

    A rule sees the tree of parameters with None in place of the leaves of other rules, so paths are the same for it,
    and a norm that it takes is over its own leaves.

    Args:
        rules: a transformation per label.
        labels: patterns for paths, in order; see :data:`Labels`.

    Returns:
        A transformation with the state :class:`PartitionState`, which has its structure from ``init`` on.

    Raises:
        ArgumentError: here, a label without a rule or a rule without a label; from ``init`` and ``update``, leaves
            and patterns without a match.

    >>> import torch
    >>> double = GradientTransformation(lambda p: (), lambda g, s, p: (tree.map(lambda x: 2 * x, g), s))
    >>> keep = GradientTransformation(lambda p: (), lambda g, s, p: (g, s))
    >>> both = partition({"twice": double, "once": keep}, [("w*", "twice"), ("*", "once")])
    >>> params = {"w": torch.tensor(1.0), "norm": torch.tensor(1.0)}
    >>> both.update(params, both.init(params), params)[0]
    {'w': tensor(2.), 'norm': tensor(1.)}
    """
    given = dict.fromkeys(label for _, label in labels)
    problems = [
        f'pattern {_text(pattern)} gives the label "{label}", and there are rules for {listed(rules)}.'
        f"{suggest(label, rules)}"
        for pattern, label in labels
        if label not in rules
    ]
    problems += [
        f'no pattern gives the label "{name}", which has a rule. Add (pattern, "{name}"), or leave the rule out.'
        for name in rules
        if name not in given
    ]
    raise_batch(ArgumentError, problems, "partition")

    def init(params: PyTree) -> PartitionState:
        own = label_tree(params, labels)
        return PartitionState({name: rules[name].init(_only(params, own, name)) for name in given})

    def update(grads: PyTree, state: PartitionState, params: PyTree, **extra: PyTree) -> tuple[PyTree, PartitionState]:
        tree.check_same_structure(grads, params, ("grads", "params"))
        own = label_tree(params, labels)
        groups: dict[str, Any] = {}
        rows: dict[str, Any] = {}
        reads = dict(zip(given, extra_of([rules[name] for name in given], extra), strict=True))
        for name in given:
            mine = _only(params, own, name)
            updates, groups[name] = rules[name].update(_only(grads, own, name), state.groups[name], mine, **reads[name])
            tree.check_same_structure(updates, mine, (f'the updates of rule "{name}"', "its parameters"))
            rows |= dict(tree.flatten_with_paths(updates)[0])
        merged = tree.map_with_path(lambda path, _: rows[path], params)
        return merged, PartitionState(groups)

    return GradientTransformation(init, update, extra=extra_names(rules.values()))


def masked(rule: GradientTransformation, keep: Callable[[str], bool]) -> GradientTransformation:
    """Apply a transformation to the leaves whose path ``keep`` says; the others pass through unchanged.

    >>> import torch
    >>> double = GradientTransformation(lambda p: (), lambda g, s, p: (tree.map(lambda x: 2 * x, g), s))
    >>> rule = masked(double, lambda path: path != "norm")
    >>> params = {"w": torch.tensor(1.0), "norm": torch.tensor(1.0)}
    >>> rule.update(params, rule.init(params), params)[0]
    {'w': tensor(2.), 'norm': tensor(1.)}
    """

    def only(values: PyTree) -> PyTree:
        return tree.map_with_path(lambda path, leaf: leaf if keep(path) else None, values)

    def init(params: PyTree) -> PyTree:
        return rule.init(only(params))

    def update(grads: PyTree, state: PyTree, params: PyTree, **extra: PyTree) -> tuple[PyTree, PyTree]:
        updates, state = rule.update(only(grads), state, only(params), **extra_of([rule], extra)[0])
        rows = dict(tree.flatten_with_paths(updates)[0])
        return tree.map_with_path(lambda path, g: rows.get(path, g), grads), state

    return GradientTransformation(init, update, extra=rule.extra)


def _only(values: PyTree, own: PyTree, name: str) -> PyTree:
    """The tree with None, which is no leaf, wherever another rule steps."""
    return tree.map(lambda leaf, label: leaf if label == name else None, values, own)


def _matches(pattern: str | re.Pattern[str], path: str) -> bool:
    if isinstance(pattern, re.Pattern):
        return pattern.fullmatch(path) is not None
    return fnmatch.fnmatchcase(path, pattern)


def _text(pattern: str | re.Pattern[str]) -> str:
    return f"re.compile({pattern.pattern!r})" if isinstance(pattern, re.Pattern) else f'"{pattern}"'


def _unused(pattern: str | re.Pattern[str], label: str, paths: Sequence[str], before: Labels) -> str:
    """A pattern that gives no leaf its label: none matches, or earlier patterns have them all."""
    taken = [path for path in paths if _matches(pattern, path)]
    if not taken:
        plain = pattern.pattern if isinstance(pattern, re.Pattern) else pattern.replace("*", "")
        near = suggest(plain, paths) or f" The leaves are {listed(paths[:8])}{', ...' if len(paths) > 8 else ''}."
        return f'pattern {_text(pattern)} for "{label}" matches no leaf.{near}'
    first = next(_text(p) for p, _ in before if _matches(p, taken[0]))
    return (
        f'pattern {_text(pattern)} for "{label}" gives no leaf its label: earlier patterns match {listed(taken[:8])} '
        f"first, such as {first}. Write it before them, or leave it out."
    )
