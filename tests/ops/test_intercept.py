"""The tracer's mode: torch's functions become our ops with all their arguments; draws are refused."""

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from functitan.errors import ArgumentError, TraceError
from functitan.ops.global_rng import draws
from functitan.ops.intercept import OwnOps
from tests.ops.graphs import ours, traced_ops

G = torch.Generator().manual_seed(0)
Q, K, V = (torch.randn(2, h, n, 8, generator=G, dtype=torch.float64) for h, n in ((4, 5), (2, 7), (2, 7)))
MASK = torch.randn(5, 7, generator=G, dtype=torch.float64)
WEIGHT, IDX = torch.randn(6, 3, generator=G), torch.randint(0, 6, (2, 4), generator=G)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"scale": 0.2},
        {"attn_mask": MASK},
        {"attn_mask": MASK > 0},
        {"attn_mask": (MASK > 0)[None, None].expand(2, 4, 5, 7)},
    ],
)
def test_attention_takes_torchs_arguments(options):
    call = lambda: F.scaled_dot_product_attention(Q, K, V, enable_gqa=True, **options)  # noqa: E731
    with OwnOps():
        ours_ = call()
    torch.testing.assert_close(ours_, call(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("lead", [(), (0,), (0, 0)])
def test_attention_takes_fewer_dims(lead):
    q, k, v = Q[lead], K[lead], V[lead]
    if len(lead) < 2:
        k, v = (t.repeat_interleave(2, t.ndim - 3) for t in (k, v))
    with OwnOps():
        ours_ = F.scaled_dot_product_attention(q, k, v, MASK)
    torch.testing.assert_close(ours_, F.scaled_dot_product_attention(q, k, v, MASK), rtol=0, atol=1e-12)


def test_attention_errors():
    with OwnOps():
        with pytest.raises(TraceError, match=r"dropout_p=0.1.*ft.random.bernoulli"):
            F.scaled_dot_product_attention(Q, Q, Q, dropout_p=0.1)
        with pytest.raises(ArgumentError, match="enable_gqa=True"):
            F.scaled_dot_product_attention(Q, K, V)
        with pytest.raises(ArgumentError, match="Flatten leading dims"):
            F.scaled_dot_product_attention(Q[None], Q[None], Q[None])


@pytest.mark.parametrize("padding", [None, 2, -1])
def test_embedding_takes_torchs_arguments(padding):
    weight = WEIGHT.clone().requires_grad_()
    expected = F.embedding(IDX, weight, padding_idx=padding)
    with OwnOps():
        out = F.embedding(IDX, weight, padding_idx=padding)
        lower = torch.embedding(weight, IDX)
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    torch.testing.assert_close(lower, expected, rtol=0, atol=0)
    a, b = (torch.autograd.grad(o.square().sum(), weight) for o in (out, expected))
    torch.testing.assert_close(a, b)


def test_embedding_options_that_cannot_be_traced():
    with OwnOps(), pytest.raises(TraceError, match="max_norm"):
        F.embedding(IDX, WEIGHT, max_norm=1.0)


def test_modules_are_traced_as_our_ops():
    table = torch.nn.Embedding(6, 8)

    def f(weight, idx):
        with OwnOps():
            x = torch.func.functional_call(table, {"weight": weight}, (idx,))
            return F.scaled_dot_product_attention(x, x, x, is_causal=True)

    ops = traced_ops(f, [table.weight.detach(), IDX], [0])
    names = ("embedding", "attention", "attention_backward", "embedding_backward")
    assert ours(ops) == [f"functitan.{n}.default" for n in names]
    assert not [op for op in ops if "flash" in op or "efficient" in op]


X = torch.rand(3, 4)
DRAWS = {
    "torch.rand": lambda: torch.rand(3),
    "torch.randn": lambda: torch.randn(3, generator=torch.Generator()),
    "torch.randn_like": lambda: torch.randn_like(X),
    "torch.randint": lambda: torch.randint(0, 5, (3,)),
    "torch.randperm": lambda: torch.randperm(3),
    "torch.normal": lambda: torch.normal(0.0, 1.0, (3,)),
    "torch.bernoulli": lambda: torch.bernoulli(X),
    "torch.multinomial": lambda: torch.multinomial(X, 1),
    "Tensor.bernoulli": lambda: X.bernoulli(),
    "Tensor.multinomial": lambda: X.multinomial(1),
    "Tensor.normal_": lambda: X.normal_(),
    "Tensor.uniform_": lambda: torch.Tensor.uniform_(X),
    "Tensor.exponential_": lambda: X.exponential_(),
    "nn.init.normal_": lambda: torch.nn.init.normal_(X),
    "Tensor.uniform_ ": lambda: torch.nn.init.xavier_uniform_(X),
    "nn.functional.dropout": lambda: F.dropout(X),
    "nn.functional.dropout ": lambda: torch.nn.Dropout(0.3)(X),
    "torch.dropout": lambda: torch.dropout(X, 0.3, True),
    "nn.functional.alpha_dropout": lambda: F.alpha_dropout(X, training=True),
    "nn.functional.rrelu": lambda: F.rrelu(X, training=True),
    "nn.functional.gumbel_softmax": lambda: F.gumbel_softmax(X),
    "torch.rand ": lambda: torch.distributions.Uniform(0.0, 1.0).sample((3,)),
}  # fmt: skip


@pytest.mark.parametrize("name", DRAWS)
def test_the_global_rng_is_refused(name):
    with (
        OwnOps(),
        pytest.raises(TraceError, match=f"^{name.strip()} uses the global RNG.*Pass a key.* write "),
    ):
        DRAWS[name]()


def test_what_does_not_draw_passes():
    with OwnOps():
        assert F.dropout(X, 0.5, training=False) is not None
        assert torch.equal(F.dropout(X, 0.0), X)
        assert torch.equal(torch.nn.Dropout(0.5).eval()(X), X)
        assert torch.equal(torch.dropout(X, 0.5, False), X)
        assert F.rrelu(X).shape == X.shape


def test_a_finished_trace_shows_what_slipped_through():
    graph = make_fx(lambda x: x + torch.rand(3))(torch.ones(3))
    assert [str(n.target) for n in graph.graph.nodes if draws(n.target)] == ["aten.rand.default"]
