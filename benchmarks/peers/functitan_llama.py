"""The peer that is functitan: its Llama, its AdamW and clipping, one compiled step with donated state."""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch

import functitan as ft
from benchmarks.peers import sizes
from benchmarks.peers.worker import serve
from functitan.nn.models import llama3
from functitan.recipes.llama3 import llama3_rules
from functitan.sharding.array import on_mesh, put
from functitan.sharding.logical import Rules
from functitan.train.init import param_layouts


def config(s: sizes.Sizes) -> llama3.Llama3Config:
    return llama3.Llama3Config(
        s.dim, s.layers, s.heads, s.kv_heads, s.mlp_dim, s.vocab, rope_theta=s.rope_theta, norm_eps=s.norm_eps
    )


def params(s: sizes.Sizes, mesh: ft.Mesh, rules: Rules) -> Any:
    """The starting weights as the model declares them, laid out over the mesh."""
    declared = llama3.declare(config(s))
    found: dict[str, Any] = {name: torch.from_numpy(value) for name, value in sizes.weights(s).items()}
    found["layers"] = {name: found.pop(name) for name in declared["layers"]}
    return ft.tree.map(lambda x, lay: put(x, lay, mesh), found, param_layouts(declared, mesh, rules))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mesh", default="fsdp=1")
    parser.add_argument("--backend", default="inductor")
    s, found = sizes.parse_sizes(parser)
    axes = {"data": 1, "fsdp": 1, "tensor": 1} | {k: int(n) for k, n in (e.split("=") for e in found.mesh.split(","))}
    mesh, rules, model = ft.make_mesh(axes), llama3_rules(), config(s)
    optimizer = ft.optim.chain(
        ft.optim.clip_by_global_norm(s.max_norm),
        ft.optim.adamw(s.lr, b1=s.b1, b2=s.b2, eps=s.eps, weight_decay=s.weight_decay),
    )

    def loss_fn(params: Any, batch: Any) -> torch.Tensor:
        total, count = llama3.loss(params, batch, model)
        return total / count

    def train_step(state: Any, batch: Any) -> Any:
        loss, grads = ft.value_and_grad(loss_fn)(state[0], batch)
        updates, opt = optimizer.update(grads, state[1], state[0])
        return (ft.optim.apply_updates(state[0], updates), opt), loss

    start = params(s, mesh, rules)
    opt = ft.compile(optimizer.init, mesh=mesh, rules=rules)(start)
    state = ft.tree.map(lambda x: on_mesh(x, mesh), (start, opt))
    del start, opt
    data = [{"tokens": torch.from_numpy(t), "labels": torch.from_numpy(y)} for t, y in sizes.batches(s)]
    compiled = ft.compile(train_step, mesh=mesh, rules=rules, donate_argnums=0, backend=found.backend)

    def step(number: int) -> float:
        nonlocal state
        state, loss = compiled(state, data[number % len(data)])
        return loss.item()

    serve(step, time.perf_counter(), version=torch.__version__)


if __name__ == "__main__":
    main()
