"""The sizes of the Llama 3 family: one row per flavor.

Legend: D model, V vocabulary, L layers, H query heads, G key-value heads, K head dim, F hidden.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from functitan.errors import ConfigError, listed, raise_batch, suggest
from functitan.nn.rope import RopeScaling


@dataclass(frozen=True)
class Llama3Config:
    """The sizes of a Llama 3.

    Attributes:
        dim: D. layers: L. heads: H. kv_heads: G. mlp_dim: F. vocab: V.
        tied: whether the head is the transposed token embedding.
        rope_theta, rope_scaling: see :mod:`functitan.nn.rope`; pairs are neighbours ("interleaved").
        norm_eps: of every RMS norm.
        max_seq: the longest sequence the model is meant for.
        compute_dtype: the dtype of activations and matmuls; parameters keep their own.
    """

    dim: int
    layers: int
    heads: int
    kv_heads: int
    mlp_dim: int
    vocab: int
    tied: bool = False
    rope_theta: float = 500_000.0
    rope_scaling: RopeScaling | None = field(default_factory=RopeScaling)
    norm_eps: float = 1e-5
    max_seq: int = 131_072
    compute_dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        problems = []
        if self.dim % self.heads:
            problems.append(f"dim={self.dim} is not divisible by heads={self.heads}; a head has dim / heads elements.")
        elif self.head_dim % 2:
            problems.append(f"dim / heads = {self.head_dim} is odd; rotary positions rotate pairs, choose even.")
        if self.heads % self.kv_heads:
            problems.append(
                f"heads={self.heads} is not divisible by kv_heads={self.kv_heads}; every key-value head "
                "serves heads / kv_heads query heads."
            )
        raise_batch(ConfigError, problems, "the Llama 3 config")

    @property
    def head_dim(self) -> int:
        """K, the elements of one head."""
        return self.dim // self.heads


FLAVORS: dict[str, Llama3Config] = {
    #                           D      L    H    G   F      V
    "debugmodel": Llama3Config(256, 6, 16, 16, 768, 2048),
    "1B": Llama3Config(2048, 16, 32, 8, 8192, 128_256, tied=True),
    "3B": Llama3Config(3072, 28, 24, 8, 8192, 128_256, tied=True),
    "8B": Llama3Config(4096, 32, 32, 8, 14_336, 128_256),
    "70B": Llama3Config(8192, 80, 64, 8, 28_672, 128_256),
    "405B": Llama3Config(16_384, 126, 128, 8, 53_248, 128_256),
}


def flavor(name: str) -> Llama3Config:
    """The config of a flavor.

    Raises:
        ConfigError: no such flavor.
    """
    if name not in FLAVORS:
        raise ConfigError(f'there is no llama3 flavor "{name}"; there are {listed(FLAVORS)}.{suggest(name, FLAVORS)}')
    return FLAVORS[name]
