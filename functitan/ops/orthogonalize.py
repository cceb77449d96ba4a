"""Orthogonalisation of several leaves of matrices as one op, so that a lowering can choose who works on which matrix.

On plain tensors it is Newton-Schulz on every matrix of every leaf. Lowered for a mesh, the leaves' matrices are spread
over ranks by a plan (:mod:`functitan.sharding.ownership`); the numbers are the same.

Legend: L leading dims (layers), M rows (in), C columns (out).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from functitan.ops.newton_schulz import newton_schulz_flops, newton_schulz_op

#: A leaf's blocks: the dim that they lie side by side on (-1 or -2), and the size of each; None for one matrix.
Parts = tuple[int, tuple[int, ...]] | None


@dataclass(frozen=True)
class Spread:
    """How leaves of matrices are spread over ranks.

    Attributes:
        paths: of the leaves; they decide ties and appear in reports.
        blocks: of the leaves.
        axes: mesh axes of the ranks that share the work; empty for matrices that are worked on where they are.
        layout: "owned", or "auto" for the one of stacked and owned with the lower maximal load.
        bucket_bytes: about what a rank sends at a time, and no less than keeps all ranks at work.
        gram: axes of ``axes`` along which matrices may stay split on their long side where that costs less.
    """

    paths: tuple[str, ...]
    blocks: tuple[Parts, ...]
    axes: tuple[str, ...] = ()
    layout: str = "owned"
    bucket_bytes: int = 64 << 20
    gram: tuple[str, ...] = ()

    def text(self) -> str:
        """As the op takes it."""
        return json.dumps([self.paths, self.blocks, self.axes, self.layout, self.bucket_bytes, self.gram])

    def part(self, index: Sequence[int]) -> Spread:
        """Of some of the leaves."""
        return replace(self, paths=tuple(self.paths[i] for i in index), blocks=tuple(self.blocks[i] for i in index))

    @staticmethod
    def of(text: str) -> Spread:
        """The inverse of :meth:`text`."""
        paths, blocks, axes, layout, bucket_bytes, gram = json.loads(text)
        parts = tuple(None if b is None else (b[0], tuple(b[1])) for b in blocks)
        return Spread(tuple(paths), parts, tuple(axes), layout, bucket_bytes, tuple(gram))


@torch.library.custom_op("functitan::orthogonalize", mutates_args=())
def orthogonalize_op(
    xs: Sequence[torch.Tensor], coefficients: Sequence[float], eps: float, dtype: torch.dtype, spread: str
) -> list[torch.Tensor]:
    """Every (..., M, C) of ``xs`` orthogonalised in ``dtype``; results have the operands' dtype."""

    # torch's orientation, (out, in), so that a square matrix is worked on as torch does.
    def one(x: torch.Tensor) -> torch.Tensor:
        return newton_schulz_op(x.mT.to(dtype), list(coefficients), eps).mT

    parts = Spread.of(spread).blocks
    return [by_blocks(x, own, one).to(x.dtype).contiguous().clone() for x, own in zip(xs, parts, strict=True)]


@orthogonalize_op.register_fake
def _(xs, coefficients, eps, dtype, spread):  # type: ignore[no-untyped-def]
    return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in xs]


def by_blocks(x: torch.Tensor, parts: Parts, by: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Apply a function of whole matrices (..., M, C) to each block; blocks of one size are one batch."""
    if parts is None:
        return by(x)
    dim, sizes = parts
    if len(set(sizes)) > 1:
        return torch.cat([by(part) for part in torch.split(x, list(sizes), dim=dim)], dim=dim)
    rows, cols = x.shape[-2:]
    batch = list(x.shape[:-2])
    if dim == -2:
        return by(x.reshape(*batch, len(sizes), sizes[0], cols)).reshape(x.shape)
    apart = x.reshape(*batch, rows, len(sizes), sizes[0]).transpose(-3, -2)
    return by(apart).transpose(-3, -2).reshape(x.shape)


def matrix_flops(shape: Sequence[int], parts: Parts, steps: int) -> int:
    """Operations of Newton-Schulz on a matrix (M, C), or on its blocks.

    >>> matrix_flops((4, 6), None, 5), matrix_flops((4, 6), (-1, (2, 4)), 5)
    (2560, 2320)
    """
    rows, cols = shape
    if parts is None:
        return newton_schulz_flops((rows, cols), steps)
    dim, sizes = parts
    return sum(newton_schulz_flops((rows, n) if dim == -1 else (n, cols), steps) for n in sizes)


def split_newton_schulz(x: torch.Tensor, coefficients: Sequence[float], eps: float, dtype: torch.dtype) -> torch.Tensor:
    """The iteration on matrices (..., M, C) that may be split along their long side, in torch's own ops.

    Only the Gram matrix (s x s) and the norm join what ranks hold: both are sums over the long side, so a lowering adds
    one all-reduce for each Gram matrix, and none of whole matrices. The result differs from that of the op by rounding.
    """
    rows, cols = x.shape[-2:]
    wide_NMC = (x.mT if rows > cols else x).to(dtype).reshape(-1, min(rows, cols), max(rows, cols))
    # What is small, s x s, is kept in float32 at least between a product and the next rounding, as the op does.
    exact = torch.promote_types(dtype, torch.float32)
    square = wide_NMC.to(exact).square().sum((-2, -1), keepdim=True)
    wide_NMC = wide_NMC / square.sqrt().clamp(min=eps).to(dtype)
    for i in range(0, len(coefficients), 3):
        a, b, c = coefficients[i : i + 3]
        gram_NMM = torch.bmm(wide_NMC, wide_NMC.mT).to(exact)
        poly_NMM = (b * gram_NMM + c * torch.bmm(gram_NMM, gram_NMM)).to(dtype)
        wide_NMC = (a * wide_NMC.to(exact) + torch.bmm(poly_NMM, wide_NMC).to(exact)).to(dtype)
    out = wide_NMC.mT if rows > cols else wide_NMC
    return out.reshape(x.shape).to(x.dtype)
