"""Your own model: from the declaration of its parameters to a train step that is sharded, checked and run.

    python examples/own_model.py [--steps N]

A gated MLP learns to shift a row by one and flip its signs. The same functions run on one device as plain PyTorch and,
compiled, on a mesh of four ranks that this process simulates.
"""

import argparse

import torch.nn.functional as F

import functitan as ft

D, H = 16, 64  # model, hidden

# 1. Parameters: shape, a logical name per dim, and along which dim an input vector runs.
declared = {
    "gate": ft.Param((D, H), ("embed", "mlp"), fan_in=0, fan_out=1, init=ft.nn.init.fan_in_scaled(0)),
    "up": ft.Param((D, H), ("embed", "mlp"), fan_in=0, fan_out=1, init=ft.nn.init.fan_in_scaled(0)),
    "down": ft.Param((H, D), ("mlp", "embed"), fan_in=0, fan_out=1, init=ft.nn.init.fan_in_scaled(0)),
}


# 2. The model: a function of whole tensors. ``constrain`` says how a value lies from there on; on plain tensors it is
#    an identity.
def model(params, x):
    h = F.silu(x @ params["gate"]) * (x @ params["up"])
    return ft.constrain(h @ params["down"], ("batch", "embed"))


def loss_fn(params, batch):
    return (model(params, batch["x"]) - batch["y"]).square().mean()


# 3. One train step, optimizer included.
optimizer = ft.optim.chain(ft.optim.clip_by_global_norm(1.0), ft.optim.adamw(1e-2, weight_decay=0.0))


def train_step(params, opt, batch):
    loss, grads = ft.value_and_grad(loss_fn)(params, batch)
    updates, opt = optimizer.update(grads, opt, params)
    return ft.optim.apply_updates(params, updates), opt, loss


# 4. The parallelism: a mesh, and rules from logical names to its axes. Parameters are kept split over "fsdp" too.
mesh = ft.make_mesh({"fsdp": 2, "tensor": 2}, simulate=True)
rules = ft.Rules(batch="fsdp", embed=None, mlp="tensor", storage={"embed": "fsdp"})


def batch_of(step):
    x = ft.random.normal(ft.random.fold_in(ft.random.key(1), step), (32, D))
    return {"x": x, "y": x.roll(1, dims=1) * x.sign()}


def put(batch):
    return ft.tree.map(lambda x: ft.device_put(x, rules.spec(("batch", "embed"), "batch"), mesh), batch)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args().steps

    # One device: the functions as they are.
    params = ft.init(ft.random.key(0), declared)
    opt = optimizer.init(params)
    alone = []
    for i in range(steps):
        params, opt, loss = train_step(params, opt, batch_of(i))
        alone.append(loss.item())

    # Four ranks: the same bits of initial weights, born sharded; the same functions, compiled.
    params = ft.init(ft.random.key(0), declared, mesh, rules)
    opt = ft.compile(optimizer.init, mesh=mesh, rules=rules)(params)
    step = ft.compile(train_step, mesh=mesh, rules=rules, donate_argnums=(0, 1))
    print(step.lower(params, opt, put(batch_of(0))).collectives(), "\n")
    print(ft.check(train_step, (params, opt, put(batch_of(0))), mesh, rules), "\n")
    for i in range(steps):
        params, opt, loss = step(params, opt, put(batch_of(i)))
        if i % 5 == 0 or i == steps - 1:
            print(f"step {i + 1:>2}  one device {alone[i]:.6f}  mesh {loss.item():.6f}")
        assert abs(loss.item() - alone[i]) <= 1e-5 * alone[i]
    print(f"\ngate on the mesh: {params['gate']}")
    ft.visualize(params["gate"])


if __name__ == "__main__":
    main()
