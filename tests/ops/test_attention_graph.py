"""Attention in traces: two nodes whatever the mask, the same shapes on fake tensors, a sound registration."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from functitan.errors import ArgumentError
from functitan.ops.attention import attention
from tests.ops.graphs import ours, traced_ops
from tests.ops.test_attention import CASES, operands

NODES = ["functitan.attention.default", "functitan.attention_backward.default"]


@pytest.mark.parametrize("name", ["plain", "causal", "segments", "bool bias", "bias"])
@pytest.mark.parametrize("backend", ["auto", "math"])
def test_a_trace_holds_one_node_each_way(name, backend):
    case = dict(CASES[name])
    q_seg, kv_seg = case.pop("segment_ids", (None, None))
    masks = [t for t in (q_seg, kv_seg, case.pop("bias", None)) if t is not None]

    def f(q, k, v, *masks):
        if name == "segments":
            return attention(q, k, v, segment_ids=masks, backend=backend, **case)
        return attention(q, k, v, bias=masks[0] if masks else None, backend=backend, **case)

    ops = traced_ops(f, [*operands(dtype=torch.float32), *masks], [0, 1, 2])
    assert ours(ops) == NODES
    around = {op for op in ops if "getitem" not in op} - set(NODES)
    assert around <= {
        "aten.detach.default", "aten.view.default", "aten.pow.Tensor_Scalar", "aten.sum.default",
        "aten.ones_like.default", "aten.expand.default", "aten.mul.Scalar", "aten.mul.Tensor",
    }  # fmt: skip


def test_a_gradient_of_the_sink_is_pointwise_around_the_nodes():
    *qkv, sink = *operands(dtype=torch.float32), torch.zeros(4)
    ops = traced_ops(lambda q, k, v, s: attention(q, k, v, sink=s), [*qkv, sink], [0, 1, 2, 3])
    assert ours(ops) == NODES
    assert not {"aten.mm.default", "aten.bmm.default"} & set(ops)


@pytest.mark.parametrize("device", ["cpu", "cuda", "meta"])
def test_fake_tensors_run_no_kernel_of_their_device(device):
    with FakeTensorMode():
        q = torch.empty(2, 7, 4, 8, device=device, dtype=torch.bfloat16).transpose(1, 2)
        kv = torch.empty(2, 2, 9, 8, device=device, dtype=torch.bfloat16)
        out, lse = attention(q, kv, kv, return_lse=True, causal=True)
        assert out.shape == (2, 4, 7, 8) and out.stride() == q.stride() and out.dtype == torch.bfloat16
        assert lse.shape == (2, 4, 7) and lse.dtype == torch.float32 and lse.device.type == device
        # The op itself: autograd of torch looks for the device, and ends the process where there is none.
        grads = torch.ops.functitan.attention_backward.default(
            out, None, q, kv, kv, None, None, None, out, lse, True, None, 1.0, "auto"
        )
        assert [g.shape for g in grads] == [q.shape, kv.shape, kv.shape]
        assert all(
            g.stride() == x.stride() and g.device.type == device for g, x in zip(grads, (q, kv, kv), strict=True)
        )


def test_an_impossible_backend_is_an_error_of_the_trace():
    with FakeTensorMode(), pytest.raises(ArgumentError, match="as wide as q and k"):
        attention(torch.empty(1, 1, 2, 4), torch.empty(1, 1, 2, 4), torch.empty(1, 1, 2, 8), backend="sdpa")


@pytest.mark.parametrize("name", ["causal", "all"])
def test_registration(name):
    case = CASES[name]
    q, k, v = (t.detach().float().requires_grad_() for t in operands())
    q_seg, kv_seg = case.get("segment_ids", (None, None))
    sink = case["sink"].float() if "sink" in case else None
    bias = case["bias"].float() if "bias" in case else None
    tail = (case["causal"], case.get("window"), 0.3, "auto")
    args = (q, k, v, q_seg, kv_seg, bias, sink, *tail)
    torch.library.opcheck(torch.ops.functitan.attention.default, args)
    out, lse = (t.detach() for t in torch.ops.functitan.attention.default(*args))
    q, k, v = (t.detach() for t in (q, k, v))
    for grad_lse in (None, torch.ones_like(lse)):
        args = (torch.ones_like(out), grad_lse, q, k, v, q_seg, kv_seg, bias, out, lse, *tail)
        torch.library.opcheck(torch.ops.functitan.attention_backward.default, args)
