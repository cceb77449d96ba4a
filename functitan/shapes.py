"""The shapes and dtypes of a function's result, without computing it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from functitan import _torch, tree
from functitan.annotations import activate
from functitan.errors import TraceError


@dataclass(frozen=True)
class ShapeDtypeStruct:
    """The type of a tensor that need not exist; a leaf of a pytree.

    >>> ShapeDtypeStruct((2, 3), torch.float32).ndim
    2
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self.shape)

    def numel(self) -> int:
        """The number of elements."""
        return torch.Size(self.shape).numel()


def eval_shape(f: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run ``f`` on shapes alone: no memory for tensors, no arithmetic.

    Args:
        f: a function of pytrees.
        args, kwargs: pytrees of tensors or :class:`ShapeDtypeStruct`; other leaves are passed as they are.

    Returns:
        The result's pytree with a :class:`ShapeDtypeStruct` for each tensor.

    Raises:
        TraceError: ``f`` needs the value of a tensor.

    >>> eval_shape(lambda x, w: x @ w, ShapeDtypeStruct((4, 10**6), torch.float32), torch.ones(10**6, 2))
    ShapeDtypeStruct(shape=(4, 2), dtype=torch.float32)
    """
    with _torch.shapes_only(tree.leaves((args, kwargs))) as convert, activate(None):

        def fake(leaf: Any) -> Any:
            if isinstance(leaf, ShapeDtypeStruct):
                return torch.empty(leaf.shape, dtype=leaf.dtype)
            return convert(leaf) if isinstance(leaf, torch.Tensor) else leaf

        args, kwargs = tree.map(fake, (args, kwargs))
        try:
            out = f(*args, **kwargs)
        except _torch.DATA_DEPENDENT_ERRORS:
            name = getattr(f, "__name__", type(f).__name__)
            raise TraceError(
                f"eval_shape of {name}: the function needs the value of a tensor (.item(), bool(tensor), or "
                "a shape that depends on data), and there are only shapes. Write torch.where for a choice, "
                "and pass sizes as Python integers."
            ) from None
    return tree.map(lambda v: ShapeDtypeStruct(tuple(v.shape), v.dtype) if isinstance(v, torch.Tensor) else v, out)
