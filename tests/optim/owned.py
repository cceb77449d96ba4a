"""Matrices, gradients and steps of Muon in its owned layout, for tests on simulated ranks and on processes."""

from spmd_types.types import PartitionSpec as P

import functitan as ft
from functitan import optim, tree
from tests.optim.stacked import normal, stepped

#: Shapes that differ within a bucket, layers that no number of ranks divides, and leaves that are one matrix.
SHAPES = {"wq": (3, 24, 24), "up": (5, 24, 36), "down": (36, 24), "head": (12, 48)}
SPECS = {
    "wq": P(None, "fsdp", None),
    "up": P(None, None, "fsdp"),
    "down": P("fsdp", None),
    "head": P(None, "fsdp"),
}
TENSOR = {
    "wq": P(None, "fsdp", "tensor"),
    "up": P(None, "tensor", "fsdp"),
    "down": P(("tensor", "fsdp"), None),
    "head": P("fsdp", "tensor"),
}

#: Layers of experts that lie over tensor, so that only the ranks along fsdp share one, and leaves that all ranks share.
EXPERTS = {"experts": (3, 4, 24, 36), "dense": (48, 60), "wq": (3, 24, 24)}
EXPERT_SPECS = {
    "experts": P(None, "tensor", "fsdp", None),
    "dense": P(("tensor", "fsdp"), None),
    "wq": P(None, "tensor", "fsdp"),
}


def owned(axes=("fsdp",), **settings):
    return optim.muon(0.02, layout="owned", axes=axes, **settings)


def trees(n=3, shapes=None):
    """Parameters, then gradients of n - 1 steps."""
    shapes = SHAPES if shapes is None else shapes
    return [{k: normal(s, 10 * i + j) for j, (k, s) in enumerate(shapes.items())} for i in range(n)]


def run_on(rule, mesh, specs=None, values=None, backend="eager"):
    """Parameters and state after all steps, compiled for a mesh."""
    specs = SPECS if specs is None else specs
    first, *grads = trees() if values is None else values
    put = lambda values: {k: ft.device_put(x, specs[k], mesh) for k, x in values.items()}  # noqa: E731
    params = put(first)
    state = ft.compile(rule.init, mesh=mesh)(params)
    step = ft.compile(stepped(rule), mesh=mesh, backend=backend, max_traces=1)
    for g in grads:
        params, state = step(put(g), state, params)
    return tree.map(lambda x: x.full() if isinstance(x, ft.Array) else x, (params, state))


def run_plain(rule, values=None):
    """The same without a compiler."""
    params, *grads = trees() if values is None else values
    state = rule.init(params)
    for g in grads:
        params, state = stepped(rule)(g, state, params)
    return params, state


def lowered(rule, mesh, specs=None, values=None):
    """The Program of an update as it is lowered: passes join its small reductions."""
    specs = SPECS if specs is None else specs
    params, grads = ({k: ft.device_put(x, specs[k], mesh) for k, x in t.items()} for t in (values or trees(2)))
    state = ft.compile(rule.init, mesh=mesh)(params)
    return ft.compile(stepped(rule), mesh=mesh, passes=ft.Passes.off()).lower(grads, state, params)
