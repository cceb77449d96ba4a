"""The largest logit per row and head against plain products with the mask written out."""

import math

import pytest
import torch

from functitan.errors import ArgumentError
from functitan.ops import attention_logits
from functitan.ops.attention_logits import max_logits


def _normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def _expected(q, k, allowed, scale):
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    return torch.where(allowed, scale * q @ k.mT, -math.inf).amax((-2, -1))


@pytest.mark.parametrize("at_once", [1, 40, 2**24])
def test_masks_and_groups(at_once, monkeypatch):
    """Whatever number of queries is worked on at once."""
    monkeypatch.setattr(attention_logits, "_AT_ONCE", at_once)
    q, k = _normal(2, 4, 7, 3), _normal(2, 2, 7, 3, seed=1)
    i, j = torch.arange(7)[:, None], torch.arange(7)
    every = torch.ones(2, 4, 7, 7, dtype=torch.bool)
    ids = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 1, 2, 2]])
    same = (ids[:, :, None] == ids[:, None, :])[:, None]
    bias = _normal(1, 1, 7, 7, seed=2)
    bias[..., 3] = -math.inf
    for settings, allowed in (
        ({}, every),
        ({"causal": True}, every & (j <= i)),
        ({"causal": True, "window": 2}, every & (j <= i) & (j > i - 2)),
        ({"causal": True, "segment_ids": ids}, every & (j <= i) & same),
        ({"bias": bias}, every & (j != 3)),
        ({"bias": (j != 3)[None]}, every & (j != 3)),
    ):
        found = max_logits(q, k, scale=0.7, **settings)
        torch.testing.assert_close(found, _expected(q, k, allowed, 0.7), rtol=1e-12, atol=0)


def test_narrow_operands_are_multiplied_in_float32():
    q, k = _normal(1, 2, 5, 8, dtype=torch.bfloat16), _normal(1, 2, 5, 8, seed=1, dtype=torch.bfloat16)
    found = max_logits(q, k)
    expected = _expected(q.float(), k.float(), torch.ones(5, 5, dtype=torch.bool), 1 / math.sqrt(8))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


def test_no_gradient_and_no_keys():
    q = _normal(1, 1, 2, 3).requires_grad_()
    assert not max_logits(q, q).requires_grad
    nothing = max_logits(q, q, bias=torch.zeros(2, 2, dtype=torch.bool))
    assert nothing.tolist() == [[-math.inf]]


def test_operands_that_do_not_fit():
    q = _normal(1, 4, 2, 3)
    with pytest.raises(ArgumentError, match=r"agree in B and K, with H a multiple of G; found q float64\[1, 4, 2, 3\]"):
        max_logits(q, _normal(1, 3, 2, 3))
    with pytest.raises(ArgumentError, match=r"in one floating dtype"):
        max_logits(q, _normal(1, 4, 2, 3, dtype=torch.float32))
