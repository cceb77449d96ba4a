"""Row lookup and its gradient, whole and by blocks, against indexing."""

import pytest
import torch
from torch.nn.functional import embedding as torch_embedding

from functitan.errors import ArgumentError
from functitan.ops.check import IndexRangeError
from functitan.ops.embedding import embedding
from functitan.ops.shard_lookup import embedding_shard, embedding_shard_backward, put_shard, take_shard
from tests.ops.graphs import ours, traced_ops

V, D, RANKS = 12, 5, 4


def table_and_ids(dtype=torch.float64, shape=(3, 7)):
    g = torch.Generator().manual_seed(0)
    return torch.randn(V, D, generator=g, dtype=dtype, requires_grad=True), torch.randint(0, V, shape, generator=g)


@pytest.mark.parametrize("shape", [(), (4,), (3, 7), (0, 2)])
@pytest.mark.parametrize("id_dtype", [torch.int64, torch.int32])
def test_matches_torch(shape, id_dtype):
    weight, idx = table_and_ids(shape=shape)
    out, expected = embedding(idx.to(id_dtype), weight), torch_embedding(idx, weight)
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    grad = torch.randn(out.shape, dtype=out.dtype)
    (ours_,) = torch.autograd.grad(out, weight, grad)
    (theirs,) = torch.autograd.grad(expected, weight, grad)
    torch.testing.assert_close(ours_, theirs, rtol=0, atol=1e-14)


def test_gradients_of_both_orders():
    weight, idx = table_and_ids()
    assert torch.autograd.gradcheck(lambda w: embedding(idx, w), weight)
    assert torch.autograd.gradgradcheck(lambda w: embedding(idx, w).square(), weight)


def test_bfloat16_sums_in_float32():
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    out = embedding(torch.zeros(1000, dtype=torch.int64), weight)
    (grad,) = torch.autograd.grad(out.sum(), weight)
    assert grad.dtype == torch.bfloat16 and grad[0, 0] == 1000


def test_trace_and_registration():
    weight, idx = table_and_ids(torch.float32)
    ops = traced_ops(lambda w, i: embedding(i, w), [weight, idx], [0])
    assert ours(ops) == ["functitan.embedding.default", "functitan.embedding_backward.default"]
    torch.library.opcheck(torch.ops.functitan.embedding.default, (weight, idx))
    grad = torch.randn(*idx.shape, D, requires_grad=True)
    torch.library.opcheck(torch.ops.functitan.embedding_backward.default, (grad, idx, weight.detach()))


def test_errors():
    weight, idx = table_and_ids()
    with pytest.raises(IndexRangeError, match=r"rows \d+ to 2\d in a table of 12 rows.*clamp\(0, 11\)"):
        embedding(idx + V, weight)
    with pytest.raises(IndexError, match="rows -1 to"):
        embedding(idx - idx.min() - 1, weight)
    with pytest.raises(ArgumentError, match="needs integers for the indices"):
        embedding(idx.double(), weight)
    with pytest.raises(ArgumentError, match=r"needs a table \(V, D\); found float64\[12\]"):
        embedding(idx, weight[:, 0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_blocks_of_a_table_sum_to_the_whole(dtype):
    weight, idx = table_and_ids(dtype)
    out = embedding(idx, weight)
    grad = torch.randn_like(out)
    (expected,) = torch.autograd.grad(out, weight, grad)
    blocks = [b.contiguous() for b in weight.detach().chunk(RANKS)]
    coords = [torch.tensor(r) for r in range(RANKS)]
    parts = [embedding_shard(b, idx, c) for b, c in zip(blocks, coords, strict=True)]
    torch.testing.assert_close(sum(parts), out, rtol=0, atol=0)
    grads = [embedding_shard_backward(grad, idx, b, c) for b, c in zip(blocks, coords, strict=True)]
    torch.testing.assert_close(torch.cat(grads), expected, rtol=0, atol=0)
    for op, args in ((embedding_shard, (blocks[1], idx)), (embedding_shard_backward, (grad, idx, blocks[1]))):
        torch.library.opcheck(op, (*args, coords[1]))


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_blocks_of_a_gather_sum_to_the_whole(dim, dtype):
    g = torch.Generator().manual_seed(1)
    x = torch.randn(8, 8, generator=g).to(dtype)
    index = torch.randint(0, 8, (8, 8), generator=g)
    grad = torch.randn(8, 8, generator=g).to(dtype)
    coords = [torch.tensor(r) for r in range(RANKS)]
    blocks = [b.contiguous() for b in x.chunk(RANKS, dim)]
    parts = [take_shard(b, index, c, dim) for b, c in zip(blocks, coords, strict=True)]
    torch.testing.assert_close(sum(parts), x.gather(dim, index), rtol=0, atol=0)
    scattered = torch.cat([put_shard(grad, index, c, dim, 2) for c in coords], dim)
    whole = torch.zeros(8, 8, dtype=torch.float64).scatter_add_(dim, index, grad.double())
    torch.testing.assert_close(scattered, whole.to(dtype), rtol=1e-2 if dtype == torch.bfloat16 else 0, atol=1e-14)
    torch.library.opcheck(take_shard, (blocks[1], index, coords[1], dim))
    torch.library.opcheck(put_shard, (grad, index, coords[1], dim, 2))


def test_rows_outside_every_block_are_zero_and_infinite_gradients_stay_local():
    out = embedding_shard(torch.ones(2, 1), torch.tensor([-1, 9]), torch.tensor(0))
    assert (out == 0).all()
    grad = torch.full((2, 1), float("inf"))
    assert (embedding_shard_backward(grad, torch.tensor([2, 3]), torch.ones(2, 1), torch.tensor(0)) == 0).all()
