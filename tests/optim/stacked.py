"""Matrices, gradients and steps of Muon in its stacked layout, for tests on simulated ranks and on processes."""

import torch
from spmd_types.types import PartitionSpec as P

import functitan as ft
from functitan import optim, tree

SHAPES = {"wq": (4, 16, 16), "up": (8, 16, 24), "down": (4, 24, 16)}
SPECS = {"wq": P(None, "fsdp", None), "up": P(None, "fsdp", None), "down": P(None, None, "fsdp")}
TENSOR = {"wq": P(None, "fsdp", "tensor"), "up": P(None, "fsdp", "tensor"), "down": P(None, "tensor", "fsdp")}


def normal(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def trees(n=4):
    """Parameters, then gradients of n - 1 steps."""
    return [{k: normal(s, 10 * i + j) for j, (k, s) in enumerate(SHAPES.items())} for i in range(n)]


def mesh_of(**axes):
    return ft.make_mesh({"data": 1, "fsdp": 1, "tensor": 1, **axes}, simulate=True)


def stacked(axes=("fsdp",), **settings):
    return optim.muon(0.02, layout="stacked", axes=axes, **settings)


def stepped(rule):
    def step(grads, state, params):
        updates, state = rule.update(grads, state, params)
        return optim.apply_updates(params, updates), state

    return step


def run_on(rule, mesh, specs=SPECS, backend="eager"):
    """Parameters and state after all steps, compiled for a mesh."""
    first, *grads = trees()
    put = lambda values: {k: ft.device_put(x, specs[k], mesh) for k, x in values.items()}  # noqa: E731
    params = put(first)
    state = ft.compile(rule.init, mesh=mesh)(params)
    step = ft.compile(stepped(rule), mesh=mesh, backend=backend)
    for g in grads:
        params, state = step(put(g), state, params)
    if mesh.size > 1:
        assert all(x.spec == put(first)[k].spec for k, x in params.items())
        stored = {path.split("/")[0]: x for path, x in tree.flatten_with_paths(state.mu)[0] if "scales" not in path}
        assert all(x.spec == put(first)[k].spec for k, x in stored.items())
    return tree.map(lambda x: x.full() if isinstance(x, ft.Array) else x, (params, state))


def run_plain(rule):
    """The same without a compiler."""
    params, *grads = trees()
    state = rule.init(params)
    for g in grads:
        params, state = stepped(rule)(g, state, params)
    return params, state
