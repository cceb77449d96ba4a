"""Initialisers: functions ``(key, shape, dtype) -> tensor`` for ``Param.init``.

They see the global shape, and draw by the global element index, so the bits are the same on every mesh. They
are frozen values: two declarations with equal initialisers are equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from functitan import random, tree
from functitan.annotations import Param
from functitan.errors import TreeError, raise_batch
from functitan.nn.padding import pad

Initializer = Callable[[Any, tuple[int, ...], torch.dtype], torch.Tensor]


@dataclass(frozen=True)
class _Constant:
    value: float

    def __call__(self, key: Any, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        device = key.device if isinstance(key, torch.Tensor) else None
        return torch.full(shape, self.value, dtype=dtype, device=device)


@dataclass(frozen=True)
class _Normal:
    std: float
    cutoff: float | None

    def __call__(self, key: Any, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if self.cutoff is None:
            return (random.normal(key, shape) * self.std).to(dtype)
        drawn = random.truncated_normal(key, -self.cutoff, self.cutoff, shape)
        return (drawn * (self.std / _truncated_std(self.cutoff))).to(dtype)


@dataclass(frozen=True)
class _FanIn:
    dims: tuple[int, ...]
    scale: float
    cutoff: float | None

    def __call__(self, key: Any, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        fan_in = math.prod(shape[d] for d in self.dims)
        return _Normal(self.scale / math.sqrt(fan_in), self.cutoff)(key, shape, dtype)


@dataclass(frozen=True)
class _DepthScaled:
    inner: Initializer

    def __call__(self, key: Any, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        drawn = self.inner(key, shape, torch.float32)
        depth = torch.arange(shape[0], device=drawn.device, dtype=torch.float32)
        factor = torch.rsqrt(2 * (depth + 1)).reshape(-1, *[1] * (len(shape) - 1))
        return (drawn * factor).to(dtype)


def zeros() -> Initializer:
    """All zeros."""
    return _Constant(0.0)


def ones() -> Initializer:
    """All ones.

    >>> ones()(None, (2,), torch.float32)
    tensor([1., 1.])
    """
    return _Constant(1.0)


def normal(std: float = 1.0) -> Initializer:
    """Normal with mean 0 and this standard deviation."""
    return _Normal(std, None)


def truncated_normal(std: float = 0.02, cutoff: float = 3.0) -> Initializer:
    """Normal without its tails, of standard deviation ``std`` after the truncation.

    Args:
        std: of the drawn values.
        cutoff: where the tails begin, in standard deviations of the normal before truncation.
    """
    return _Normal(std, cutoff)


def fan_in_scaled(fan_in: int | tuple[int, ...], scale: float = 1.0, cutoff: float | None = 3.0) -> Initializer:
    """Normal of standard deviation ``scale / sqrt(fan-in)`` (LeCun et al. 1998).

    Args:
        fan_in: the dim, or dims, an input vector runs along: the ``fan_in`` of the Param.
        scale: a factor on the standard deviation.
        cutoff: in standard deviations; None for an untruncated normal.
    """
    return _FanIn((fan_in,) if isinstance(fan_in, int) else tuple(fan_in), scale, cutoff)


def depth_scaled(inner: Initializer) -> Initializer:
    """``inner`` times ``1 / sqrt(2 (l + 1))`` for layer l, the index of the leading "layers" dim.

    For maps that write into the residual stream: its variance then grows with the logarithm of the depth
    instead of the depth (after Radford et al. 2019; per layer as in Zhang et al. 2019, arXiv:1908.11365).
    """
    return _DepthScaled(inner)


def init_params(key: torch.Tensor, declared: Any) -> Any:
    """Fill a tree of declarations, whole, on the device of the key.

    Every parameter has a key of its own, folded from its path: adding or renaming one changes no other.

    Args:
        key: a key of :mod:`functitan.random`.
        declared: a pytree of :class:`functitan.Param`.

    Returns:
        Tensors of the declared shapes and dtypes in the same structure.

    Raises:
        TreeError: leaves that are no Param, or initialisers that made another shape or dtype; all by path.
    """
    problems: list[str] = []

    def fill(path: str, param: Any) -> Any:
        if not isinstance(param, Param):
            problems.append(f"{path or 'the tree'} is a {type(param).__name__}; declare it as a Param.")
            return None
        # Padding is drawn nowhere: real entries have the same bits with and without it.
        shape = param.real_shape
        made = (param.init or truncated_normal())(random.fold_in(key, path), shape, param.dtype)
        if tuple(made.shape) != shape or made.dtype != param.dtype:
            problems.append(
                f"{path} is declared {shape} {param.dtype}, and its init made "
                f"{tuple(made.shape)} {made.dtype}; an init returns the shape and dtype that it is given."
            )
            return made
        return pad(param, made)

    filled = tree.map_with_path(fill, declared)
    raise_batch(TreeError, problems, "the parameters")
    return filled


def _truncated_std(cutoff: float) -> float:
    """The standard deviation of a standard normal within ``cutoff`` of zero (Johnson et al. 1994, 10.1)."""
    density = math.exp(-cutoff * cutoff / 2) / math.sqrt(2 * math.pi)
    return math.sqrt(1 - 2 * cutoff * density / math.erf(cutoff / math.sqrt(2)))
