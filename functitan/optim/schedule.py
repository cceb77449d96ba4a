"""Learning-rate schedules: functions of the 0-d step, so that no step recompiles."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Literal, get_args

import torch

from functitan.errors import ConfigError, listed, raise_batch, suggest
from functitan.optim.transform import Schedule

Decay = Literal["linear", "sqrt", "cosine"]


def warmup_stable_decay(
    peak: float,
    steps: int,
    warmup: int,
    *,
    decay_ratio: float | None = None,
    decay: Decay = "linear",
    min_factor: float = 0.0,
) -> Schedule:
    """Linear warmup to ``peak``, a plateau, and a decay to ``min_factor * peak`` (Hu et al. 2024,
    arXiv:2404.06395).

    With progress p over the decay, the factor is ``min_factor + (1 - min_factor) f(p)``, where f is ``1 - p``
    (linear), ``1 - sqrt(p)`` (sqrt) or ``(1 + cos(pi p)) / 2`` (cosine). The first step of the decay has p =
    0 and the step after the last would have p = 1: no step of the run is wasted on a rate of zero.

    Args:
        peak: the rate of the plateau.
        steps: the length of the run.
        warmup: steps of warmup, at most ``steps`` (more count as ``steps``); step i has factor (i + 1) /
            warmup.
        decay_ratio: the share of ``steps`` that decays, at most what warmup leaves; None for all that it
            leaves.
        decay: the shape f.
        min_factor: the factor at the end.

    Returns:
        A function of a 0-d integer tensor, giving a 0-d float32 tensor on its device.

    Raises:
        ConfigError: a negative length, or a ratio, factor or shape that does not exist.

    >>> rate = warmup_stable_decay(1.0, steps=10, warmup=2)
    >>> [round(float(rate(torch.tensor(i))), 3) for i in (0, 1, 2, 3, 9)]
    [0.5, 1.0, 1.0, 0.875, 0.125]
    """
    _check(steps, warmup, decay_ratio, decay, min_factor)
    rising = min(warmup, steps)
    falling = steps - rising if decay_ratio is None else min(round(steps * decay_ratio), steps - rising)

    def rate(step: torch.Tensor) -> torch.Tensor:
        now = step.to(torch.float32)
        # Without decay steps, progress stays at 0 for good.
        progress = ((now - (steps - falling)) / max(falling, 1)).clamp(0.0, 1.0 if falling else 0.0)
        if decay == "linear":
            left = 1 - progress
        elif decay == "sqrt":
            left = 1 - progress.sqrt()
        else:
            left = 0.5 * (1 + torch.cos(math.pi * progress))
        warm = ((now + 1) / max(rising, 1)).clamp(max=1.0)
        factor = torch.where(now < rising, warm, min_factor + (1 - min_factor) * left)
        return peak * factor

    return rate


def constant(rate: float, warmup: int = 0) -> Schedule:
    """Linear warmup to a rate that stays; step i of the warmup has factor (i + 1) / warmup.

    Raises:
        ConfigError: a negative length.

    >>> [float(constant(1.0, warmup=4)(torch.tensor(i))) for i in (0, 1, 3, 1000)]
    [0.25, 0.5, 1.0, 1.0]
    """
    _check(1, warmup, None, "linear", 0.0)

    def at(step: torch.Tensor) -> torch.Tensor:
        return rate * ((step.to(torch.float32) + 1) / max(warmup, 1)).clamp(max=1.0)

    return at


def cosine(peak: float, steps: int, warmup: int = 0, *, min_factor: float = 0.0) -> Schedule:
    """Linear warmup, then half a cosine down to ``min_factor * peak`` (Loshchilov and Hutter 2017,
    arXiv:1608.03983): :func:`warmup_stable_decay` without a plateau.

    Raises:
        ConfigError: as :func:`warmup_stable_decay`.

    >>> [round(float(cosine(1.0, steps=4)(torch.tensor(i))), 3) for i in range(5)]
    [1.0, 0.854, 0.5, 0.146, 0.0]
    """
    return warmup_stable_decay(peak, steps, warmup, decay="cosine", min_factor=min_factor)


def piecewise(points: Sequence[tuple[int, float]], *, interpolate: bool = True) -> Schedule:
    """Rates at given steps, and straight lines between them, or with ``interpolate=False`` each until the next.

    Before the first point the rate is the first one's, after the last the last one's.

    Args:
        points: pairs of step and rate, with steps that increase.

    Raises:
        ConfigError: no points, or steps that do not increase.

    >>> rate = piecewise([(0, 0.0), (2, 1.0), (6, 0.5)])
    >>> [float(rate(torch.tensor(i))) for i in (0, 1, 2, 4, 9)]
    [0.0, 0.5, 1.0, 0.75, 0.5]
    """
    steps = [step for step, _ in points]
    if not points or any(b <= a for a, b in itertools.pairwise(steps)):
        raise ConfigError(
            f"piecewise was given points at steps {listed(steps)}; write one or more (step, rate) with steps that "
            "increase."
        )

    def at(step: torch.Tensor) -> torch.Tensor:
        now = step.to(torch.float32)
        rate = torch.full_like(now, points[0][1])
        for (start, low), (end, high) in itertools.pairwise(points):
            if interpolate:
                share = ((now - start) / (end - start)).clamp(0.0, 1.0)
                rate = torch.where(now >= start, low + share * (high - low), rate)
            else:
                rate = torch.where(now >= end, high, rate)
        return rate

    return at


def _check(steps: int, warmup: int, decay_ratio: float | None, decay: str, min_factor: float) -> None:
    problems = []
    if steps < 1:
        problems.append(f"steps={steps}: a schedule needs at least one step.")
    if warmup < 0:
        problems.append(f"warmup={warmup}: write 0 for no warmup.")
    if decay_ratio is not None and not 0 <= decay_ratio <= 1:
        problems.append(f"decay_ratio={decay_ratio}: it is a share of the run, from 0 to 1.")
    if not 0 <= min_factor <= 1:
        problems.append(f"min_factor={min_factor}: it is a factor on the peak, from 0 to 1.")
    if decay not in get_args(Decay):
        problems.append(f'decay="{decay}": there are {listed(get_args(Decay))}.{suggest(decay, get_args(Decay))}')
    raise_batch(ConfigError, problems, "the learning-rate schedule")
