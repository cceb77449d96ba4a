"""What the runtime adds: Python time of a compiled step outside its graphs, and simulated ranks against single ones.

python -m benchmarks.overhead
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import functitan as ft
from benchmarks.measure import interleaved, machine, ratio
from functitan import _torch
from functitan.nn.models import llama3
from functitan.recipes.llama3 import llama3_rules
from functitan.sharding.array import on_mesh

RULES = llama3_rules()


def compiled_step(layers: int, mesh: ft.Mesh, backend: str, batch: int, seq: int, dim: int) -> tuple[Any, Any, Any]:
    """A Llama's train step with AdamW, its state, and a batch."""
    config = llama3.Llama3Config(dim, layers, 8, 8, 2 * dim, 256)
    rule = ft.optim.chain(ft.optim.clip_by_global_norm(1.0), ft.optim.adamw(1e-3))

    def loss_fn(params: Any, tokens: torch.Tensor) -> torch.Tensor:
        total, count = llama3.loss(params, {"tokens": tokens, "labels": tokens}, config)
        return total / count

    def step(state: Any, tokens: torch.Tensor) -> Any:
        loss, grads = ft.value_and_grad(loss_fn)(state[0], tokens)
        updates, opt = rule.update(grads, state[1], state[0])
        return (ft.optim.apply_updates(state[0], updates), opt), loss

    params = ft.init(ft.random.key(0), llama3.declare(config), mesh, RULES)
    opt = ft.compile(rule.init, mesh=mesh, rules=RULES)(params)
    state = ft.tree.map(lambda x: on_mesh(x, mesh), (params, opt))
    tokens = torch.zeros(batch, seq, dtype=torch.int64)
    return ft.compile(step, mesh=mesh, rules=RULES, donate_argnums=0, backend=backend), state, tokens


class Clock:
    """CPU time of this process inside some functions, and how often they were called."""

    def __init__(self) -> None:
        self.seconds, self.calls = 0.0, 0

    def timed(self, f: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            begun = time.process_time()
            out = f(*args)
            self.seconds += time.process_time() - begun
            self.calls += 1
            return out

        return run


def outside_graphs(layers: int, steps: int = 80) -> float:
    """Seconds of a step that are not spent in compiled graphs: the CPU time of the step less that of the graphs.

    Reading the clock is a call of the system, which takes its own time: of two readings, one is inside.
    """
    graphs = Clock()
    real = _torch.compile_graph
    _torch.compile_graph = lambda module, values: graphs.timed(real(module, values))
    try:
        mesh = ft.make_mesh({"data": 1, "fsdp": 1, "tensor": 1})
        step, state, tokens = compiled_step(layers, mesh, "inductor", 1, 8, 64)
        state, _ = step(state, tokens)
    finally:
        _torch.compile_graph = real
    readings = [time.process_time() for _ in range(10_001)]
    reading = (readings[-1] - readings[0]) / 10_000
    found = []
    for _ in range(steps):
        graphs.seconds, graphs.calls, begun = 0.0, 0, time.process_time()
        state, _ = step(state, tokens)
        found.append(time.process_time() - begun - graphs.seconds - graphs.calls * reading)
    return statistics.median(found[steps // 4 :])


def simulated(axes: dict[str, int]) -> Any:
    """A function that takes one eager step of the same rows per rank on a simulated mesh."""
    ranks = axes["fsdp"]
    step, state, tokens = compiled_step(4, ft.make_mesh(axes, simulate=True), "eager", 2 * ranks, 64, 128)

    def run() -> None:
        nonlocal state
        state, _ = step(state, tokens)

    return run


def main() -> None:
    torch.set_num_threads(1)
    print(machine())
    print(f"outside compiled graphs, 32 layers: {1e3 * outside_graphs(32):.1f} ms of CPU a step (goal: under 5 ms)")
    one, eight = simulated({"data": 1, "fsdp": 1, "tensor": 1}), simulated({"data": 1, "fsdp": 8, "tensor": 1})
    times = interleaved({"one": lambda: [one() for _ in range(8)], "eight": eight}, 5)
    print(f"8 simulated ranks over 8 times one rank: {ratio(times, 'eight', 'one'):.2f} (goal: at most 1.3)")


if __name__ == "__main__":
    main()
