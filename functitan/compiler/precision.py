"""A traced function with every floating dtype rewritten to float64, for checks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from functitan.compiler import markers
from functitan.compiler.region import Body
from functitan.compiler.trace import Traced


def _wide(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else dtype


def to_float64(traced: Traced) -> Traced:
    """The same graph in float64: inputs, constants, casts and factories. Integers stay.

    Bodies of regions and scans are rewritten with it, under keys of their own.
    """
    bodies = {}
    for key, body in traced.bodies.items():
        wide = Body(
            f"{body.key}_f64", body.name, body.remat, body.n_inputs, body.n_carry, body.n_xs, _graph(traced, body.graph)
        )
        wide.out_tree = body.out_tree
        wide.output_types = [(s, _wide(d)) for s, d in body.output_types]
        wide.gradient_types = [(s, _wide(d)) for s, d in body.gradient_types]
        wide.differentiable, wide.gradient_of = body.differentiable, body.gradient_of
        markers.BODIES[wide.key] = wide
        bodies[wide.key] = wide
        assert key == body.key
    return replace(traced, graph=_graph(traced, traced.graph), bodies=bodies)


def _graph(traced: Traced, graph: fx.Graph) -> fx.Graph:
    made = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}

    def argument(a: Any) -> Any:
        if isinstance(a, torch.dtype):
            return _wide(a)
        if isinstance(a, str) and a in traced.bodies:
            return f"{a}_f64"
        return a

    def value(v: Any) -> Any:
        if isinstance(v, torch.Tensor):
            with traced.fake_mode:
                return torch.empty(v.shape, dtype=_wide(v.dtype))
        return type(v)(value(x) for x in v) if isinstance(v, list | tuple) else v

    for node in graph.nodes:
        copy = made.node_copy(node, env.__getitem__)
        copy.args = fx.node.map_aggregate(copy.args, argument)  # type: ignore[assignment]
        copy.kwargs = fx.node.map_aggregate(copy.kwargs, argument)  # type: ignore[assignment]
        copy.meta = dict(node.meta)
        if "val" in copy.meta:
            copy.meta["val"] = value(copy.meta["val"])
        if "constant" in copy.meta:
            constant = copy.meta["constant"]
            copy.meta["constant"] = constant.to(_wide(constant.dtype))
        env[node] = copy
    return made
