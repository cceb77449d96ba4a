"""Attention against plain formulas in float64, torch's own op, and between its backends."""

import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from functitan.errors import ArgumentError, GradientError
from functitan.ops.attention import attention

B, H, G, S, T, K = 2, 4, 2, 7, 9, 8


def operands(heads=H, groups=G, queries=S, keys=T, v_width=K, dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    shapes = ((B, heads, queries, K), (B, groups, keys, K), (B, groups, keys, v_width))
    return [torch.randn(s, generator=g, dtype=dtype, requires_grad=True) for s in shapes]


def naive(q, k, v, *, causal=False, segment_ids=None, bias=None, window=None, sink=None, scale=None):
    """Softmax over all keys, with loops' clarity instead of speed; rows without keys give zeros."""
    R = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(R, 1), v.repeat_interleave(R, 1)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    logits = torch.einsum("bhsk,bhtk->bhst", q, k) * scale
    i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None]
    ok = torch.ones(logits.shape, dtype=torch.bool)
    if causal:
        ok = ok & (j <= i)
    if window is not None:
        ok = ok & (j > i - window)
    if segment_ids is not None:
        qs, ks = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
        ok = ok & (qs[:, None, :, None] == ks[:, None, None, :])
    if bias is not None:
        ok = ok & bias if bias.dtype == torch.bool else ok & (bias > -math.inf)
        logits = logits if bias.dtype == torch.bool else logits + bias.masked_fill(bias == -math.inf, 0.0)
    weights = torch.exp(logits) * ok
    total = weights.sum(-1, keepdim=True)
    if sink is not None:
        total = total + torch.exp(sink)[:, None, None]
    alive = total > 0
    out = (weights / total.where(alive, 1.0)) @ v
    lse = torch.log(total.where(alive, 1.0)).where(alive, -math.inf)[..., 0]
    return out, lse


def segments(length, *, dead=False):
    ids = torch.arange(length).div(3, rounding_mode="floor").repeat(B, 1)
    if dead:
        ids = ids.clone()
        ids[0, 2] = 99
    return ids


def random_bias(shape, seed=3):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def bool_bias():
    bias = random_bias((B, 1, S, T)) > -0.3
    bias[1, 0, 4] = False
    return bias


CASES = {
    "plain": {},
    "scale": {"scale": 0.7},
    "causal": {"causal": True},
    "window": {"window": 3},
    "causal window": {"causal": True, "window": 3},
    "segments": {"segment_ids": (segments(S), segments(T))},
    "dead rows": {"segment_ids": (segments(S, dead=True), segments(T)), "causal": True},
    "bool bias": {"bias": bool_bias()},
    "bool bias causal": {"bias": bool_bias(), "causal": True},
    "bias": {"bias": random_bias((H, S, T))},
    "key bias": {"bias": random_bias((T,)), "causal": True},
    "infinite bias": {"bias": random_bias((S, T)).masked_fill(torch.eye(S, T).bool(), -math.inf)},
    "sink": {"sink": random_bias((H,)), "causal": True, "window": 4},
    "sink and dead rows": {"sink": random_bias((H,)), "bias": bool_bias()},
    "zero scale": {"scale": 0.0, "causal": True},
    "all": {
        "causal": True, "window": 5, "segment_ids": (segments(S), segments(T)),
        "bias": random_bias((B, H, 1, T)), "sink": random_bias((H,)), "scale": 0.3,
    },
}  # fmt: skip


def gradients(f, inputs, with_lse):
    out, lse = f(*inputs)
    g = torch.Generator().manual_seed(7)
    loss = (out * torch.randn(out.shape, generator=g, dtype=out.dtype)).sum()
    if with_lse:
        weight = torch.randn(lse.shape, generator=g, dtype=lse.dtype)
        loss = loss + (lse * weight).masked_fill(lse == -math.inf, 0.0).sum()
    return torch.autograd.grad(loss, inputs)


