"""DistMuon, stacked and owned, against gathering everything: by counts on large meshes, and timed on gloo processes.
And how far compiled steps of Muon are from torch's.

python -m benchmarks.optim [counts | processes | compiled]
"""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
import time
from typing import Any, Literal

import torch
from spmd_types.types import PartitionSpec as P

import functitan as ft
from benchmarks.measure import interleaved, machine, ratio, table
from functitan import optim, tree
from functitan.columns import columns, human_bytes
from functitan.compiler.flops import flops
from functitan.compiler.program import Program
from functitan.errors import ShardingError
from functitan.optim.newton_schulz import newton_schulz_flops
from functitan.sharding.array import abstract_array
from functitan.sharding.logical import layout_of
from functitan.sharding.mesh import Mesh
from functitan.sharding.planner import plan

Shapes = dict[str, tuple[int, ...]]


def llama(dim: int, layers: int, kv: int, mlp: int) -> Shapes:
    """The matrices of a Llama 3, (layers, in, out); ``kv`` is the width of keys and values."""
    shapes = {"wq": (dim, dim), "wk": (dim, kv), "wv": (dim, kv), "wo": (dim, dim)}
    shapes |= {"gate": (dim, mlp), "up": (dim, mlp), "down": (mlp, dim)}
    return {name: (layers, *shape) for name, shape in shapes.items()}


def deepseek() -> Shapes:
    """The matrices of DeepSeek-V3 671B: 61 layers, the first three dense, 256 experts of width 2048 in each other."""
    dim, moe = 7168, 58
    attention = {"wq_a": (dim, 1536), "wq_b": (1536, 24576), "wkv_a": (dim, 576), "wkv_b": (512, 32768)}
    attention |= {"wo": (16384, dim)}
    shapes: Shapes = {f"attention/{name}": (61, *shape) for name, shape in attention.items()}
    for kind, lead, width in (("dense", (3,), 18432), ("shared", (moe,), 2048), ("experts", (moe, 256), 2048)):
        shapes |= {f"{kind}/gate": (*lead, dim, width), f"{kind}/up": (*lead, dim, width)}
        shapes |= {f"{kind}/down": (*lead, width, dim)}
    return shapes | {"router": (moe, dim, 256)}


MODELS = {
    "llama3-8b": llama(4096, 32, 1024, 14336),
    "llama3-70b": llama(8192, 80, 1024, 28672),
    "deepseek_v3-671b": deepseek(),
}
RULES = {
    "gathered": optim.muon(0.02, layout="gathered"),
    "stacked": optim.muon(0.02, layout="stacked", axes=("expert", "fsdp")),
    "owned": optim.muon(0.02, layout="owned", axes=("expert", "fsdp")),
}


def stored(name: str, shape: tuple[int, ...], mesh: Mesh) -> P:
    """Sharded over all ranks: experts over as many as there are, else a dim that divides."""
    if name.startswith("experts/"):
        return P(None, "expert", "fsdp", None)
    dim = next(d for d in (-2, -1) if shape[d] % mesh.size == 0)
    return P(*[("expert", "fsdp") if d - len(shape) == dim else None for d in range(len(shape))])


def lowered(rule: ft.optim.GradientTransformation, shapes: Shapes, mesh: Mesh) -> Program:
    """An update from given gradients, on shapes alone."""

    def arrays(dtype: torch.dtype) -> dict[str, ft.Array]:
        return {k: abstract_array(s, dtype, layout_of(s, stored(k, s, mesh), mesh, k), mesh) for k, s in shapes.items()}

    params = arrays(torch.float32)
    init = ft.compile(rule.init, mesh=mesh).lower(params)
    pairs = zip(init.out_types, init.out_layouts, strict=True)
    state = tree.unflatten(init.out_tree, [abstract_array(t.shape, t.dtype, lay, mesh) for t, lay in pairs])
    return ft.compile(rule.update, mesh=mesh).lower(arrays(torch.bfloat16), state, params)


