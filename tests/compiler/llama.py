"""A small Llama, its train step and state on a simulated mesh, for tests of the compiler."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

import functitan as ft
from functitan import tree
from functitan.autodiff import value_and_grad
from functitan.nn.models import llama3
from functitan.nn.models.llama3.config import FLAVORS
from functitan.optim import adamw, apply_updates, clip_by_global_norm
from functitan.optim.transform import chain
from functitan.recipes.llama3 import llama3_rules
from functitan.train.steps import TrainState

AXES = ("data", "fsdp", "tensor")
SMALL = dict(dim=32, layers=2, heads=4, kv_heads=4, mlp_dim=48, vocab=64)


@dataclasses.dataclass(frozen=True)
class Setup:
    """A train step and a value-and-gradient function with arguments on a mesh."""

    config: Any
    mesh: Any
    rules: Any
    step: Any
    loss_and_grad: Any
    state: Any
    batch: Any


def setup(
    axes: dict[str, int],
    *,
    sequence_sharding: bool = True,
    remat: Any = None,
    batch: int = 8,
    seq: int = 16,
    **sizes: Any,
) -> Setup:
    """A debug-sized Llama on a simulated mesh; axes that are left out have size 1."""
    config = dataclasses.replace(FLAVORS["debugmodel"], **{**SMALL, **sizes})
    mesh = ft.make_mesh({a: axes.get(a, 1) for a in AXES}, simulate=True)
    rules = llama3_rules(sequence_sharding)
    rule = chain(clip_by_global_norm(1.0), adamw(1e-3))

    def loss_fn(params: Any, data: Any) -> torch.Tensor:
        total, count = llama3.loss(params, data, config, remat=remat)
        return total / count

    def train_step(state: TrainState, data: Any) -> Any:
        loss, grads = value_and_grad(loss_fn)(state.params, data)
        updates, opt = rule.update(grads, state.opt, state.params)
        return TrainState(apply_updates(state.params, updates), opt), loss

    params = ft.init(ft.random.key(0), llama3.declare(config), mesh, rules)
    opt = ft.compile(rule.init, mesh=mesh, rules=rules)(params)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, config.vocab, (batch, seq + 1), generator=generator)
    data = {
        "tokens": tokens[:, :-1].contiguous(),
        # Uneven counts of labels by row: a mean of means would show.
        "labels": torch.where(torch.arange(seq) < 4 + torch.arange(batch)[:, None], tokens[:, 1:], -100),
        "segment_ids": (torch.arange(seq) > 5).long().expand(batch, seq).contiguous(),
    }
    return Setup(config, mesh, rules, train_step, value_and_grad(loss_fn), TrainState(params, opt), data)


def param_bytes(s: Setup) -> dict[str, int]:
    """Bytes of every parameter, of one layer for stacked leaves, by path."""
    found = {}
    for path, p in tree.flatten_with_paths(llama3.declare(s.config))[0]:
        shape = p.shape[1:] if path.startswith("layers/") else p.shape
        found[path] = torch.Size(shape).numel() * p.dtype.itemsize
    return found
