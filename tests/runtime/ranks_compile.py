"""One rank of a job: compiles a small step, and prints for each of its graphs whether it came from the cache."""

from __future__ import annotations

import torch

import functitan as ft
from functitan import P
from functitan.sharding import processes


def step(w: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One collective, and code on both sides of it."""
    y = ft.constrain(torch.tanh(x @ w), P(None, None))
    return w - 0.1 * torch.cos(w), y.sum()


def main() -> None:
    mesh = ft.make_mesh({"fsdp": processes.world()})
    w = ft.device_put(torch.ones(4, 8), P(None, "fsdp"), mesh)
    compiled = ft.compile(step, mesh=mesh, backend="inductor")
    new, total = compiled(w, torch.ones(2, 4))
    assert torch.allclose(total, torch.tensor(16.0) * torch.tanh(torch.tensor(4.0)))
    assert torch.allclose(new.full(), torch.full((4, 8), 1.0) - 0.1 * torch.cos(torch.tensor(1.0)))
    made = compiled.compilations[0]
    print(f"graphs {made.graphs}, cached {made.cached}")


if __name__ == "__main__":
    main()
