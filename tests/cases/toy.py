"""A toy decoder in float64, on one device or laid out over a simulated mesh, for tests of reported faults."""

from __future__ import annotations

from typing import Any

import torch

import functitan as ft
from functitan import tree
from functitan.nn.models import llama3
from functitan.recipes.llama3 import llama3_rules
from functitan.sharding.array import put
from functitan.sharding.logical import layout_of
from functitan.train.init import param_layouts

CONFIG = llama3.Llama3Config(
    dim=16, layers=2, heads=4, kv_heads=2, mlp_dim=32, vocab=32, rope_scaling=None, compute_dtype=torch.float64
)
RULES = llama3_rules()
VALID, IGNORED = 8, -100


def mesh_of(**axes: int) -> ft.Mesh:
    """A simulated mesh of the axes that the rules name, those not given of size 1."""
    return ft.make_mesh({"data": 1, "fsdp": 1, "tensor": 1, **axes}, simulate=True)


def params() -> Any:
    """Fixed parameters, float64."""
    return tree.map(torch.Tensor.double, ft.init(ft.random.key(0), llama3.declare(CONFIG)))


def on(mesh: ft.Mesh, values: Any, rules: ft.Rules = RULES) -> Any:
    """Parameters in their storage layouts."""
    layouts = param_layouts(llama3.declare(CONFIG), mesh, rules)
    return tree.map(lambda x, layout: put(x, layout, mesh), values, layouts)


def rows(mesh: ft.Mesh, batch: dict[str, torch.Tensor]) -> dict[str, ft.Array]:
    """A batch split over the axes of "batch"."""
    spec = RULES.spec(("batch", None), "batch")
    return {k: put(x, layout_of(x.shape, spec, mesh, k), mesh) for k, x in batch.items()}


def uneven_batch(swap: bool = False) -> dict[str, torch.Tensor]:
    """Two samples of 8 positions: one with 8 labels, one with a single label; ``swap`` exchanges the samples."""
    tokens = ft.random.randint(ft.random.key(1), (2, 8), 0, CONFIG.vocab)
    labels = tokens.roll(-1, 1)
    labels[1, 1:] = IGNORED
    order = [1, 0] if swap else [0, 1]
    return {"tokens": tokens[order], "labels": labels[order]}


def mean_loss(p: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The sum over the whole batch by the count of the whole batch."""
    total, count = llama3.loss(p, batch, CONFIG)
    return total / count


def whole(values: Any) -> Any:
    """Every Array as its global tensor."""
    return tree.map(lambda x: x.full() if isinstance(x, ft.Array) else x, values)


def assert_close(got: Any, expected: Any, tolerance: float = 1e-10) -> None:
    """Every leaf equal, relative to its largest element."""
    for path, a, b in zip(tree.paths(expected), tree.leaves(expected), tree.leaves(whole(got)), strict=True):
        error = (a - b).abs().max() / a.abs().max().clamp(min=1e-300)
        assert error <= tolerance, f"{path}: {error:.1e}"
