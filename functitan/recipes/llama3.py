"""Recipes of the Llama 3 family: functions that return a Recipe."""

from __future__ import annotations

from dataclasses import fields, replace

import torch

from functitan.nn.models import llama3
from functitan.recipes.base import DataConfig, Family, OptimConfig, Recipe
from functitan.recipes.muon import MuonConfig
from functitan.sharding import Rules
from functitan.train import RunConfig

LLAMA3 = Family(llama3.declare, llama3.loss, llama3.generate, llama3.loss_and_max_logits)
# The context that the real flavors train at (arXiv:2407.21783, section 3.4.1).
_SEQ = 8192


def llama3_rules(sequence_sharding: bool = True) -> Rules:
    """How a Llama 3 is laid over the axes "data", "fsdp" and "tensor".

    Args:
        sequence_sharding: split the residual stream along the sequence over "tensor", so that norms and
            residual adds are not repeated on every rank; without it, the stream is whole on each.
    """
    return Rules(
        batch=("data", "fsdp"),
        seq="tensor" if sequence_sharding else None,
        inner_seq=None,
        embed=None,
        heads="tensor",
        kv_heads="tensor",
        mlp="tensor",
        vocab="tensor",
        layers=None,
        storage=dict(embed="fsdp"),
    )


def debug() -> Recipe:
    """A small Llama on real text: minutes on two cores."""
    return Recipe(
        name="llama3-debug",
        family=LLAMA3,
        model=llama3.flavor("debugmodel"),
        rules=llama3_rules(),
        optim=OptimConfig(lr=3e-3, warmup=40, decay_ratio=0.5, decay="linear", min_factor=0.05),
        data=DataConfig(batch=8, seq=64, validation_batches=32),
        run=RunConfig(steps=500, log_every=1),
    )


def debug_muon() -> Recipe:
    """The same with Muon for the matrices of its layers; float32 iterations, as bfloat16 is slow on CPUs."""
    adamw = debug()
    same = {f.name: getattr(adamw.optim, f.name) for f in fields(adamw.optim)}
    return adamw.replace(
        name="llama3-debug-muon", optim=MuonConfig(**same, muon_lr=adamw.optim.lr, ns_dtype=torch.float32)
    )


def llama3_1b() -> Recipe:
    """Llama 3.2 1B."""
    return _real("1B", {"fsdp": 8}, batch=16, lr=5e-4)


def llama3_3b() -> Recipe:
    """Llama 3.2 3B."""
    return _real("3B", {"fsdp": 8}, batch=8, lr=4e-4)


def llama3_8b() -> Recipe:
    """Llama 3.1 8B."""
    return _real("8B", {"fsdp": 8}, batch=8, lr=3e-4)


def llama3_70b() -> Recipe:
    """Llama 3.1 70B."""
    return _real("70B", {"fsdp": 32, "tensor": 8}, batch=64, lr=1.5e-4)


def llama3_405b() -> Recipe:
    """Llama 3.1 405B."""
    return _real("405B", {"data": 4, "fsdp": 64, "tensor": 8}, batch=256, lr=8e-5)


def _real(flavor: str, mesh: dict[str, int], batch: int, lr: float) -> Recipe:
    return Recipe(
        name=f"llama3-{flavor.lower()}",
        family=LLAMA3,
        model=replace(llama3.flavor(flavor), compute_dtype=torch.bfloat16),
        rules=llama3_rules(),
        optim=OptimConfig(lr=lr, warmup=2000, decay="cosine", min_factor=0.1),
        data=DataConfig(batch=batch, seq=_SEQ, validation_batches=8),
        run=RunConfig(steps=100_000),
        mesh=mesh,
        # At this context, the activations of one layer are more than its parameters.
        remat="nothing_saveable",
    )
