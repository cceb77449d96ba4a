"""When two functions are one body: a key of everything that a function closes over."""

from __future__ import annotations

import functools
from typing import Any

import torch

from functitan import tree


def signed(value: Any) -> tuple[Any, list[torch.Tensor]]:
    """A key of what a function closes over, or of other static values, and the tensors therein in a fixed order.

    Calls with equal keys and tensors of equal types are one body. Values that are neither plain data nor plain
    Python functions are their own key.
    """
    tensors: list[torch.Tensor] = []
    places: dict[int, int] = {}
    open_functions: list[int] = []  # a function may close over itself

    def sign(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            # The first place of the same tensor: two names for one are another closure than one for each.
            place = places.setdefault(id(value), len(tensors))
            tensors.append(value)
            return ("tensor", place, tuple(value.shape), value.dtype, value.requires_grad)
        if isinstance(value, functools.partial):
            return ("partial", sign(value.func), sign(value.args), sign(value.keywords))
        code = getattr(value, "__code__", None)
        if code is not None:
            if id(value) in open_functions:
                return ("itself", open_functions.index(id(value)))
            open_functions.append(id(value))
            cells = getattr(value, "__closure__", None) or ()
            filled = tuple(sign(c.cell_contents) for c in cells if _filled(c))
            defaults = sign((getattr(value, "__defaults__", None), getattr(value, "__kwdefaults__", None)))
            open_functions.pop()
            return ("function", code, filled, defaults, id(getattr(value, "__self__", None)))
        leaves, treedef = tree.flatten(value)
        if len(leaves) != 1 or leaves[0] is not value:
            return ("tree", treedef, tuple(sign(leaf) for leaf in leaves))
        try:
            hash(value)
        except TypeError:
            return ("object", id(value))
        # Equal is not alike: 1 == 1.0 == True, and 0.0 == -0.0.
        return ("value", type(value), value, repr(value) if isinstance(value, float | complex) else "")

    return sign(value), tensors


def _filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018 (an empty cell raises)
    except ValueError:
        return False
    return True
