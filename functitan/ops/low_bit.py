"""Numbers of 8 and 16 bits in place of float32: codes with a scale per block, and stochastic rounding; as ops.

A block is ``block`` neighbours of one row (the last dim) of the *global* tensor, the last one of a row possibly
shorter, so what is stored depends on no mesh. They are ops because bits are read and tables searched, and so that the
same bits come out compiled and not.

Given float64 values, as ``ft.check`` gives, the scaled numbers of "float8" and the result of stochastic rounding stay
float64: nothing is rounded there.

Legend: C columns (the last dim), B block, N blocks of a row.
"""

from __future__ import annotations

import functools
from typing import Literal

import torch
from torch.nn.functional import pad

#: "int8" codes numbers of both signs, "uint8" numbers that are not negative.
Format = Literal["int8", "uint8", "float8"]
_FLOAT8 = torch.float8_e4m3fn
#: What the largest number of a block is scaled to.
LARGEST: dict[str, float] = {"int8": 1.0, "uint8": 1.0, "float8": torch.finfo(_FLOAT8).max}


@functools.cache
def code_table(signed: bool) -> tuple[float, ...]:
    """The 256 numbers of the dynamic data type, in order (Dettmers 2016, arXiv:1511.04561, section 2; as in 8-bit
    optimizers, Dettmers et al. 2022, arXiv:2110.02861).

    Seven decades below 1; each has twice the numbers of the one below it, in the middles of equal intervals between a
    tenth and the whole of the decade. With 0 and 1 they are 256.

    >>> table = code_table(True)
    >>> len(table), table[127], table[-1]
    (256, 0.0, 1.0)
    """
    numbers = [0.0, 1.0]
    for decade in range(7):
        edges = torch.linspace(0.1, 1.0, 2 ** (decade + (not signed)) + 1)
        middles = (10.0 ** (decade - 6) * ((edges[:-1] + edges[1:]) / 2)).tolist()
        numbers += middles + [-x for x in middles if signed]
    return tuple(sorted(numbers))


@functools.lru_cache(maxsize=16)
def _table(format: str, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(code_table(format == "int8"), dtype=torch.float32).to(device, dtype)


@functools.lru_cache(maxsize=16)
def _borders(format: str, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """From each number of the table to the next the least x that is not nearer to the lower one, in rounded
    differences: (x - lower) >= (upper - lower) / 2."""
    table = _table(format, torch.device("cpu"), dtype)
    lower, half = table[:-1], (table[1:] - table[:-1]) * 0.5
    near = [lower + half]
    for _ in range(4):
        near.insert(0, torch.nextafter(near[0], -torch.ones_like(lower)))
        near.append(torch.nextafter(near[-1], torch.ones_like(lower)))
    candidates = torch.stack(near)
    first = (candidates - lower >= half).to(torch.int64).argmax(0)
    return candidates.gather(0, first[None])[0].to(device)


def blocks_of(columns: int, block: int) -> int:
    """How many blocks a row has."""
    return -(-columns // block)


def _spread(scales: torch.Tensor, columns: int, block: int) -> torch.Tensor:
    """(..., N) to (..., C): the scale of each number's block."""
    return scales.repeat_interleave(block, dim=-1)[..., :columns]


@torch.library.custom_op("functitan::block_quantize", mutates_args=())
def block_quantize(x: torch.Tensor, block: int, format: str, what: str) -> tuple[torch.Tensor, torch.Tensor]:
    """x (..., C) to codes (..., C), uint8 or float8_e4m3fn, and scales (..., N); ``what`` names x in errors."""
    scales = block_scales(x, block, format)
    return block_code(x, scales, block, format), scales


@block_quantize.register_fake
def _(x, block, format, what):  # type: ignore[no-untyped-def]
    return _fake_code(x, format), _fake_scales(x, block)


# The two steps of it; between them, ranks that share a block find its largest number.


@torch.library.custom_op("functitan::block_scales", mutates_args=())
def block_scales(x: torch.Tensor, block: int, format: str) -> torch.Tensor:
    """(..., C) to (..., N): the largest absolute value of each block by :data:`LARGEST`."""
    columns = x.shape[-1]
    count = blocks_of(columns, block)
    wide = x.abs() if count == 1 else pad(x.abs(), (0, count * block - columns))
    return wide.unflatten(-1, (count, -1)).amax(-1) / LARGEST[format]


@torch.library.custom_op("functitan::block_code", mutates_args=())
def block_code(x: torch.Tensor, scales: torch.Tensor, block: int, format: str) -> torch.Tensor:
    """x (..., C) by scales (..., N), rounded to the nearest number that has a code: halves upwards, for float8 to even.

    A scale of 0 is one of a block of zeros.
    """
    scaled = x / _spread(torch.where(scales == 0, 1.0, scales), x.shape[-1], block)
    if format == "float8":
        return scaled.to(_float8_of(x))
    borders = _borders(format, x.device, x.dtype)
    return torch.bucketize(scaled, borders, right=True, out_int32=True).to(torch.uint8)


@block_scales.register_fake
def _(x, block, format):  # type: ignore[no-untyped-def]
    return _fake_scales(x, block)


@block_code.register_fake
def _(x, scales, block, format):  # type: ignore[no-untyped-def]
    return _fake_code(x, format)


def _fake_scales(x: torch.Tensor, block: int) -> torch.Tensor:
    return x.new_empty([*x.shape[:-1], blocks_of(x.shape[-1], block)])


def _fake_code(x: torch.Tensor, format: str) -> torch.Tensor:
    return x.new_empty(x.shape, dtype=_float8_of(x) if format == "float8" else torch.uint8)


def _float8_of(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else _FLOAT8


@torch.library.custom_op("functitan::block_dequantize", mutates_args=())
def block_dequantize(codes: torch.Tensor, scales: torch.Tensor, block: int, format: str) -> torch.Tensor:
    """codes (..., C) times scales (..., N): (..., C) in the scales' dtype."""
    return _numbers(codes, format, scales.dtype) * _spread(scales, codes.shape[-1], block)


def _numbers(codes: torch.Tensor, format: str, dtype: torch.dtype) -> torch.Tensor:
    if format == "float8":
        return codes.to(dtype)
    table = _table(format, codes.device, dtype)
    return table.index_select(0, codes.flatten().to(torch.int32)).view(codes.shape)


@block_dequantize.register_fake
def _(codes, scales, block, format):  # type: ignore[no-untyped-def]
    return scales.new_empty(codes.shape)


@torch.library.custom_op("functitan::stochastic_round", mutates_args=())
def stochastic_round(x: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """float32 to bfloat16: up or down, with probabilities that make x the mean; infinities and NaN stay.

    ``bits``, int64 of x's shape, are random; their low 16 decide. The 16 bits that a bfloat16 lacks are a fraction
    of the step to the next one: adding a uniform number of 16 bits carries over with that probability.
    """
    if x.dtype == torch.float64:
        return x.clone()
    found = x.contiguous().view(torch.int32)
    rounded = ((found + (bits & 0xFFFF).to(torch.int32)) & -0x10000).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x).to(torch.bfloat16)


@stochastic_round.register_fake
def _(x, bits):  # type: ignore[no-untyped-def]
    return torch.empty_like(x, dtype=x.dtype if x.dtype == torch.float64 else torch.bfloat16)
