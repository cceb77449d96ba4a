"""A Triton kernel of your own inside a sharded step: one custom op, one line that says how it shards.

    pip install '.[triton]'
    python examples/triton_kernel.py

The kernel computes ``silu(a) * b``. Without a GPU, Triton's interpreter runs it on the CPU, which is slow and exact
enough to test with; that is what this file does.
"""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

import functitan as ft


@triton.jit
def silu_mul_kernel(a_ptr, b_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(a_ptr + at, mask=at < n)
    b = tl.load(b_ptr + at, mask=at < n)
    tl.store(out_ptr + at, a * b / (1 + tl.exp(-a)), mask=at < n)


# 1. The kernel as an op of torch's dispatcher: tracing records one node and does not look inside.
@torch.library.custom_op("example::silu_mul", mutates_args=())
def silu_mul_op(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a, b = a.contiguous(), b.contiguous()
    out = torch.empty_like(a)
    silu_mul_kernel[(triton.cdiv(a.numel(), 1024),)](a, b, out, a.numel(), BLOCK=1024)
    return out


@silu_mul_op.register_fake
def _(a, b):
    return torch.empty_like(a, memory_format=torch.contiguous_format)


# 2. How it shards: every dim freely, alike in both operands; a pending sum of b passes through (linear in operand 1).
ft.sharding.register_rule(torch.ops.example.silu_mul, "...,...->...", linear=[{1}])


# 3. Its derivative, on global tensors: no rank, no mesh.
@ft.custom_vjp
def silu_mul(a, b):
    return torch.ops.example.silu_mul(a, b)


def forward(a, b):
    return silu_mul(a, b), (a, b)


def backward(saved, g):
    a, b = saved
    s = torch.sigmoid(a)
    return g * b * s * (1 + a * (1 - s)), g * F.silu(a)


silu_mul.defvjp(forward, backward)


def loss_fn(params, x):
    h = silu_mul(x @ params["gate"], x @ params["up"])
    return ft.constrain(h @ params["down"], ("batch", "embed")).square().mean()


def main():
    D, H, B = 32, 96, 8
    declared = {name: ft.Param((D, H), ("embed", "mlp"), fan_in=0, fan_out=1) for name in ("gate", "up")}
    declared["down"] = ft.Param((H, D), ("mlp", "embed"), fan_in=0, fan_out=1)
    mesh = ft.make_mesh({"fsdp": 2, "tensor": 2}, simulate=True)
    rules = ft.Rules(batch="fsdp", embed=None, mlp="tensor", storage={"embed": "fsdp"})
    params = ft.init(ft.random.key(0), declared, mesh, rules)
    x = ft.device_put(ft.random.normal(ft.random.key(1), (B, D)), ft.P("fsdp", None), mesh)

    a, b = (ft.random.normal(ft.random.key(i), (B, H)) for i in (2, 3))
    print(f"kernel against torch: {(silu_mul(a, b) - F.silu(a) * b).abs().max():.0e}")
    step = ft.compile(ft.value_and_grad(loss_fn), mesh=mesh, rules=rules)
    loss, grads = step(params, x)
    print(f"loss {loss:.6f}, gradient of gate {grads['gate']}")
    called = [line for line in step.lower(params, x).text().splitlines() if "silu_mul" in line]
    print("\n".join(called))
    print(ft.check(ft.value_and_grad(loss_fn), (params, x), mesh, rules))


if __name__ == "__main__":
    main()
