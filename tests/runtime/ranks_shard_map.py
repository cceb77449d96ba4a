"""One rank of a job: bodies with every collective, forward and backward, on processes against the simulated mesh.

Argument: the mesh as axis=size,...; with several axes, collectives take all of them together.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import spmd_types as spmd
import torch

import functitan as ft
from functitan import P, tree
from functitan.compiler.by_value import difference
from functitan.sharding.array import Array

I, R, S, V = spmd.I, spmd.R, spmd.S, spmd.V

#: What makes an operand strided, and the shape that a body has of it after.
VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transpose": lambda x: x.T,
    "column slice": lambda x: x[:, ::2],
    "expanded": lambda x: x[:1].expand(x.shape),
    "contiguous": lambda x: x * 1,
}


def collectives(axis: str) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """Each collective as local -> local, of which the results vary over the axis."""
    turn = lambda x: x * (1 + ft.axis_index(axis))  # noqa: E731
    return {
        "all_gather": lambda x: turn(spmd.all_gather(x, axis, src=S(0), dst=R)),
        "all_reduce": lambda x: turn(spmd.all_reduce(x, axis, src=V, dst=R)),
        "reduce_scatter": lambda x: spmd.reduce_scatter(x, axis, src=V, dst=S(0)),
        "all_to_all": lambda x: spmd.all_to_all(x, axis, src=S(0), dst=S(1)),
    }


def run(mesh: ft.Mesh, axis: str) -> Any:
    """Per collective and view: the sum of what the body gives with distinct weights, plain, and the gradient of both."""
    n = mesh.size
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2 * n * n, 2 * n, generator=generator, dtype=torch.float64)
    spec = P(tuple(axis.split("+")), None)
    found: dict[str, Any] = {}
    for kind, collective in collectives(axis).items():
        for view, strided in VIEWS.items():

            def body(x: torch.Tensor, collective: Any = collective, strided: Any = strided) -> torch.Tensor:
                out = collective(strided(x))
                weights = torch.arange(1.0, out.numel() + 1, dtype=out.dtype).reshape(out.shape)
                # The second sum has a gradient that is one expanded number.
                both = (out * weights).sum() + out.sum().sin()
                return spmd.all_reduce(both, axis, src=V, dst=I)

            f = ft.shard_map(body, in_specs=spec, out_specs=P(), name=f"{kind}_{view.replace(' ', '_')}")
            found[f"{kind}, {view}"] = ft.compile(ft.value_and_grad(f), mesh=mesh)(x)
            if view in ("transpose", "column slice"):

                def copied(x: torch.Tensor, collective: Any = collective, strided: Any = strided) -> torch.Tensor:
                    return body(x, collective, lambda x: strided(x).contiguous())

                g = ft.shard_map(copied, in_specs=spec, out_specs=P(), name=f"{kind}_copy")
                found[f"{kind}, copy of {view}"] = ft.compile(ft.value_and_grad(g), mesh=mesh)(x)
    return tree.map(lambda a: a.full() if isinstance(a, Array) else a, found)


def main(mesh_text: str, tolerance: float) -> None:
    torch.set_num_threads(1)
    axes = {a: int(n) for a, n in (part.split("=") for part in mesh_text.split(","))}
    axis = "+".join(axes)
    mine, simulated = run(ft.make_mesh(axes), axis), run(ft.make_mesh(axes, simulate=True), axis)
    for path, a, b in zip(tree.paths(mine), tree.leaves(mine), tree.leaves(simulated), strict=True):
        assert difference(a, b) <= tolerance, f"{path}: processes differ from the simulated mesh"
    for name in mine:
        if "copy of" in name:
            for a, b in zip(mine[name], mine[name.replace("copy of ", "")], strict=True):
                assert torch.equal(a, b), f"{name}: a strided operand differs from its copy"


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
