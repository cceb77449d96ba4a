"""What every peer trains: sizes, starting weights and tokens. NumPy alone, so that any environment can import it."""

from __future__ import annotations

import argparse
import dataclasses
import math

import numpy as np


@dataclasses.dataclass(frozen=True)
class Sizes:
    """TorchTitan's Llama 3 debug model in float32, a batch for two cores, and an AdamW step."""

    dim: int = 256
    layers: int = 6
    heads: int = 16
    kv_heads: int = 16
    mlp_dim: int = 768
    vocab: int = 2048
    seq: int = 256
    batch: int = 8
    rope_theta: float = 500_000.0
    norm_eps: float = 1e-5
    lr: float = 8e-4
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    max_norm: float = 1.0

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    def matmuls(self) -> list[tuple[int, int, int, int]]:
        """The matmuls of a forward pass as (rows, inner, columns, times); attention is not among them."""
        rows, kv = self.batch * self.seq, self.kv_heads * self.head_dim
        return [
            (rows, self.dim, self.dim, 2 * self.layers),
            (rows, self.dim, kv, 2 * self.layers),
            (rows, self.dim, self.mlp_dim, 2 * self.layers),
            (rows, self.mlp_dim, self.dim, self.layers),
            (rows, self.dim, self.vocab, 1),
        ]

    def flops(self) -> float:
        """Of a step: six per weight and token in matmuls, and causal attention."""
        matmul = sum(6.0 * m * k * n * times for m, k, n, times in self.matmuls())
        return matmul + 6.0 * self.layers * self.dim * self.seq * self.batch * self.seq


def parse_sizes(parser: argparse.ArgumentParser, argv: list[str] | None = None) -> tuple[Sizes, argparse.Namespace]:
    """The arguments of a peer; every size is a flag."""
    for field in dataclasses.fields(Sizes):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default)
    found = parser.parse_args(argv)
    return Sizes(**{f.name: getattr(found, f.name) for f in dataclasses.fields(Sizes)}), found


def weights(s: Sizes) -> dict[str, np.ndarray]:
    """Starting weights, (in, out), the layers stacked on a leading dim."""
    rng = np.random.default_rng(0)
    kv = s.kv_heads * s.head_dim

    def normal(*shape: int, std: float = 0.02) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32) * np.float32(std)

    return {
        "tok_embeddings": normal(s.vocab, s.dim, std=1.0),
        "attn_norm": np.ones((s.layers, s.dim), np.float32),
        "wq": normal(s.layers, s.dim, s.dim),
        "wk": normal(s.layers, s.dim, kv),
        "wv": normal(s.layers, s.dim, kv),
        "wo": normal(s.layers, s.dim, s.dim),
        "mlp_norm": np.ones((s.layers, s.dim), np.float32),
        "gate": normal(s.layers, s.dim, s.mlp_dim),
        "up": normal(s.layers, s.dim, s.mlp_dim),
        "down": normal(s.layers, s.mlp_dim, s.dim),
        "norm": np.ones((s.dim,), np.float32),
        "head": normal(s.dim, s.vocab, std=s.dim**-0.5),
    }


def batches(s: Sizes, count: int = 4) -> list[tuple[np.ndarray, np.ndarray]]:
    """Pairs of tokens and labels, int64 (batch, seq), for steps in turn."""
    rng = np.random.default_rng(1)
    ids = [rng.integers(0, s.vocab, (s.batch, s.seq + 1), dtype=np.int64) for _ in range(count)]
    return [(np.ascontiguousarray(t[:, :-1]), np.ascontiguousarray(t[:, 1:])) for t in ids]


def rope_angles(s: Sizes) -> np.ndarray:
    """(seq, head_dim / 2) float32 angles, stretched as in Llama 3.1 (factor 8, 1 and 4 turns in 8,192)."""
    freqs = s.rope_theta ** (-np.arange(0, s.head_dim, 2, dtype=np.float64) / s.head_dim)
    keep = np.clip((8192 * freqs / (2 * math.pi) - 1.0) / 3.0, 0.0, 1.0)
    return np.outer(np.arange(s.seq), freqs * (keep + (1 - keep) / 8.0)).astype(np.float32)
