"""One rank of a job: train steps of a small Llama on processes, against the same on a simulated mesh.

Arguments: the mesh as axis=size,..., the dtype, and the largest relative difference that is allowed (0: equal bits);
then the number of microbatches, and the axes over which their gradients stay pending.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import torch

import functitan as ft
from functitan import tree
from functitan.autodiff import value_and_grad
from functitan.compiler.by_value import difference
from functitan.nn.models import llama3
from functitan.nn.models.llama3.config import FLAVORS
from functitan.recipes.llama3 import llama3_rules
from functitan.sharding.array import Array


def steps(mesh: ft.Mesh, dtype: torch.dtype, microbatches: int, pending: tuple[str, ...]) -> Any:
    """Two steps of SGD, on whole values: the loss of each, and the parameters."""
    config = dataclasses.replace(
        FLAVORS["debugmodel"], dim=32, layers=2, heads=4, kv_heads=4, mlp_dim=48, vocab=64, compute_dtype=dtype
    )
    rules = llama3_rules()
    declared = tree.map(lambda p: dataclasses.replace(p, dtype=dtype), llama3.declare(config))
    params = ft.init(ft.random.key(0), declared, mesh, rules)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, config.vocab, (4, 9), generator=generator)
    batch = {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}

    def loss_fn(params: Any, batch: Any) -> Any:
        return llama3.loss(params, batch, config)

    def step(params: Any, batch: Any) -> Any:
        sums = value_and_grad(loss_fn, has_aux=True)
        if microbatches > 1:
            sums = ft.accumulate_grads(loss_fn, microbatches, pending=pending)
        (total, count), grads = sums(params, batch)
        return tree.map(lambda p, g: p - 0.1 * g / count, params, grads), total / count

    run = ft.compile(step, mesh=mesh, rules=rules, donate_argnums=0)
    losses = []
    for _ in range(2):
        params, loss = run(params, batch)
        losses.append(loss)
    return losses, tree.map(lambda p: p.full() if isinstance(p, Array) else p, params)


def main(mesh_text: str, dtype_name: str, tolerance: float, microbatches: int, pending: tuple[str, ...]) -> None:
    torch.set_num_threads(1)
    axes = {a: int(n) for a, n in (part.split("=") for part in mesh_text.split(","))}
    axes = {a: axes.get(a, 1) for a in ("data", "fsdp", "tensor")}
    dtype = getattr(torch, dtype_name)
    mine = steps(ft.make_mesh(axes), dtype, microbatches, pending)
    simulated = steps(ft.make_mesh(axes, simulate=True), dtype, microbatches, pending)
    worst = max(difference(a, b) for a, b in zip(tree.leaves(mine), tree.leaves(simulated), strict=True))
    assert worst <= tolerance, f"processes differ from the simulated mesh by {worst:.1e}"
    print(f"largest difference {worst:.1e}")


if __name__ == "__main__":
    mesh, dtype_name, tolerance, microbatches, *pending = sys.argv[1:]
    main(mesh, dtype_name, float(tolerance), int(microbatches), tuple(pending))
