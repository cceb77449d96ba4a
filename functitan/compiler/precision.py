"""A traced function with every floating dtype rewritten to float64, for checks."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from functitan import _torch
from functitan.compiler import markers
from functitan.compiler.local import LocalBody
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
    bodies: dict[str, Any] = {}
    for key, body in traced.bodies.items():
        if isinstance(body, LocalBody):
            bodies[f"{key}_f64"] = body.widened(f"{key}_f64", _wide)
            continue
        wide = Body(
            f"{body.key}_f64",
            body.name,
            body.remat,
            body.n_inputs,
            body.n_carry,
            body.n_xs,
            graph_to_float64(body.graph, traced.fake_mode, traced.bodies),
        )
        wide.out_tree = body.out_tree
        wide.output_types = [(s, _wide(d)) for s, d in body.output_types]
        wide.gradient_types = [(s, _wide(d)) for s, d in body.gradient_types]
        wide.differentiable, wide.gradient_of = body.differentiable, body.gradient_of
        markers.BODIES[wide.key] = wide
        bodies[wide.key] = wide
        assert key == body.key
    return replace(traced, graph=graph_to_float64(traced.graph, traced.fake_mode, traced.bodies), bodies=bodies)


def graph_to_float64(graph: fx.Graph, mode: _torch.FakeTensorMode, bodies: Container[str] = ()) -> fx.Graph:
    """A graph in float64; the bodies that it calls get the keys of the wide ones."""
    made = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}

    def argument(a: Any) -> Any:
        if isinstance(a, torch.dtype):
            return _wide(a)
        if isinstance(a, str) and a in bodies:
            return f"{a}_f64"
        return a

    def value(v: Any) -> Any:
        if isinstance(v, torch.Tensor):
            with mode:
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
