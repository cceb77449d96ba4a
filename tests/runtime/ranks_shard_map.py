"""One rank of a job: bodies with every collective, forward and backward, on processes against the simulated mesh."""

from __future__ import annotations

from typing import Any

import spmd_types as spmd
import torch

import functitan as ft
from functitan import P, tree
from functitan.sharding.array import Array

I, R, S, V = spmd.I, spmd.R, spmd.S, spmd.V


def body(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    full = spmd.all_gather(x, "tensor", src=S(0), dst=R)
    y = spmd.reduce_scatter(torch.tanh(full @ w) @ w.T, "tensor", src=V, dst=S(0))
    columns = spmd.all_to_all(y, "tensor", src=S(0), dst=S(1)) * (1 + ft.axis_index("tensor"))
    return columns, spmd.all_reduce((columns * columns).sum(), "tensor", src=V, dst=I)


F = ft.shard_map(body, in_specs=(P("tensor", None), P(None, "tensor")), out_specs=(P(None, "tensor"), P()))


def run(mesh: ft.Mesh) -> Any:
    generator = torch.Generator().manual_seed(0)
    args = torch.randn(4, 6, generator=generator), torch.randn(6, 8, generator=generator)

    def loss(args: Any) -> torch.Tensor:
        columns, total = F(*args)
        return torch.sin(columns).sum() + total

    out = ft.compile(lambda args: (F(*args), ft.value_and_grad(loss)(args)), mesh=mesh)(args)
    return tree.map(lambda a: a.full() if isinstance(a, Array) else a, out)


def main() -> None:
    torch.set_num_threads(1)
    mine, simulated = run(ft.make_mesh({"tensor": 2})), run(ft.make_mesh({"tensor": 2}, simulate=True))
    for path, a, b in zip(tree.paths(mine), tree.leaves(mine), tree.leaves(simulated), strict=True):
        assert torch.equal(a, b), f"{path}: processes differ from the simulated mesh"


if __name__ == "__main__":
    main()
