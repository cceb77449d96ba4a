"""What tests of ops share: the ops of a traced gradient, and torch's own checks of a registration."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.fx.experimental.proxy_tensor import make_fx


def traced_ops(f: Callable[..., torch.Tensor], args: Sequence[torch.Tensor], wrt: Sequence[int]) -> list[str]:
    """The ops in a trace, on fake tensors, of ``f`` and its gradients; the trace is run against eager too."""

    def step(*args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        args = tuple(a.detach().requires_grad_(i in wrt) for i, a in enumerate(args))
        out = f(*args)
        return out, *torch.autograd.grad(out.square().sum(), [args[i] for i in wrt])

    graph = make_fx(step, tracing_mode="fake")(*args)
    for traced, eager in zip(graph(*args), step(*args), strict=True):
        torch.testing.assert_close(traced, eager, rtol=0, atol=0)
    nodes = [n for n in graph.graph.nodes if n.op == "call_function"]
    for node in nodes:
        meta = node.meta.get("val")
        if isinstance(meta, torch.Tensor) and str(node.target).startswith("functitan"):
            assert meta.is_contiguous()
    return [str(n.target) for n in nodes]


def ours(ops: Sequence[str]) -> list[str]:
    """Those of our namespace."""
    return [op for op in ops if op.startswith("functitan.")]
