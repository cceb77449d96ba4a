"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), in real arithmetic.

Two layouts pair the elements of a head: "interleaved" rotates neighbours (0, 1), (2, 3), ...; "half" rotates
element i with element i + K/2, the layout of Hugging Face checkpoints. Weights move between them by a
permutation.

Legend: B batch, S sequence, H heads, K head dim, P = K/2 pairs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

RopeLayout = Literal["interleaved", "half"]


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's stretching of the slow rotations to a longer context (Llama 3.1 model card and reference
    code).

    Attributes:
        factor: slow frequencies are divided by this.
        low_freq_factor: rotations with fewer turns than this in the original context are slow.
        high_freq_factor: rotations with more turns than this in the original context stay as they are.
        original_context: the context length before stretching.
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


def rope_frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | None = None, device: torch.device | None = None
) -> torch.Tensor:
    """The rotation of each pair in radians per position: ``theta^(-2p/K)``, scaled as Llama 3 does.

    Args:
        head_dim: K, even.
        theta: the base.
        scaling: None for none.
        device: where the result is made.

    Returns:
        (P,) float64: a float32 angle at a far position would be off by more than the float32 rotation itself.

    >>> rope_frequencies(4, theta=100.0)
    tensor([1.0000, 0.1000], dtype=torch.float64)
    """
    exponents_P = torch.arange(0, head_dim, 2, device=device, dtype=torch.float64) / head_dim
    freqs_P = torch.exp(exponents_P * -math.log(theta))
    if scaling is None:
        return freqs_P
    turns_P = freqs_P * (scaling.original_context / (2 * math.pi))
    keep_P = (turns_P - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep_P = keep_P.clamp(0.0, 1.0)
    return freqs_P * (keep_P + (1 - keep_P) / scaling.factor)


def rope_table(
    positions_S: torch.Tensor, head_dim: int, theta: float, scaling: RopeScaling | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of every position's rotations.

    Args:
        positions_S: integer positions, (S,) shared by the batch or (B, S).
        head_dim, theta, scaling: as for :func:`rope_frequencies`.

    Returns:
        Two tensors (S, P) or (B, S, P), float32.

    >>> cos_SP, sin_SP = rope_table(torch.arange(3), head_dim=4, theta=100.0)
    >>> cos_SP.shape, cos_SP.dtype
    (torch.Size([3, 2]), torch.float32)
    """
    freqs_P = rope_frequencies(head_dim, theta, scaling, positions_S.device)
    angles_SP = positions_S.unsqueeze(-1) * freqs_P
    return angles_SP.cos().to(torch.float32), angles_SP.sin().to(torch.float32)


def apply_rope(
    x_BSHK: torch.Tensor, cos_SP: torch.Tensor, sin_SP: torch.Tensor, layout: RopeLayout = "interleaved"
) -> torch.Tensor:
    """Rotate the pairs of every head by its position's angles.

    Args:
        x_BSHK: queries or keys, float; the rotation is computed in at least float32.
        cos_SP, sin_SP: from :func:`rope_table`, (S, P) or (B, S, P).
        layout: how elements are paired.

    Returns:
        (B, S, H, K) in the dtype of ``x_BSHK``.

    >>> cos_SP, sin_SP = rope_table(torch.arange(1), head_dim=4, theta=100.0)
    >>> apply_rope(torch.ones(1, 1, 1, 4), cos_SP, sin_SP).flatten()
    tensor([1., 1., 1., 1.])
    """
    wide_BSHK = x_BSHK.to(torch.promote_types(x_BSHK.dtype, torch.float32))
    cos_S1P, sin_S1P = cos_SP.unsqueeze(-2), sin_SP.unsqueeze(-2)
    pairs, pair_dim = ((-1, 2), -1) if layout == "interleaved" else ((2, -1), -2)
    # unbind and stack are each other's gradient; an index would fill a whole zero tensor in backward.
    a_BSHP, b_BSHP = wide_BSHK.unflatten(-1, pairs).unbind(pair_dim)
    rotated = torch.stack([a_BSHP * cos_S1P - b_BSHP * sin_S1P, a_BSHP * sin_S1P + b_BSHP * cos_S1P], dim=pair_dim)
    return rotated.flatten(-2).to(x_BSHK.dtype)
