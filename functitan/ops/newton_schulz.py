"""The Newton-Schulz iteration as one op: whole matrices, any batch, the same bits compiled and not.

It is one op because its parts are where rounding would differ: a decomposed ``baddbmm`` rounds three times. A mesh may
split the batch; a matrix is whole where it is worked on.

Legend: N batch, M rows, C columns, k steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


@torch.library.custom_op("functitan::newton_schulz", mutates_args=())
def newton_schulz_op(x: torch.Tensor, coefficients: list[float], eps: float) -> torch.Tensor:
    """(..., M, C) to the same shape and dtype; ``coefficients`` are a, b, c of each step, one after the other."""
    rows, cols = x.shape[-2:]
    wide_NMC = x.reshape(-1, rows, cols)
    if rows > cols:
        wide_NMC = wide_NMC.mT
    norm = torch.linalg.vector_norm(wide_NMC, dim=(-2, -1), keepdim=True)
    wide_NMC = wide_NMC / norm.clamp(min=eps)
    for i in range(0, len(coefficients), 3):
        a, b, c = coefficients[i : i + 3]
        gram_NMM = wide_NMC @ wide_NMC.mT
        # beta and alpha inside the product: bG + cG^2 and aX + (...)X are each rounded once.
        poly_NMM = torch.baddbmm(gram_NMM, gram_NMM, gram_NMM, beta=b, alpha=c)
        wide_NMC = torch.baddbmm(wide_NMC, poly_NMM, wide_NMC, beta=a)
    out = wide_NMC.mT if rows > cols else wide_NMC
    return out.reshape(x.shape).contiguous()


@newton_schulz_op.register_fake
def _(x, coefficients, eps):  # type: ignore[no-untyped-def]
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def newton_schulz_flops(shape: Sequence[int], steps: int) -> int:
    """Operations of the iteration on matrices of a shape: ``2 k s^2 (2l + s)`` for each, s and l its short and long
    side. A step is a Gram matrix (s x s from l), its square, and a product with it.

    >>> newton_schulz_flops((10, 4, 6), steps=5)
    25600
    """
    *batch, rows, cols = shape
    short, long = min(rows, cols), max(rows, cols)
    return math.prod(batch) * 2 * steps * short**2 * (2 * long + short)
