"""How an op of ours says that its operands do not fit: the few checks and errors that ops share."""

from __future__ import annotations

import torch

from functitan.errors import ArgumentError, GradientError


class IndexRangeError(ArgumentError, IndexError):
    """An index that points outside the dim it selects from."""


def shaped(x: torch.Tensor) -> str:
    """A tensor as messages show it.

    >>> shaped(torch.ones(2, 3))
    'float32[2, 3]'
    """
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"


def require_integer(op: str, name: str, x: torch.Tensor) -> None:
    """Raise unless ``x`` holds integers (bool is not one)."""
    if x.dtype not in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        raise ArgumentError(f"{op} needs integers for {name}; found {shaped(x)}. Write {name}.long() or pass ids.")


def refuse_second_derivative(op: str) -> None:
    """Raise the error of an op whose backward has no derivative."""
    raise GradientError(
        f"A second derivative through {op} was asked for, and its backward is a kernel without a derivative. "
        "Take first derivatives only (ft.grad, ft.value_and_grad), or write the op in plain torch operations "
        "where you need the second one."
    )
