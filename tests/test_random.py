"""Keys and samples: known answers, JAX's numbers, moments, independence, tracing, errors."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from functitan import random
from functitan.errors import ArgumentError
from functitan.ops.normal_quantile import normal_quantile
from functitan.ops.threefry import threefry

torch.set_num_threads(1)

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def _hex(word: torch.Tensor) -> str:
    return f"{int(word) & (2**64 - 1):016x}"


@pytest.mark.parametrize(
    ("key", "counter", "expected"),
    [  # the known-answer vectors of Random123
        ((0, 0), 0, "6b20015999ba4efe"),
        ((0xFFFFFFFF, 0xFFFFFFFF), -1, "1cb996fcbb002be7"),
        ((0x13198A2E, 0x03707344), 0x243F6A8885A308D3, "c4923a9c483df7a0"),
    ],
)
def test_threefry_known_answers(key, counter, expected):
    assert _hex(threefry(torch.tensor(key), torch.tensor(counter))) == expected
    # and the same in every lane of a vectorised loop
    words = threefry(torch.tensor(key), torch.full((37,), counter))
    assert {_hex(w) for w in words} == {expected}


def test_op_is_well_formed():
    torch.library.opcheck(
        torch.ops.functitan.threefry.default, (random.key(3), torch.arange(6).view(2, 3)),
        test_utils=("test_schema", "test_faketensor"),
    )  # fmt: skip


def test_numbers_of_jax():
    # jax 0.10.2 with key(42); integers and unit uniforms exactly, the others to rounding.
    k = random.key(42)
    assert random.split(k, 3).tolist() == [
        [1832780943, 270669613], [64467757, 2916123636], [2465931498, 255383827]
    ]  # fmt: skip
    assert random.fold_in(k, 7).tolist() == [2547012911, 1371500959]
    assert random.fold_in(k, 2**32 - 1).tolist() == [2398536845, 3890976714]
    assert random.key(2**40 + 5).tolist() == [256, 5]
    assert random.key(-1).tolist() == [4294967295, 4294967295]
    assert random.bits(k, (2, 3)).tolist() == [
        [2098992034, 2919706841, 2646866425], [2409546199, 1935504149, 2516274904]
    ]  # fmt: skip
    assert random.uniform(k, (3,)).tolist() == [0.48870956897735596, 0.6797971725463867, 0.6162714958190918]
    exact = [0.4267275666499091, 0.015010069515314584, 0.5741444178995352]
    assert random.uniform(k, (3,), torch.float64).tolist() == exact
    close = lambda a, b, rtol=2e-6: torch.testing.assert_close(  # noqa: E731
        a, torch.tensor(b, dtype=a.dtype), rtol=rtol, atol=1e-7
    )
    close(random.uniform(k, (3,), minval=-2.0, maxval=3.0), [0.4435478448, 1.3989858627, 1.0813574790])
    close(random.normal(k, (3,)), [-0.02830461598992743, 0.4671318531036377, 0.2957029640674591])
    close(random.normal(k, (3,), torch.float64), [-0.18471174528191162, -2.169824560397754, 0.18693555179382582])
    close(random.truncated_normal(k, -1.0, 2.0, (3,)), [0.14770005643, 0.56844490766, 0.42102551460])
    close(random.gumbel(k, (3,)), [0.3340933918952942, 0.952019453048706, 0.7255305647850037])
    assert random.bernoulli(k, 0.3, (12,)).nonzero().flatten().tolist() == [6]
    assert random.categorical(k, torch.zeros(4, 50)).tolist() == [29, 38, 34, 5]


def test_streams_differ():
    k = random.key(0)
    keys = [k, random.key(1), *random.split(k, 4), random.fold_in(k, 4), random.fold_in(k, 2**32)]
    keys += [random.fold_in(k, "layers/wq"), random.fold_in(k, "layers/wk"), random.fold_in(k, -1)]
    streams = torch.stack([random.bits(key, (64,)) for key in keys])
    assert len({tuple(row) for row in streams.tolist()}) == len(keys)
    assert torch.equal(random.split(k, 4)[3], random.fold_in(k, 3))  # as documented
    # and no word of one stream turns up in another
    assert streams.unique().numel() == streams.numel()


def test_fold_in_kinds_agree():
    k = random.key(5)
    for value in (0, 3, 2**40, -2):
        assert torch.equal(random.fold_in(k, value), random.fold_in(k, torch.tensor(value)))
    # A hash must never change between versions: it would change every initial weight.
    assert random.fold_in(random.key(0), "layers/attn/wq").tolist() == [2759936288, 1926552030]


def _ks(cdf: torch.Tensor) -> float:
    """Kolmogorov-Smirnov statistic times sqrt(n); above 1.95 with probability 0.001."""
    n = cdf.numel()
    ranks = torch.arange(1, n + 1, dtype=torch.float64)
    u = cdf.double().sort().values
    return float(torch.maximum(ranks / n - u, u - (ranks - 1) / n).max()) * math.sqrt(n)


def _phi(z: torch.Tensor) -> torch.Tensor:
    return 0.5 * torch.special.erfc(-z.double() / math.sqrt(2.0))


N = 200_000  # more than one chunk


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_distributions(dtype):
    k = random.key(2)
    u = random.uniform(k, (N,), dtype)
    assert _ks(u) < 1.95
    assert abs(float(u.double().mean()) - 0.5) < 4 * math.sqrt(1 / 12 / N)
    z = random.normal(k, (N // 10, 10), dtype).flatten()
    assert _ks(_phi(z)) < 1.95
    assert abs(float(z.double().mean())) < 4 / math.sqrt(N)
    assert abs(float(z.double().var()) - 1) < 4 * math.sqrt(2 / N)
    assert abs(float((z.double() ** 4).mean()) - 3) < 4 * math.sqrt(96 / N)
    for low, high in ((-2.0, 2.0), (-1.0, 3.0), (1.5, 4.0), (-9.0, -8.0), (8.0, 9.0), (-math.inf, 0.5)):
        t = random.truncated_normal(k, low, high, (N,), dtype)
        assert bool(((t > low) & (t < high)).all())
        # on the side where tail probabilities keep their digits
        sign = -1.0 if low > 0 else 1.0
        ends = sorted(_phi(torch.tensor([sign * low, sign * high])).tolist())
        assert _ks((_phi(sign * t) - ends[0]) / (ends[1] - ends[0])) < 1.95
    g = random.gumbel(k, (N,), dtype).double()
    assert _ks(torch.exp(-torch.exp(-g))) < 1.95
    # neighbours in a stream, and equal places of two streams, are uncorrelated
    other = random.normal(random.fold_in(k, 1), (N,), dtype)
    for a, b in ((z[1:], z[:-1]), (z, other)):
        assert abs(float((a.double() * b.double()).mean())) < 4 / math.sqrt(N)


def test_discrete_distributions():
    k = random.key(4)
    b = random.bernoulli(k, torch.tensor([0.1, 0.9]), (N // 2, 2)).double().mean(0)
    torch.testing.assert_close(b, torch.tensor([0.1, 0.9]).double(), atol=5e-3, rtol=0)
    p = torch.tensor([0.5, 0.2, 0.0, 0.3])
    drawn = random.categorical(k, p.log(), shape=(50_000,))
    counts = torch.bincount(drawn, minlength=4) / 50_000
    torch.testing.assert_close(counts, p, atol=1e-2, rtol=0)
    assert counts[2] == 0
    r = random.randint(k, (60_000,), -3, 3)
    assert torch.bincount(r + 3).tolist() == pytest.approx([10_000] * 6, abs=400)


def test_bits_are_unbiased():
    words = random.bits(random.key(9), (20_000,))
    assert int(words.min()) >= 0 and int(words.max()) < 2**32
    rates = torch.stack([(words >> i) & 1 for i in range(32)]).double().mean(1)
    assert bool((rates - 0.5).abs().max() < 5 * 0.5 / math.sqrt(20_000))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_extreme_words_give_finite_samples(dtype, monkeypatch):
    # all zeros and all ones in the 32 bits (high ^ low) that a sample reads, and in all 64
    words = torch.tensor([0, -1, 0xFFFFFFFF, -(2**32), 1 << 63 - 1, 1])
    monkeypatch.setattr(random, "_sample", lambda key, shape, name, transform: transform(words))
    k = random.key(0)
    u = random.uniform(k, (6,), dtype)
    assert float(u.min()) == 0.0 and float(u.max()) < 1.0
    scaled = random.uniform(k, (6,), dtype, 1000.0, 1001.0)
    assert float(scaled.max()) < 1001.0 and float(scaled.min()) == 1000.0
    for x in (
        random.normal(k, (6,), dtype),
        random.gumbel(k, (6,), dtype),
        random.truncated_normal(k, -math.inf, math.inf, (6,), dtype),
        random.truncated_normal(k, -2, 2, (6,), dtype),
        random.truncated_normal(k, 5, math.inf, (6,), dtype),
        random.truncated_normal(k, 50, 60, (6,), dtype),
    ):
        assert bool(torch.isfinite(x).all()), x


def test_float32_uniform_has_23_bits():
    u = random.uniform(random.key(1), (10_000,))
    assert torch.equal(u * 2**23, torch.floor(u * 2**23))


def test_normal_quantile_is_accurate():
    p = torch.cat([torch.logspace(-300, -1, 300, dtype=torch.float64), torch.linspace(0.1, 0.999, 300).double()])
    ours = normal_quantile(p - 0.5, torch.where(p < 0.5, p, 1.0 - p))
    exact = torch.tensor([statistics.NormalDist().inv_cdf(float(x)) for x in p], dtype=torch.float64)
    torch.testing.assert_close(ours, exact, rtol=1e-14, atol=1e-15)


def test_narrow_dtypes_are_rounded_float32():
    k = random.key(3)
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(random.normal(k, (50,), dtype), random.normal(k, (50,)).to(dtype))
        assert torch.equal(random.gumbel(k, (50,), dtype), random.gumbel(k, (50,)).to(dtype))


def test_shape_does_not_matter_and_chunks_join():
    k = random.key(8)
    flat = random.normal(k, (N,))
    assert torch.equal(random.normal(k, (N // 4, 4)).flatten(), flat)
    assert torch.equal(random.normal(k, (1000,)), flat[:1000])
    assert random.normal(k).shape == () and random.normal(k, (0, 3)).shape == (0, 3)


def test_permutation():
    k = random.key(6)
    order = random.permutation(k, 1000)
    assert torch.equal(order.sort().values, torch.arange(1000)) and not torch.equal(order, torch.arange(1000))
    x = torch.arange(20).view(4, 5)
    assert torch.equal(random.permutation(k, x), x[random.permutation(k, 4)])
    assert torch.equal(random.permutation(k, x, axis=1), x[:, random.permutation(k, 5)])
    firsts = torch.stack([random.permutation(key, 3) for key in random.split(k, 1200)])
    codes = torch.bincount(firsts[:, 0] * 3 + firsts[:, 1], minlength=8)
    assert codes[codes > 0].tolist() == pytest.approx([200] * 6, abs=60)


def test_categorical_shapes():
    k, logits = random.key(0), torch.zeros(2, 7, 3)
    assert random.categorical(k, logits).shape == (2, 7)
    assert random.categorical(k, logits, axis=1).shape == (2, 3)
    assert int(random.categorical(k, logits, axis=1).max()) < 7
    assert random.categorical(k, logits.bfloat16(), shape=(5, 2, 7)).shape == (5, 2, 7)


def _everything(key, step):
    key = random.fold_in(random.fold_in(key, step), "layers/wq")
    a, b = random.split(key)
    return (
        random.normal(a, (3, 4)), random.truncated_normal(b, -1, 1, (5,), torch.bfloat16),
        random.categorical(b, torch.zeros(5, 7)), random.permutation(a, 9), random.bernoulli(a, 0.5, (2, 2)),
        random.uniform(b, (2,), torch.float16, -1, 1), random.randint(b, (3,), 0, 9),
    )  # fmt: skip


@pytest.mark.parametrize("mode", ["real", "fake"])
def test_traces_with_the_key_as_an_input(mode):
    graph = make_fx(_everything, tracing_mode=mode)(random.key(0), torch.tensor(0))
    inputs = (random.key(11), torch.tensor(4))
    for traced, plain in zip(graph(*inputs), _everything(*inputs), strict=True):
        assert torch.equal(traced, plain)


def test_a_sample_traces_to_arange_view_and_one_pointwise_op():
    # What the compiler shards: the global index from arange and view, then only pointwise ops.
    graph = make_fx(lambda k: random.normal(k, (300, 1000)), tracing_mode="fake")(random.key(0))
    targets = [n.target for n in graph.graph.nodes if n.op == "call_function"]
    assert targets[:3] == [
        torch.ops.aten.arange.default, torch.ops.aten.view.default, torch.ops.functitan.threefry.default
    ]  # fmt: skip
    conversions = {torch.ops.aten._to_copy.default}
    others = [t for t in targets[3:] if torch.Tag.pointwise not in t.tags and t not in conversions]
    assert not others


def test_vmap_over_keys_and_beside_them():
    keys = random.split(random.key(3), 4)
    batched = torch.func.vmap(lambda k: random.normal(k, (3,)))(keys)
    assert torch.equal(batched, torch.stack([random.normal(k, (3,)) for k in keys]))
    noisy = torch.func.vmap(lambda x: x + random.normal(keys[0], (3,)))(torch.zeros(2, 3))
    assert torch.equal(noisy[0], random.normal(keys[0], (3,)))
    folded = torch.func.vmap(lambda i: random.fold_in(keys[0], i))(torch.arange(3))
    assert torch.equal(folded[2], random.fold_in(keys[0], 2))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: random.normal(0, (2,)), "needs a key, int64 of shape .2,., as its first argument; found 0"),
        (lambda: random.normal(random.split(random.key(0)), (2,)), r"found torch.int64 of shape \(2, 2\)"),
        (lambda: random.key(0.5), "needs an integer seed; found 0.5 of type float"),
        (lambda: random.normal(random.key(0), 5), "needs a shape, a tuple of sizes; found 5"),
        (lambda: random.uniform(random.key(0), (2,), torch.int32), "found torch.int32. Draw float32"),
        (
            lambda: random.uniform(random.key(0), (2,), minval=2),
            "lower bound below the upper one; found 2 and 1.0",
        ),
        (lambda: random.fold_in(random.key(0), 0.5), "0-d integer tensor or a string; found float"),
        (lambda: random.fold_in(random.key(0), torch.ones(2)), r"found shape \(2,\) and torch.float32"),
        (lambda: random.categorical(random.key(0), torch.ones(2, 3), shape=(3,)), r"must end with \(2,\)"),
    ],
)
def test_errors_say_what_to_write(call, message):
    with pytest.raises(ArgumentError, match=message):
        call()
