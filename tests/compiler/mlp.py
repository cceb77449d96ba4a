"""A stack of two-matrix layers with an optimizer: the program that report tests know every byte of."""

from dataclasses import dataclass

import torch

import functitan as ft
from functitan import tree

B, S, D, F, L = 8, 16, 32, 64, 4
RULES = ft.Rules(
    batch=("data", "fsdp"),
    seq="tensor",
    inner_seq=None,
    embed=None,
    mlp="tensor",
    layers=None,
    storage=dict(embed="fsdp"),
)
DECLARED = {
    "up": ft.Param((L, D, F), ("layers", "embed", "mlp")),
    "down": ft.Param((L, F, D), ("layers", "mlp", "embed")),
}
OFF = ft.Passes.off()
OPTIMIZER = ft.optim.chain(ft.optim.clip_by_global_norm(1.0), ft.optim.adamw(1e-3))


def make_step(remat):
    def block(x_BSD, layer):
        h_BSD = ft.constrain(x_BSD, ("batch", "inner_seq", "embed"))
        h_BSD = torch.relu(h_BSD @ layer["up"]) @ layer["down"]
        return x_BSD + ft.constrain(h_BSD, ("batch", "seq", "embed")), None

    def loss(params, x_BSD):
        y_BSD, _ = ft.scan(block, x_BSD, params, remat=remat)
        return y_BSD.square().sum()

    def step(state, x_BSD):
        value, grads = ft.value_and_grad(loss)(state["params"], x_BSD)
        updates, opt = OPTIMIZER.update(grads, state["opt"], state["params"])
        return {"params": ft.optim.apply_updates(state["params"], updates), "opt": opt}, value

    return step


@dataclass(frozen=True)
class Sizes:
    """Sizes on one rank."""

    data: int
    fsdp: int
    tensor: int

    @property
    def tokens(self):
        return B * S // (self.data * self.fsdp)

    @property
    def stream(self):
        """Bytes of the residual stream."""
        return 4 * self.tokens * D // self.tensor

    @property
    def params(self):
        return 4 * 2 * L * D * F // (self.fsdp * self.tensor)


def lowered(data=1, fsdp=1, tensor=1, remat=None, donate=0, simulate=False, hardware=None, passes=OFF):
    """The Program (as it is lowered, but for ``passes``), and with ``simulate`` the state and batch to run it on."""
    axes = {"data": data, "fsdp": fsdp, "tensor": tensor}
    mesh = ft.make_mesh(axes, simulate=True) if simulate else ft.abstract_mesh(axes, hardware=hardware)
    spec = ft.P(("data", "fsdp"), "tensor", None)
    if simulate:
        params = ft.init(ft.random.key(0), DECLARED, mesh, RULES)
        opt = ft.compile(OPTIMIZER.init, mesh=mesh, rules=RULES)(params)
        x = ft.device_put(torch.ones(B, S, D), spec, mesh)
    else:
        from functitan.sharding.array import abstract_array
        from functitan.sharding.logical import layout_of

        params = ft.abstract_init(DECLARED, mesh, RULES)
        program = ft.compile(OPTIMIZER.init, mesh=mesh, rules=RULES).lower(params)
        rows = zip(program.out_types, program.out_layouts, strict=True)
        opt = tree.unflatten(program.out_tree, [abstract_array(t.shape, t.dtype, layout, mesh) for t, layout in rows])
        x = abstract_array((B, S, D), torch.float32, layout_of((B, S, D), spec, mesh, "x"), mesh)
    given = () if donate is None else donate
    step = ft.compile(make_step(remat), mesh=mesh, rules=RULES, donate_argnums=given, passes=passes)
    args = ({"params": params, "opt": opt}, x)
    return (step.lower(*args), step, args) if simulate else step.lower(*args)
