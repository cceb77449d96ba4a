"""The inverse of the normal distribution function as one op, from position-independent ops only.

A sample must not depend on where in a vectorised loop its element falls: on CPU, some kernels take another
path for the last elements of a tensor and give other bits there. Only ops that tests/test_random_position.py
finds independent of position are used: mul, add, sub, div, abs, clamp, where, log, sqrt.
"""

from __future__ import annotations

import math

import torch

# Coefficients of PPND16, highest power first, numerator and denominator: for |q| <= 0.425, and otherwise for
# r = sqrt(-log(tail)) up to 5 and beyond. They stand as published.
_CENTRAL = (
    (
        2.5090809287301226727e3,
        3.3430575583588128105e4,
        6.7265770927008700853e4,
        4.5921953931549871457e4,
        1.3731693765509461125e4,
        1.9715909503065514427e3,
        1.3314166789178437745e2,
        3.3871328727963666080e0,
    ),
    (
        5.2264952788528545610e3,
        2.8729085735721942674e4,
        3.9307895800092710610e4,
        2.1213794301586595867e4,
        5.3941960214247511077e3,
        6.8718700749205790830e2,
        4.2313330701600911252e1,
        1.0,
    ),
)
_TAIL = (
    (
        7.74545014278341407640e-4,
        2.27238449892691845833e-2,
        2.41780725177450611770e-1,
        1.27045825245236838258e0,
        3.64784832476320460504e0,
        5.76949722146069140550e0,
        4.63033784615654529590e0,
        1.42343711074968357734e0,
    ),
    (
        1.05075007164441684324e-9,
        5.47593808499534494600e-4,
        1.51986665636164571966e-2,
        1.48103976427480074590e-1,
        6.89767334985100004550e-1,
        1.67638483018380384940e0,
        2.05319162663775882187e0,
        1.0,
    ),
)
_FAR = (
    (
        2.01033439929228813265e-7,
        2.71155556874348757815e-5,
        1.24266094738807843860e-3,
        2.65321895265761230930e-2,
        2.96560571828504891230e-1,
        1.78482653991729133580e0,
        5.46378491116411436990e0,
        6.65790464350110377720e0,
    ),
    (
        2.04426310338993978564e-15,
        1.42151175831644588870e-7,
        1.84631831751005468180e-5,
        7.86869131145613259100e-4,
        1.48753612908506148525e-2,
        1.36929880922735805310e-1,
        5.99832206555887937690e-1,
        1.0,
    ),
)
#: Below this tail probability the third approximation is needed.
FAR_TAIL = math.exp(-25.0)

_NAME = "functitan::normal_quantile"
# By parts, as threefry. One op, because its sixty steps would be most of what a traced initialiser is made of.
torch.library.define(_NAME, "(Tensor q, Tensor tail, float smallest_tail) -> Tensor", tags=(torch.Tag.pointwise,))


def normal_quantile(q: torch.Tensor, tail: torch.Tensor, smallest_tail: float = 0.0) -> torch.Tensor:
    """The z for which a standard normal falls below z with probability ``0.5 + q``.

    Source: M. J. Wichura, "Algorithm AS 241: The percentage points of the normal distribution", Applied
    Statistics 37 (1988), routine PPND16; relative accuracy about 1e-16.

    Args:
        q: float64 of any shape, the probability minus one half, in [-0.5, 0.5].
        tail: float64 of the same shape, ``min(0.5 + q, 0.5 - q)`` in (0, 0.5]; given apart, because a small
            tail cannot be had from q without loss.
        smallest_tail: a lower bound of ``tail``; above FAR_TAIL, a third of the work falls away.

    Returns:
        float64 of the same shape.

    >>> q = torch.tensor([0.0, 0.475, -0.475], dtype=torch.float64)
    >>> [round(z, 6) for z in normal_quantile(q, 0.5 - q.abs()).tolist()]
    [0.0, 1.959964, -1.959964]
    """
    return torch.ops.functitan.normal_quantile.default(q, tail, smallest_tail)


@torch.library.impl(_NAME, "CompositeExplicitAutograd")
def _kernel(q: torch.Tensor, tail: torch.Tensor, smallest_tail: float) -> torch.Tensor:
    central = _ratio(_CENTRAL, 0.180625 - q * q) * q
    r = torch.sqrt(-torch.log(tail))
    outer = _ratio(_TAIL, r - 1.6)
    if smallest_tail < FAR_TAIL:
        outer = torch.where(r <= 5.0, outer, _ratio(_FAR, r - 5.0))
    return torch.where(q.abs() <= 0.425, central, torch.where(q < 0.0, -outer, outer))


@torch.library.register_fake(_NAME)
def _fake(q: torch.Tensor, tail: torch.Tensor, smallest_tail: float) -> torch.Tensor:
    return torch.empty_like(q)


def _ratio(coefficients: tuple[tuple[float, ...], tuple[float, ...]], x: torch.Tensor) -> torch.Tensor:
    top, bottom = (_horner(c, x) for c in coefficients)
    return top / bottom


def _horner(coefficients: tuple[float, ...], x: torch.Tensor) -> torch.Tensor:
    # A mul and an add, each rounded: a fused multiply-add would be used in some lanes and not in others.
    value = x * coefficients[0] + coefficients[1]
    for c in coefficients[2:]:
        value = value * x + c
    return value
