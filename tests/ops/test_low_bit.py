"""Codes in 8 bits against a search by brute force, and stochastic rounding against its mean."""

import math

import pytest
import torch

from functitan import optim, random
from functitan.ops.low_bit import code_table, stochastic_round


def _random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("signed", [True, False])
def test_the_table_is_seven_decades_with_zero_and_one(signed):
    table = code_table(signed)
    assert len(set(table)) == 256 and list(table) == sorted(table)
    assert 0.0 in table and table[-1] == 1.0 and (min(table) < 0) == signed
    for decade in range(7):
        inside = [x for x in table if 10.0 ** (decade - 7) < x < 10.0 ** (decade - 6)]
        assert len(inside) == 2 ** (decade + (not signed))
        middles = [10.0 ** (decade - 6) * (0.1 + 0.9 * (i + 0.5) / len(inside)) for i in range(len(inside))]
        assert inside == pytest.approx(middles, rel=1e-6)
        if signed:
            assert {-x for x in inside} <= set(table)


@pytest.mark.parametrize("format", ["int8", "uint8"])
@pytest.mark.parametrize("shape,block", [((3, 64), 16), ((5, 40), 16), ((4, 7), 256), ((33,), 8)])
def test_codes_are_the_nearest_numbers_by_the_scale_of_their_block(format, shape, block):
    """Also where the last block of a row is shorter, and where a row is shorter than a block."""
    x = _random(*shape) * torch.logspace(-3, 3, math.prod(shape)).reshape(shape)
    x = x if format == "int8" else x.square()
    found = optim.quantize(x, format, block)
    table = torch.tensor(code_table(format == "int8"), dtype=torch.float64)
    assert found.codes.dtype == torch.uint8 and found.codes.shape == x.shape
    assert found.scales.shape == (*shape[:-1], math.ceil(shape[-1] / block))
    for row, codes, scales in zip(x.reshape(-1, shape[-1]), found.codes.reshape(-1, shape[-1]),
                                  found.scales.reshape(-1, found.scales.shape[-1]), strict=True):  # fmt: skip
        for i, scale in enumerate(scales):
            part, own = row[i * block : (i + 1) * block], codes[i * block : (i + 1) * block]
            assert scale == part.abs().max()
            gaps = (part.double()[:, None] / scale.double() - table).abs()
            chosen = gaps.gather(1, own.long()[:, None])[:, 0]
            assert torch.all(chosen <= gaps.min(1).values + 1e-6)
    assert torch.equal(optim.dequantize(found), table.float()[found.codes.long()] * _spread(found, shape))


@pytest.mark.parametrize("format", ["int8", "uint8"])
def test_numbers_of_the_table_keep_their_code_and_half_way_goes_up(format):
    table = torch.tensor(code_table(format == "int8"))
    found = optim.quantize(table, format)
    assert found.codes.tolist() == list(range(256)) and torch.equal(optim.dequantize(found), table)
    lower, half = table[:-1], (table[1:] - table[:-1]) * 0.5
    middle = lower + half
    for x in (torch.nextafter(middle, lower), middle, torch.nextafter(middle, table[1:])):
        codes = optim.quantize(torch.cat([x, torch.ones(1)]), format).codes[:-1]
        assert codes.tolist() == [i + int(up) for i, up in enumerate(x - lower >= half)]


def _spread(found, shape):
    return found.scales.repeat_interleave(found.block, -1)[..., : shape[-1]]


def test_float8_is_scaled_to_its_largest_number():
    x = _random(4, 32)
    found = optim.quantize(x, "float8", 16)
    assert found.codes.dtype == torch.float8_e4m3fn
    top = found.codes.float().abs().reshape(4, 2, 16).amax(-1)
    assert torch.all(top == 448)
    # Three bits behind the point: half a step is 1/16 of a number.
    assert torch.all((optim.dequantize(found) - x).abs() <= x.abs() / 16 + found.scales.max() * 2**-9)


@pytest.mark.parametrize("format", ["int8", "uint8", "float8"])
def test_zeros_come_back_and_no_scale_is_too_small(format):
    """A floor under the scale would take a second moment of 1e-30 for zero."""
    zero = optim.quantize(torch.zeros(2, 8), format, 4)
    assert not optim.dequantize(zero).any() and not zero.scales.any()
    small = torch.full((1, 8), 1e-30)
    torch.testing.assert_close(optim.dequantize(optim.quantize(small, format)), small, rtol=1e-6, atol=0)


def test_what_is_not_finite_stays_in_its_block():
    x = torch.ones(2, 8)
    x[0, 1] = math.nan
    found = optim.dequantize(optim.quantize(x, "int8", 4))
    assert found[0, :4].isnan().all() and torch.equal(found[0, 4:], x[0, 4:]) and torch.equal(found[1], x[1])


@pytest.mark.parametrize("x", [1.0, -3.7, 1e-20, 0.1, 65504.0])
def test_stochastic_rounding_is_right_in_the_mean(x):
    n = 100_000
    values = torch.full((n,), x)
    found = stochastic_round(values, random.bits(random.key(3), (n,)))
    assert found.dtype == torch.bfloat16
    low, high, exact = found.min().item(), found.max().item(), values[0].item()
    assert low <= exact <= high and high - low <= abs(x) / 127
    assert found.double().mean().item() == pytest.approx(exact, abs=4 * (high - low) / math.sqrt(n), rel=1e-12)


def test_stochastic_rounding_takes_exactly_the_share_of_the_16_bits():
    """1 + 2**-9 is a quarter of a step of 2**-7 above 1: a quarter of all 16-bit numbers carries over."""
    bits = torch.arange(2**16)
    found = stochastic_round(torch.full((2**16,), 1 + 2.0**-9), bits)
    assert int((found == 1 + 2.0**-7).sum()) == 2**14 and int((found == 1).sum()) == 3 * 2**14
    negative = stochastic_round(torch.full((2**16,), -1 - 2.0**-9), bits)
    assert torch.equal(negative, -found)


def test_stochastic_rounding_keeps_what_needs_no_rounding():
    x = torch.tensor([0.0, -0.0, 1.5, math.inf, -math.inf, math.nan, 3.3e38])
    for bits in (0, 0xFFFF):
        found = stochastic_round(x, torch.full(x.shape, bits)).float()
        assert torch.equal(found[:5], x[:5]) and found[5].isnan() and found[6].isfinite()
