"""Parameters whose declaration pads them: real entries first, zeros behind."""

from __future__ import annotations

from typing import Any

import torch

from functitan import tree
from functitan.annotations import Param


def pad(param: Param, x: torch.Tensor) -> torch.Tensor:
    """A tensor of the real shape, with the zeros that its declaration adds.

    >>> pad(Param((4,), ("vocab",), pad=(1,)), torch.ones(3))
    tensor([1., 1., 1., 0.])
    """
    if not any(param.pad or ()):
        return x
    # torch counts from the last dim: (before, after) each.
    return torch.nn.functional.pad(x, [n for p in reversed(param.pad or ()) for n in (0, p)])


def unpad(param: Param, x: torch.Tensor) -> torch.Tensor:
    """The real entries of a parameter.

    >>> unpad(Param((4,), ("vocab",), pad=(1,)), torch.tensor([1.0, 2.0, 3.0, 0.0]))
    tensor([1., 2., 3.])
    """
    return x[tuple(slice(n) for n in param.real_shape)] if any(param.pad or ()) else x


def unpadded(declared: Any, params: Any) -> Any:
    """:func:`unpad` for trees of declarations and whole parameters: what is saved and exported."""
    return tree.map(unpad, declared, params)