@pytest.mark.parametrize("backend", ["auto", "math"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("with_lse", [False, True])
def test_matches_the_plain_formula(name, backend, with_lse):
    case = dict(CASES[name])
    inputs = operands()
    if "sink" in case:
        inputs.append(case.pop("sink").clone().requires_grad_())

    def ours(q, k, v, sink=None):
        return attention(q, k, v, sink=sink, return_lse=True, backend=backend, **case)

    def plain(q, k, v, sink=None):
        return naive(q, k, v, sink=sink, **case)

    for ours_, plain_ in zip(ours(*inputs), plain(*inputs), strict=True):
        torch.testing.assert_close(ours_, plain_, rtol=0, atol=1e-12)
    for ours_, plain_ in zip(gradients(ours, inputs, with_lse), gradients(plain, inputs, with_lse), strict=True):
        torch.testing.assert_close(ours_, plain_, rtol=0, atol=1e-12)


@pytest.mark.parametrize("backend", ["sdpa", "math"])
@pytest.mark.parametrize("name", ["causal", "dead rows", "sink", "all"])
def test_gradcheck(name, backend):
    case = dict(CASES[name])
    sink = case.pop("sink", None)
    inputs = [*operands(), *([] if sink is None else [sink.clone().requires_grad_()])]

    def f(q, k, v, sink=None):
        out, lse = attention(q, k, v, sink=sink, return_lse=True, backend=backend, **case)
        return out, lse.masked_fill(lse == -math.inf, 0.0)

    assert torch.autograd.gradcheck(f, inputs, fast_mode=True)


@pytest.mark.parametrize("backend", ["sdpa", "math"])
@pytest.mark.parametrize("causal", [False, True])
def test_matches_torch(backend, causal):
    q, k, v = operands(queries=T)
    ours = attention(q, k, v, causal=causal, backend=backend)
    theirs = scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    for a, b in zip(
        torch.autograd.grad(ours.sum(), (q, k, v)), torch.autograd.grad(theirs.sum(), (q, k, v)), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_backends_agree_in_lower_precision(dtype):
    inputs = operands(dtype=dtype)
    case = CASES["all"]
    sdpa, math_ = (attention(*inputs, return_lse=True, backend=b, **case) for b in ("sdpa", "math"))
    eps = torch.finfo(dtype).eps
    assert sdpa[0].dtype == dtype and sdpa[1].dtype == torch.float32
    torch.testing.assert_close(sdpa[0], math_[0], rtol=0, atol=8 * eps)
    torch.testing.assert_close(sdpa[1], math_[1], rtol=0, atol=8 * eps)
    for a, b in zip(
        torch.autograd.grad(sdpa[0].sum() + sdpa[1].sum(), inputs),
        torch.autograd.grad(math_[0].sum() + math_[1].sum(), inputs),
        strict=True,
    ):
        assert a.dtype == dtype
        torch.testing.assert_close(a, b, rtol=4 * eps, atol=20 * eps)


def test_rows_without_keys_are_zero():
    q, k, v = operands(dtype=torch.float32)
    bias = torch.zeros(S, T, dtype=torch.bool)
    for backend in ("sdpa", "math"):
        out, lse = attention(q, k, v, bias=bias, return_lse=True, backend=backend)
        assert (out == 0).all() and (lse == -math.inf).all()
        assert all((g == 0).all() for g in torch.autograd.grad(out.sum(), (q, k, v)))


def test_values_may_have_another_width():
    q, k, v = operands(v_width=5)
    out = attention(q, k, v, causal=True)
    assert out.shape == (B, H, S, 5)
    torch.testing.assert_close(out, naive(q, k, v, causal=True)[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("sizes", [{"queries": 0}, {"keys": 0}])
def test_empty_sequences(sizes):
    q, k, v = operands(**sizes)
    out, lse = attention(q, k, v, return_lse=True)
    assert (out == 0).all() and (lse == -math.inf).all()
    assert all((g == 0).all() for g in torch.autograd.grad(out.sum(), (q, k, v)))


def test_strided_operands_and_gradients():
    q, k, v = (t.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for t in operands())
    out = attention(q, k, v, causal=True)
    grads = torch.autograd.grad(out, (q, k, v), torch.ones(()).double().expand(out.shape))
    expected = torch.autograd.grad(naive(q, k, v, causal=True)[0].sum(), (q, k, v))
    assert out.stride() == q.stride()
    for x, a, b in zip((q, k, v), grads, expected, strict=True):
        assert a.stride() == x.stride()
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


ERRORS = {
    "three dims": (lambda q, k, v: attention(q[0], k, v), "four dims"),
    "dtypes": (lambda q, k, v: attention(q, k.float(), v), "one floating dtype"),
    "kv lengths": (lambda q, k, v: attention(q, k, v[:, :, 1:]), "agree in B, G, T and K"),
    "groups": (lambda q, k, v: attention(q[:, :3], k, v), "multiple of the 2 kv heads"),
    "segments": (lambda q, k, v: attention(q, k, v, segment_ids=segments(S)), r"ids \(2, 9\) for keys"),
    "float segments": (
        lambda q, k, v: attention(q, k, v, segment_ids=(segments(S) * 1.0, segments(T))), "needs integers"
    ),
    "bias": (lambda q, k, v: attention(q, k, v, bias=torch.zeros(3, S, T)), "broadcastable"),
    "bias gradient": (
        lambda q, k, v: attention(q, k, v, bias=torch.zeros(S, T, requires_grad=True)), "stop_gradient"
    ),
    "window": (lambda q, k, v: attention(q, k, v, window=0), "at least 1 token"),
    "sink": (lambda q, k, v: attention(q, k, v, sink=torch.zeros(3)), "one floating sink logit"),
    "backend": (lambda q, k, v: attention(q, k, v, backend="flash"), "auto, sdpa, math"),
    "impossible backend": (lambda q, k, v: attention(q, k, v[..., :4], backend="sdpa"), "as wide as q and k"),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    call, message = ERRORS[name]
    with pytest.raises((ArgumentError, GradientError), match=message):
        call(*operands())


def test_second_derivative_is_an_error():
    q, k, v = operands()
    (dq,) = torch.autograd.grad(attention(q, k, v).square().sum(), q, create_graph=True)
    with pytest.raises(GradientError, match="second derivative"):
        torch.autograd.grad(dq.sum(), q)
