"""One rank of a job: a program that only moves data, on processes against the simulated mesh, bit for bit.

Arguments: the mesh as axis=size,... and the dtype.
"""

from __future__ import annotations

import itertools
import sys
from typing import Any

import spmd_types as spmd
import torch

import functitan as ft
from functitan import P, tree
from functitan.sharding import processes
from functitan.sharding.array import Array


def specs(axes: dict[str, int]) -> list[Any]:
    """Ways to lay three dims over the axes: whole, one axis on each dim, all on one dim in both orders, both on two dims."""
    names = list(axes)
    rows: list[Any] = [P(None, None, None)]
    for dim in range(3):
        for entry in [*names, tuple(names), tuple(reversed(names))]:
            rows.append(P(*(entry if d == dim else None for d in range(3))))
    if len(names) > 1:
        for dims in itertools.permutations(range(3), len(names)):
            rows.append(P(*(dict(zip(dims, names, strict=True)).get(d) for d in range(3))))
    return [*rows, P(None, None, None)]


def moved(axes: dict[str, int]) -> Any:
    """x through every spec, with views between, and through bodies that gather and exchange."""
    axis = "+".join(axes)

    def exchange(x: torch.Tensor) -> torch.Tensor:
        y = spmd.all_to_all(x, axis, src=spmd.S(0), dst=spmd.S(1))
        return spmd.all_to_all(y, axis, src=spmd.S(1), dst=spmd.S(2)).transpose(0, 1)

    body = ft.shard_map(exchange, in_specs=P(tuple(axes), None, None), out_specs=P(None, None, tuple(axes)))

    def f(x: torch.Tensor) -> Any:
        outs = []
        for spec in specs(axes):
            x = ft.constrain(x, spec)
            outs.append(x)
            x = x.transpose(0, 1).flip(2) if len(outs) % 2 and spec[2] is None else x.neg()
        return [*outs, body(x)]

    return f


def main(mesh_text: str, dtype_name: str) -> None:
    torch.set_num_threads(1)
    axes = {a: int(n) for a, n in (part.split("=") for part in mesh_text.split(","))}
    n = 8
    x = torch.arange(n**3).reshape(n, n, n).to(getattr(torch, dtype_name))
    found = []
    of_torch = ft.make_mesh(axes).device_mesh
    places = dict(zip(axes, of_torch.get_coordinate() or (), strict=True))
    assert of_torch.mesh_dim_names == tuple(axes) and [places] == ft.make_mesh(axes).local_coordinates()
    for mesh in (ft.make_mesh(axes), ft.make_mesh(axes, simulate=True)):
        step = ft.compile(moved(axes), mesh=mesh)
        kinds = {c.kind for c in step.lower(x).collectives()}
        assert kinds == {"all_gather", "all_to_all"}, kinds
        found.append(tree.map(lambda a: a.full() if isinstance(a, Array) else a, step(x)))
    # Bodies sent over the groups of torch's mesh, not over others beside them.
    assert all(of_torch.get_group(a).group_name == processes.bound_group(ft.make_mesh(axes), a) for a in axes)
    assert len(found[0]) == len(specs(axes)) + 1
    for i, (a, b) in enumerate(zip(*found, strict=True)):
        assert a.dtype == b.dtype and torch.equal(a, b), f"value {i}: processes differ from the simulated mesh"


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
