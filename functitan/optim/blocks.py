"""Leaves that hold several matrices side by side: fused query-key-value, gate and up, heads.

A block is declared on the *global* shape; which rank holds which part of it does not matter to the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from functitan.ops.orthogonalize import by_blocks


@dataclass(frozen=True)
class Blocks:
    """The matrices that a leaf consists of.

    Attributes:
        dim: the dim that they lie side by side on: -1 for the outputs (columns), -2 for the inputs (rows).
        sizes: the size of each block, or one number for equal blocks, such as a head.

    >>> Blocks(-1, (64, 16, 16)).misfit((6, 32, 96)), Blocks(-1, 16).misfit((6, 32, 96))
    ('', '')
    """

    dim: int
    sizes: int | tuple[int, ...]

    def misfit(self, shape: Sequence[int]) -> str:
        """Why a shape does not consist of these blocks, with what to write; empty when it does."""
        if self.dim not in (-1, -2):
            return f"its {self} have dim={self.dim}: blocks split the outputs (dim=-1) or the inputs (dim=-2)."
        size = shape[self.dim]
        if isinstance(self.sizes, int):
            if self.sizes < 1 or size % self.sizes:
                return (
                    f"its blocks of {self.sizes} do not divide dim {self.dim} of size {size}. Give a divisor of {size}."
                )
        elif sum(self.sizes) != size or min(self.sizes) < 1:
            return (
                f"its blocks {self.sizes} add up to {sum(self.sizes)}, and dim {self.dim} has size {size}. Give sizes "
                f"above 0 that add up to {size}."
            )
        return ""

    def parts(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The size of each block."""
        if isinstance(self.sizes, int):
            return (self.sizes,) * (shape[self.dim] // self.sizes)
        return self.sizes


def orthogonalize_blocks(
    x: torch.Tensor, blocks: Blocks | None, by: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Apply a function of whole matrices (..., M, C) to each block; blocks of one size are one batch."""
    return by_blocks(x, None if blocks is None else (blocks.dim, blocks.parts(x.shape)), by)


def scale_of(p: torch.Tensor, blocks: Blocks | None, factor: Callable[[int, int], float]) -> torch.Tensor | float:
    """``factor(A, B)`` of a leaf (..., B, A): a number, or float64 along the dim of blocks that differ in size."""
    *_, rows, cols = p.shape
    if blocks is None:
        return factor(cols, rows)
    parts = blocks.parts(p.shape)
    found = [factor(n, rows) if blocks.dim == -1 else factor(cols, n) for n in parts]
    if len(set(found)) == 1:
        return found[0]
    pieces = [torch.full((n,), f, dtype=torch.float64, device=p.device) for n, f in zip(parts, found, strict=True)]
    along = torch.cat(pieces)
    return along if blocks.dim == -1 else along[:, None]
