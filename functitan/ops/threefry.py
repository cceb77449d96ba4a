"""The counter-based generator as one op: ``functitan::threefry``.

A counter-based generator has no state: a word is a function of a key and a counter. When the counter is the
global index of an element, any process computes any element, and all of them find the same bits.
"""

from __future__ import annotations

import torch

_MASK = 0xFFFFFFFF
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA
# Elements per pass: 160 sweeps over three small buffers stay in a core's cache, and memory stays bounded.
_CHUNK = 1 << 17


_NAME = "functitan::threefry"
# Defined by parts, not by torch.library.custom_op, whose first call imports the whole of torch's compiler.
torch.library.define(_NAME, "(Tensor key, Tensor index) -> Tensor")


def threefry(key: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Threefry-2x32 with 20 rounds, pointwise in ``index``; one node of a graph.

    Source: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).

    Args:
        key: int64 of shape (2,): two 32-bit words.
        index: int64 of any shape: the counter, whose high and low halves are the two counter words.

    Returns:
        int64 of the shape of ``index``: 64 random bits, the first output word in the high half.

    >>> word = threefry(torch.tensor([0, 0]), torch.tensor(0))
    >>> hex(int(word))
    '0x6b20015999ba4efe'
    """
    return torch.ops.functitan.threefry.default(key, index)


def _kernel(key: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    # int32 arithmetic wraps modulo 2**32, which is what the cipher is made of; it takes half the memory
    # traffic of masked int64 words. Right shifts are arithmetic, so they are masked.
    schedule = _key_schedule(key)
    flat = index.reshape(-1)
    out = torch.empty_like(flat, memory_format=torch.contiguous_format)
    for start in range(0, flat.numel(), _CHUNK):
        part = flat[start : start + _CHUNK]
        high, low = _rounds(schedule, (part >> 32).to(torch.int32), part.to(torch.int32))
        out[start : start + _CHUNK] = (high.to(torch.int64) << 32) | (low.to(torch.int64) & _MASK)
    return out.view(index.shape)


torch.library.impl(_NAME, "CompositeExplicitAutograd", _kernel)


@torch.library.register_fake(_NAME)
def _fake(key: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(index, memory_format=torch.contiguous_format)


def _vmap(info, in_dims, key, index):  # type: ignore[no-untyped-def]
    key_dim, index_dim = in_dims
    if key_dim is None:  # pointwise: a batch of counters is a larger tensor of counters
        return threefry(key, index), index_dim
    keys = key.movedim(key_dim, 0).unbind(0)
    rows = [index] * len(keys) if index_dim is None else list(index.movedim(index_dim, 0).unbind(0))
    return torch.stack([threefry(k, row) for k, row in zip(keys, rows, strict=True)]), 0


torch.library.register_vmap(_NAME, _vmap)


def _key_schedule(key: torch.Tensor) -> list[torch.Tensor]:
    first, second = key.to(torch.int32).unbind(0)
    return [first, second, first ^ second ^ _PARITY]


def _rounds(schedule: list[torch.Tensor], x0: torch.Tensor, x1: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The cipher on int32 words, in place on two fresh tensors."""
    x0.add_(schedule[0])
    x1.add_(schedule[1])
    spill = torch.empty_like(x1)
    for step in range(5):
        for r in _ROTATIONS[step % 2]:
            x0.add_(x1)
            torch.bitwise_right_shift(x1, 32 - r, out=spill)
            spill.bitwise_and_((1 << r) - 1)
            x1.bitwise_left_shift_(r).bitwise_or_(spill).bitwise_xor_(x0)
        x0.add_(schedule[(step + 1) % 3])
        x1.add_(schedule[(step + 2) % 3] + (step + 1))
    return x0, x1
