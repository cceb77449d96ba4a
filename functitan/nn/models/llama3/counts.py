"""How many parameters and floating-point operations a Llama 3 has, from its declaration."""

from __future__ import annotations

import math

from functitan import tree
from functitan.nn.models.llama3.config import Llama3Config
from functitan.nn.models.llama3.model import declare


def num_params(config: Llama3Config) -> int:
    """The number of parameters; a tied table counts once."""
    return sum(math.prod(p.shape) for p in tree.leaves(declare(config)))


def flops_per_token(config: Llama3Config, seq: int) -> int:
    """Floating-point operations of a training step per token, forward and backward.

    ``6 (N - N_embedding) + 6 L H (2K) S`` (after Chowdhery et al. 2022, arXiv:2204.02311, appendix B): a
    lookup costs nothing, but a tied table is also the head, and then counts. Attention counts in full,
    without halving for causality.
    """
    lookup = 0 if config.tied else config.vocab * config.dim
    return 6 * (num_params(config) - lookup) + 6 * config.layers * config.heads * 2 * config.head_dim * seq
