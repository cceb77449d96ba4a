"""Trace and lower: does the time grow with depth, and how long does the largest recipe take?

python -m benchmarks.lowering
"""

from __future__ import annotations

import dataclasses

import torch

from benchmarks.measure import interleaved, machine, ratio, table
from functitan.recipes import load_recipe, with_mesh
from functitan.train.abstract import lower_step


def lowered(name: str, mesh: dict[str, int], layers: int | None = None) -> int:
    """Trace and lower a recipe's train step, one sequence per rank at least; the number of its nodes."""
    recipe = load_recipe(name)
    rows = mesh["data"] * mesh["fsdp"]
    recipe = recipe.replace(data=dataclasses.replace(recipe.data, batch=max(recipe.data.batch, rows)))
    if layers is not None:
        recipe = recipe.replace(model=dataclasses.replace(recipe.model, layers=layers))
    return lower_step(with_mesh(recipe, mesh).textless_task()).nodes()


def main(rounds: int = 5) -> None:
    torch.set_num_threads(1)
    print(machine())
    mesh = {"data": 2, "fsdp": 4, "tensor": 2}
    cases = {
        "llama3-debug, 6 layers": lambda: lowered("llama3-debug", mesh, 6),
        "llama3-debug, 126 layers": lambda: lowered("llama3-debug", mesh, 126),
        "llama3-405b on 2,048 devices": lambda: lowered("llama3-405b", {"data": 4, "fsdp": 64, "tensor": 8}),
        "llama3-405b on 16,384 devices": lambda: lowered("llama3-405b", {"data": 4, "fsdp": 512, "tensor": 8}),
    }
    times = interleaved(cases, rounds)
    print(table(times))
    print(f"126 layers over 6: {ratio(times, 'llama3-debug, 126 layers', 'llama3-debug, 6 layers'):.2f}")


if __name__ == "__main__":
    main()
