"""Learning-rate schedules: functions of the 0-d step, so that no step recompiles."""

from __future__ import annotations

import math
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
