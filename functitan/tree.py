"""Pytrees: nested containers of leaves, with optree underneath.

Dicts (with string keys), lists, tuples, namedtuples, None and registered dataclasses are containers;
everything else is a leaf. A leaf has a path such as ``layers/wq`` that messages, checkpoints and reports use.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, dataclass_transform

import optree

from functitan.errors import TreeError, raise_batch

_NAMESPACE = "functitan"
_T = TypeVar("_T")
PyTree = Any
TreeDef = optree.PyTreeSpec


@dataclass_transform(frozen_default=True)
def dataclass(cls: type[_T]) -> type[_T]:
    """Make a class a frozen dataclass that is a pytree node; every field is a child.

    The class gets ``replace(**changes)``, which returns a changed copy. Fields declared with
    ``field(metadata={"static": True})`` are part of the structure instead of being children.

    >>> @dataclass
    ... class Point:
    ...     x: int
    ...     y: int
    >>> map(lambda v: v + 1, Point(1, 2)).replace(y=9)
    Point(x=2, y=9)
    """
    made = dataclasses.dataclass(frozen=True)(cls)
    names = [f.name for f in dataclasses.fields(made)]  # type: ignore[arg-type]
    static = [f.name for f in dataclasses.fields(made) if f.metadata.get("static")]  # type: ignore[arg-type]
    children = [n for n in names if n not in static]

    def flatten_node(node: Any) -> tuple[Any, Any, Any]:
        return (
            tuple(getattr(node, n) for n in children),
            tuple(getattr(node, n) for n in static),
            tuple(children),
        )

    def unflatten_node(meta: Any, kids: Any) -> Any:
        return made(**dict(zip(children, kids, strict=True)), **dict(zip(static, meta, strict=True)))

    optree.register_pytree_node(made, flatten_node, unflatten_node, namespace=_NAMESPACE)  # type: ignore[arg-type]
    made.replace = dataclasses.replace  # type: ignore[attr-defined]
    return made  # type: ignore[return-value]


def flatten(tree: PyTree) -> tuple[list[Any], TreeDef]:
    """The leaves in a fixed order (dict keys sorted), and the structure."""
    leaves, treedef = optree.tree_flatten(tree, namespace=_NAMESPACE)
    return leaves, treedef


def unflatten(treedef: TreeDef, leaves: Sequence[Any]) -> PyTree:
    """The tree of that structure with these leaves: the inverse of :func:`flatten`."""
    return optree.tree_unflatten(treedef, leaves)


def leaves(tree: PyTree) -> list[Any]:
    """The leaves in the order of :func:`flatten`."""
    return optree.tree_leaves(tree, namespace=_NAMESPACE)


def structure(tree: PyTree) -> TreeDef:
    """The structure without the leaves; two structures compare with ``==``."""
    return optree.tree_structure(tree, namespace=_NAMESPACE)


def children(node: PyTree) -> tuple[list[Any], list[Any]] | None:
    """The direct children of a container and their keys, None for a leaf.

    >>> children({"b": [1], "a": 2}), children(3)
    (([2, [1]], ['a', 'b']), None)
    """
    if optree.treespec_is_leaf(structure(node), strict=True):
        return None
    kids, _, keys, _ = optree.tree_flatten_one_level(node, namespace=_NAMESPACE)
    return list(kids), list(keys)


def paths(tree: PyTree) -> list[str]:
    """The path of every leaf, in the order of :func:`flatten`.

    >>> paths({"layers": {"wq": 1, "wk": 2}, "norms": [3, 4]})
    ['layers/wk', 'layers/wq', 'norms/0', 'norms/1']
    """
    return ["/".join(str(k) for k in path) for path in optree.tree_paths(tree, namespace=_NAMESPACE)]


def flatten_with_paths(tree: PyTree) -> tuple[list[tuple[str, Any]], TreeDef]:
    """Pairs of path and leaf, and the structure."""
    found, treedef = flatten(tree)
    return list(zip(paths(tree), found, strict=True)), treedef


def map(f: Callable[..., Any], tree: PyTree, *rest: PyTree, is_leaf: Callable[[Any], bool] | None = None) -> PyTree:
    """Apply ``f`` to the leaves of trees of one structure.

    Args:
        is_leaf: containers of the first tree that count as leaves, as in JAX.

    Raises:
        TreeError: a tree of ``rest`` has another structure; the message names the differing paths.
    """
    for other in rest:
        check_same_structure(tree, other)
    return optree.tree_map(f, tree, *rest, is_leaf=is_leaf, namespace=_NAMESPACE)


def map_with_path(f: Callable[..., Any], tree: PyTree, *rest: PyTree) -> PyTree:
    """As :func:`map`, with the leaf's path as the first argument of ``f``.

    >>> map_with_path(lambda path, v: f"{path}={v}", {"a": 1, "b": 2})
    {'a': 'a=1', 'b': 'b=2'}
    """
    for other in rest:
        check_same_structure(tree, other)
    columns = [paths(tree), leaves(tree), *(leaves(r) for r in rest)]
    return unflatten(structure(tree), [f(*row) for row in zip(*columns, strict=True)])


def check_same_structure(a: PyTree, b: PyTree, names: tuple[str, str] = ("first", "second")) -> None:
    """Raise a TreeError that names the leaves which only one of two trees has.

    >>> check_same_structure({"w": 1}, {"w": 1, "b": 2}, ("grads", "params"))
    Traceback (most recent call last):
    functitan.errors.TreeError: grads and params must have the same structure; only params has: b.
    """
    if structure(a) == structure(b):
        return
    in_a, in_b = paths(a), paths(b)
    problems, near = [], ""
    for name, mine, other in ((names[0], in_a, in_b), (names[1], in_b, in_a)):
        only = [p for p in mine if p not in set(other)]
        if only:
            shown = ", ".join(only[:8]) + (f" and {len(only) - 8} more" if len(only) > 8 else "")
            problems.append(f"only {name} has: {shown}")
            match = difflib.get_close_matches(only[0], [p for p in other if p not in set(mine)], n=1)
            near = near or (f" Is {only[0]} meant to be {match[0]}?" if match else "")
    detail = "; ".join(problems) or f"same paths, other containers: {structure(a)} and {structure(b)}"
    raise_batch(TreeError, [f"{names[0]} and {names[1]} must have the same structure; {detail}.{near}"], "the trees")
