"""Orthogonalisation of matrices by Newton-Schulz iteration, with its coefficient schedules as data.

A step ``X <- aX + (bG + cG^2)X`` with ``G = X X^T`` acts on each singular value alone, as
``sigma <- a sigma + b sigma^3 + c sigma^5``, and leaves singular vectors as they are. No schedule takes every singular
value to 1: see :func:`singular_value_map` for what one does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from functitan.errors import ArgumentError, listed, suggest
from functitan.ops.newton_schulz import newton_schulz_flops, newton_schulz_op

__all__ = [
    "SCHEDULES",
    "Coefficients",
    "coefficients",
    "newton_schulz",
    "newton_schulz_flops",
    "singular_value_map",
]


@dataclass(frozen=True)
class Coefficients:
    """A schedule: (a, b, c) of each step, so its length is the number of steps.

    Attributes:
        steps: the coefficients.
        safety: what the input is divided by beside its Frobenius norm, so that rounding cannot push a singular value
            out of the range that the coefficients are made for.
    """

    steps: tuple[tuple[float, float, float], ...]
    safety: float = 1.0

    def flat(self) -> list[float]:
        """a, b, c of each step, one after the other, as the ops take them."""
        flat = [value for step in self.steps for value in step]
        if flat and self.safety != 1.0:
            # The safety factor folded into the first step: p(x / s) = (a/s) x + (b/s^3) x^3 + (c/s^5) x^5.
            flat[:3] = [value / self.safety**power for value, power in zip(flat, (1, 3, 5), strict=False)]
        return flat


_QUINTIC = (3.4445, -4.7750, 2.0315)
#: Schedules by name.
SCHEDULES: dict[str, Coefficients] = {
    # Keller Jordan 2024, https://kellerjordan.github.io/posts/muon; torch.optim.Muon's default.
    "quintic": Coefficients((_QUINTIC,) * 5),
    # Amsel, Persson, Musco and Gower 2025, arXiv:2505.16932, with their safety factor.
    "polar_express": Coefficients(
        (
            (8.15655, -22.48329, 15.87877),
            (4.04293, -2.80892, 0.50002),
            (3.89167, -2.77248, 0.50606),
            (3.28575, -2.36813, 0.46449),
            (2.34654, -1.70978, 0.42324),
        ),
        safety=1.02,
    ),
    # DeepSeek-V4: eight steps that raise small values fast, two that settle at 1.
    "two_phase": Coefficients((_QUINTIC,) * 8 + ((2.0, -1.5, 0.5),) * 2),
}


def coefficients(schedule: str | Coefficients) -> Coefficients:
    """A schedule by name, or the one that is given.

    Raises:
        ArgumentError: no schedule has the name.

    >>> len(coefficients("two_phase").steps)
    10
    """
    if isinstance(schedule, Coefficients):
        return schedule
    if schedule not in SCHEDULES:
        raise ArgumentError(
            f'there is no Newton-Schulz schedule "{schedule}"; there are {listed(SCHEDULES)}.'
            f"{suggest(schedule, SCHEDULES)} One of your own is Coefficients(((a, b, c), ...))."
        )
    return SCHEDULES[schedule]


def newton_schulz(
    x: torch.Tensor,
    schedule: str | Coefficients = "quintic",
    *,
    dtype: torch.dtype = torch.bfloat16,
    eps: float = 1e-7,
) -> torch.Tensor:
    """Replace each matrix by one with the same singular vectors and singular values near 1.

    The input is cast to ``dtype`` and divided by ``max(norm, eps)`` times the schedule's safety factor, with its
    Frobenius norm; then come the steps, on the wide orientation (a matrix with more rows than columns is transposed
    first, and back). With "quintic" it is what ``torch.optim.Muon`` does, bit for bit on CPU.

    Args:
        x: (..., M, C), floating; leading dims are a batch of matrices.
        schedule: a name of :data:`SCHEDULES`, or coefficients.
        dtype: of the whole iteration.
        eps: the least norm. Matrices with a smaller norm come out small; a zero matrix stays zero.

    Returns:
        (..., M, C), contiguous, of dtype ``dtype``.

    Raises:
        ArgumentError: a value that is no matrix or not floating, or an unknown schedule.

    >>> newton_schulz(torch.diag(torch.tensor([3.0, 4.0])), "two_phase", dtype=torch.float32)
    tensor([[1.0001, 0.0000],
            [0.0000, 1.0005]])
    """
    if x.ndim < 2 or not x.is_floating_point():
        raise ArgumentError(
            f"newton_schulz needs floating matrices (..., rows, columns); found {x.dtype} {tuple(x.shape)}. "
            "Flatten other shapes to matrices first: a convolution's weight is (out, in * height * width)."
        )
    return newton_schulz_op(x.to(dtype), coefficients(schedule).flat(), eps)


def singular_value_map(sigma: torch.Tensor, schedule: str | Coefficients = "quintic") -> torch.Tensor:
    """What the steps make of singular values of a matrix whose Frobenius norm is 1.

    >>> singular_value_map(torch.tensor([0.0, 0.5, 1.0]), "two_phase")
    tensor([0.0000, 1.0002, 1.0000])
    """
    found = coefficients(schedule)
    sigma = sigma / found.safety
    for a, b, c in found.steps:
        sigma = a * sigma + b * sigma**3 + c * sigma**5
    return sigma