def counts() -> None:
    """Operations, bytes and collectives of a step per rank, bfloat16 on the wire; the most parts of a rank in a stage."""
    rows: list[tuple[object, ...]] = [
        (
            "model",
            "ranks",
            "layout",
            "TFLOP, most",
            "over mean",
            "bound",
            "sent, mean",
            "got, most",
            "collectives",
            "stage",
            "plan",
        )
    ]
    for model, shapes in MODELS.items():
        for ranks in (16, 64, 256, 1024):
            expert = min(ranks, 256) if any(k.startswith("experts/") for k in shapes) else 1
            mesh = ft.abstract_mesh({"expert": expert, "fsdp": ranks // expert})
            for layout, rule in RULES.items():
                rows.append((model, ranks, layout, *_row(rule, shapes, mesh)))
    print(columns(rows, right=range(3, 11), width=150))


def _row(rule: ft.optim.GradientTransformation, shapes: Shapes, mesh: Mesh) -> tuple[object, ...]:
    try:
        program = lowered(rule, shapes, mesh)
    except ShardingError:
        return ("-",)  # layers that the ranks do not divide
    work = sum(times * flops(node) for _, node, times in program.calls())
    sent = program.collectives()
    plans = program.plans()
    if not plans:
        whole = sum(newton_schulz_flops(s, 5) for s in shapes.values())
        return (f"{work / 1e12:.1f}", f"{work * mesh.size / whole:.2f}", "", human_bytes(sent.total), "", sent.runs)
    (made,) = plans
    start = time.process_time()
    plan(made.leaves, dict(made.sizes), itemsize=made.itemsize, bucket_bytes=64 << 20)
    seconds = time.process_time() - start
    got = max(a + b for a, b in zip(made.received("in"), made.received("out"), strict=True))
    cells = (f"{work / 1e12:.1f}", f"{made.balance:.2f}", f"{made.bound:.2f}", human_bytes(sent.total))
    stages = [
        sum(b.sent // math.prod(dict(made.sizes)[a] for a in b.copies) for b in map(made.buckets.__getitem__, rows))
        for rows in made.stages()
    ]
    stage = human_bytes(max(stages) * made.itemsize)
    return (*cells, human_bytes(got), sent.runs, stage, f"{seconds * 1000:.0f} ms")


# --- processes -----------------------------------------------------------------------------------------------------

#: Eight layers of one shape, so that all three layouts work, in float32: bfloat16 products are slow on CPUs.
TIMED: Shapes = {"w": (8, 512, 1024)}


def timed(ranks: int, rounds: int) -> None:
    """One rank: steps in each layout, taking turns."""
    torch.set_num_threads(1)
    mesh = ft.make_mesh({"fsdp": ranks})
    draw = lambda seed: torch.randn(TIMED["w"], generator=torch.Generator().manual_seed(seed))  # noqa: E731
    put = lambda x: {"w": ft.device_put(x, P(None, "fsdp", None), mesh)}  # noqa: E731
    params, grads = put(draw(0)), put(draw(1))
    cases = {}
    for layout in ("gathered", "stacked", "owned"):
        axes = () if layout == "gathered" else ("fsdp",)
        rule = optim.muon(0.02, layout=layout, axes=axes, ns_dtype=torch.float32)
        state = ft.compile(rule.init, mesh=mesh)(params)
        step = ft.compile(rule.update, mesh=mesh)
        cases[layout] = lambda step=step, state=state: step(grads, state, params)
    times = interleaved(cases, rounds)
    if int(os.environ["RANK"]) == 0:
        print(f"{ranks} gloo processes, eight 512x1024 float32 matrices, a step")
        print(table(times))
        for layout in ("stacked", "owned"):
            print(f"{layout} over gathered: {ratio(times, layout, 'gathered'):.2f} (1 / {ranks} by operations)")


def processes(rounds: int = 7) -> None:
    """Steps on 2 and 4 gloo processes of this machine."""
    for ranks in (2, 4):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        base = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
        command = [sys.executable, "-m", "benchmarks.optim", "rank", str(ranks), str(rounds)]
        started = [
            subprocess.Popen(command, env={**base, "OMP_NUM_THREADS": "1", "RANK": str(r), "LOCAL_RANK": str(r)})
            for r in range(ranks)
        ]
        codes = [p.wait() for p in started]
        if any(codes):
            raise SystemExit(f"a process failed: exit codes {codes}")


# --- compiled ------------------------------------------------------------------------------------------------------

#: (out, in), with sides that bfloat16 products of CPUs allow.
SMALL: Shapes = {"square": (48, 48), "wide": (32, 64), "tall": (64, 40)}


def _draw(seed: int) -> dict[str, torch.Tensor]:
    return {
        k: torch.randn(s, generator=torch.Generator().manual_seed(seed + i)) for i, (k, s) in enumerate(SMALL.items())
    }


def torch_steps(steps: int, **options: bool) -> dict[str, torch.Tensor]:
    """Parameters after steps of ``torch.optim.Muon`` on given gradients, compiled where there are options to inductor."""
    params = {k: torch.nn.Parameter(x) for k, x in _draw(0).items()}
    rule = torch.optim.Muon(list(params.values()), lr=0.02)
    step: Any = torch.compile(rule.step, options={**options}) if options else rule.step
    for i in range(steps):
        for p, g in zip(params.values(), _draw(100 + 10 * i).values(), strict=True):
            p.grad = g
        step()
    return {k: p.detach() for k, p in params.items()}


def steps_of(steps: int, backend: Literal["eager", "inductor"], as_torch: bool) -> dict[str, torch.Tensor]:
    """The same by functitan, whose weights are (in, out)."""
    rule = optim.muon(0.02, as_torch=as_torch)

    def step(grads: Any, state: Any, params: Any) -> Any:
        updates, state = rule.update(grads, state, params)
        return optim.apply_updates(params, updates), state

    turned = lambda values: {k: x.mT.contiguous() for k, x in values.items()}  # noqa: E731
    params = turned(_draw(0))
    state = rule.init(params)
    run = ft.compile(step, mesh=ft.make_mesh({"fsdp": 1}), backend=backend)
    for i in range(steps):
        params, state = run(turned(_draw(100 + 10 * i)), state, params)
    return turned(params)


def compiled(steps: int = 10) -> None:
    """The largest difference to torch's eager steps; bfloat16 Newton-Schulz, rate 0.02, gradients given."""
    expected = torch_steps(steps)
    cases = {
        "torch.optim.Muon, compiled": lambda: torch_steps(steps, emulate_precision_casts=False),
        "the same, emulate_precision_casts": lambda: torch_steps(steps, emulate_precision_casts=True),
        "muon, eager": lambda: steps_of(steps, "eager", False),
        "muon, inductor": lambda: steps_of(steps, "inductor", False),
        "muon(as_torch=True), eager": lambda: steps_of(steps, "eager", True),
        "muon(as_torch=True), inductor": lambda: steps_of(steps, "inductor", True),
    }
    rows: list[tuple[object, ...]] = [(f"{steps} steps, against torch.optim.Muon op by op", "largest difference")]
    for name, run in cases.items():
        found = run()
        rows.append((name, f"{max((found[k] - expected[k]).abs().max().item() for k in SMALL):.1e}"))
    print(columns(rows, right=(1,)))


def main(what: str = "all", *rest: str) -> None:
    if what == "rank":
        timed(int(rest[0]), int(rest[1]))
        return
    print(machine())
    if what in ("all", "counts"):
        counts()
    if what in ("all", "processes"):
        processes()
    if what in ("all", "compiled"):
        compiled()


if __name__ == "__main__":
    main(*sys.argv[1:])
