"""Samples do not depend on where in a vectorised loop an element falls.

A rank computes a slice of what one device computes whole. On CPU, kernels take another path for the last
elements of a loop, and some give other bits there (sigmoid in float32 does). Every function behind a sample
is therefore compared, bit for bit, with itself on slices of every length from 1 to 33 at every offset.
"""

from __future__ import annotations

import pytest
import torch

from functitan import random
from functitan.ops.normal_quantile import normal_quantile
from functitan.ops.threefry import threefry

torch.set_num_threads(1)

# Offsets from 0 to 17 for the longest slice: more than the lanes of any vector register.
_LENGTH = 50
_KEY = random.key(17)


def _bits_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    # Compared as integers: -0.0 and 0.0 are different bits.
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.dtype.itemsize]
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(integers), b.contiguous().view(integers))


def _slices():
    for length in range(1, 34):
        for offset in range(0, _LENGTH - length + 1):
            yield slice(offset, offset + length)


def _assert_position_independent(f, *columns: torch.Tensor) -> None:
    whole = f(*columns)
    wrong = [s for s in _slices() if not _bits_equal(f(*(c[s].clone() for c in columns)), whole[s])]
    assert not wrong, f"{len(wrong)} slices differ, first {wrong[0]}"
    # A shard along the last dim of a matrix is strided when it is sliced, not computed.
    matrix = [torch.stack([c, c.flip(0)], dim=1) for c in columns]
    strided = f(*(m[:, 0] for m in matrix))
    assert _bits_equal(strided, whole)


# Each op, with a map from (0, 1) to the interval that samples use it on.
_OPS = {
    "log": (torch.log, lambda u: u),
    "log of small": (torch.log, lambda u: u * 1e-6),
    "sqrt": (torch.sqrt, lambda u: u * 17.0),
    "abs": (torch.abs, lambda u: u - 0.5),
    "mul": (lambda x: x * 3.387132872796366608, lambda u: u),
    "add": (lambda x: x + 133.14166789178437745, lambda u: u),
    "square": (lambda x: 0.180625 - x * x, lambda u: u - 0.5),
    "div": (lambda x: (x + 1.1) / (x + 0.3), lambda u: u),
    "clamp": (lambda x: x.clamp(0.2, 0.7), lambda u: u),
    "where": (lambda x: torch.where(x < 0.5, x, -x), lambda u: u),
    "less": (lambda x: x < 0.3, lambda u: u),
    "to float32": (lambda x: x.to(torch.float32), lambda u: u),
    "to bfloat16": (lambda x: x.to(torch.bfloat16), lambda u: u),
    "to float16": (lambda x: x.to(torch.float16), lambda u: u),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", _OPS)
def test_op(name, dtype):
    f, prepare = _OPS[name]
    u = random.uniform(_KEY, (_LENGTH,), torch.float64).clamp(min=1e-12)
    _assert_position_independent(f, prepare(u).to(dtype))


def test_the_comparison_finds_a_dependent_op():
    # The reason for this file. If torch mends sigmoid, choose another op that shows that the test can fail.
    x = torch.linspace(-9, 9, _LENGTH)
    if torch.backends.cpu.get_cpu_capability() != "AVX2":
        pytest.skip("observed with AVX2 kernels")
    with pytest.raises(AssertionError, match="slices differ"):
        _assert_position_independent(torch.sigmoid, x)


def test_bits():
    _assert_position_independent(lambda index: threefry(_KEY, index), torch.arange(_LENGTH))


def test_normal_quantile():
    q = random.uniform(_KEY, (_LENGTH,), torch.float64, -0.4999, 0.4999)
    _assert_position_independent(lambda q, tail: normal_quantile(q, tail), q, 0.5 - q.abs())


_SAMPLERS = {
    "bits": lambda: random.bits(_KEY, (_LENGTH,)),
    "bernoulli": lambda: random.bernoulli(_KEY, 0.3, (_LENGTH,)),
    "randint": lambda: random.randint(_KEY, (_LENGTH,), -5, 1000),
}
for _dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
    _SAMPLERS[f"uniform {_dtype}"] = lambda d=_dtype: random.uniform(_KEY, (_LENGTH,), d, -0.3, 1.7)
# The others are float32 numbers rounded in narrower dtypes; the rounding is tested above.
for _dtype in (torch.float64, torch.float32):
    _SAMPLERS |= {
        f"normal {_dtype}": lambda d=_dtype: random.normal(_KEY, (_LENGTH,), d),
        f"truncated_normal {_dtype}": lambda d=_dtype: random.truncated_normal(_KEY, 2, 9, (_LENGTH,), d),
        f"gumbel {_dtype}": lambda d=_dtype: random.gumbel(_KEY, (_LENGTH,), d),
    }


@pytest.mark.parametrize("name", _SAMPLERS)
def test_sampler(name, monkeypatch):
    sampler = _SAMPLERS[name]

    def at(index):
        monkeypatch.setattr(random, "_sample", lambda key, shape, name, transform: transform(threefry(key, index)))
        return sampler()

    _assert_position_independent(at, torch.arange(_LENGTH))
    whole = at(torch.arange(_LENGTH))
    monkeypatch.undo()
    assert _bits_equal(sampler(), whole)
