"""The peer: a plain torch module under torch.compile, its fused AdamW, and clipping.

Legend: B batch, S sequence, D model, H heads, K head dim, P rotary pairs.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.peers import sizes
from benchmarks.peers.worker import serve


def rotate(x_BSHK: torch.Tensor, cos_S1P: torch.Tensor, sin_S1P: torch.Tensor) -> torch.Tensor:
    a, b = x_BSHK.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((a * cos_S1P - b * sin_S1P, a * sin_S1P + b * cos_S1P), -1).flatten(-2)


class Block(nn.Module):
    def __init__(self, s: sizes.Sizes) -> None:
        super().__init__()
        kv = s.kv_heads * s.head_dim
        self.head_dim, self.grouped = s.head_dim, s.heads != s.kv_heads
        self.attn_norm, self.mlp_norm = nn.RMSNorm(s.dim, s.norm_eps), nn.RMSNorm(s.dim, s.norm_eps)
        self.wq, self.wo = nn.Linear(s.dim, s.dim, bias=False), nn.Linear(s.dim, s.dim, bias=False)
        self.wk, self.wv = nn.Linear(s.dim, kv, bias=False), nn.Linear(s.dim, kv, bias=False)
        self.gate, self.up = nn.Linear(s.dim, s.mlp_dim, bias=False), nn.Linear(s.dim, s.mlp_dim, bias=False)
        self.down = nn.Linear(s.mlp_dim, s.dim, bias=False)

    def forward(self, x_BSD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        h = self.attn_norm(x_BSD)
        q, k, v = (w(h).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        heads = (t.transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=self.grouped)
        x_BSD = x_BSD + self.wo(out.transpose(1, 2).flatten(-2))
        h = self.mlp_norm(x_BSD)
        return x_BSD + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    def __init__(self, s: sizes.Sizes) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(s.vocab, s.dim)
        self.layers = nn.ModuleList(Block(s) for _ in range(s.layers))
        self.norm = nn.RMSNorm(s.dim, s.norm_eps)
        self.head = nn.Linear(s.dim, s.vocab, bias=False)
        angles = torch.from_numpy(sizes.rope_angles(s)).unsqueeze(1)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens_BS: torch.Tensor, labels_BS: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(tokens_BS)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels_BS.flatten())


@torch.no_grad()
def load(model: Llama, s: sizes.Sizes) -> None:
    """Fill a model with the starting weights; a linear layer keeps them as (out, in)."""
    for name, value in sizes.weights(s).items():
        value = torch.from_numpy(value)
        if hasattr(model, name):
            weight = getattr(model, name).weight
            weight.copy_(value.T if name == "head" else value)
        else:
            for layer, row in zip(model.layers, value, strict=True):
                getattr(layer, name).weight.copy_(row.T if row.ndim > 1 else row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compile", choices=("no", "block", "whole"), default="whole")
    s, found = sizes.parse_sizes(parser)
    model = Llama(s)
    load(model, s)
    parts = {"no": [], "block": list(model.layers), "whole": [model]}[found.compile]
    for part in parts:
        part.compile(fullgraph=True, dynamic=False)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=s.lr, betas=(s.b1, s.b2), eps=s.eps, weight_decay=s.weight_decay, fused=True
    )
    data = [(torch.from_numpy(t), torch.from_numpy(y)) for t, y in sizes.batches(s)]

    def step(number: int) -> float:
        loss = model(*data[number % len(data)])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), s.max_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    serve(step, time.perf_counter(), version=torch.__version__)


if __name__ == "__main__":
    main()
