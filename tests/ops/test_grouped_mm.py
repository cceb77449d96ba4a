"""Grouped matmul against one matmul per row, with empty groups and an unused tail."""

import pytest
import torch

from functitan.errors import ArgumentError
from functitan.ops.grouped_mm import grouped_mm
from tests.ops.graphs import ours, traced_ops

T, E, D, F = 9, 4, 3, 5
OFFSETS = {"tail": [2, 2, 5, 7], "full": [0, 4, 4, 9], "one": [0, 0, 0, 9], "none": [0, 0, 0, 0]}


def operands(dtype=torch.float64):
    g = torch.Generator().manual_seed(0)
    shapes = ((T, D), (E, D, F))
    return [torch.randn(s, generator=g, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def by_row(x, w, offsets):
    group = torch.searchsorted(offsets, torch.arange(T), right=True)
    y = torch.einsum("td,tdf->tf", x, w[group.clamp(max=E - 1)])
    return y * (group < E)[:, None]


@pytest.mark.parametrize("ends", OFFSETS.values(), ids=OFFSETS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("strided", [False, True])
def test_matches_one_matmul_per_row(ends, dtype, strided):
    x, w = operands(dtype)
    if strided:
        w = w.detach().mT.contiguous().mT.requires_grad_()
    offsets = torch.tensor(ends, dtype=torch.int32)
    ours_, expected = grouped_mm(x, w, offsets), by_row(x.double(), w.double(), offsets)
    eps = 4 * torch.finfo(dtype).eps
    assert ours_.dtype == dtype and ours_.is_contiguous()
    torch.testing.assert_close(ours_.double(), expected, rtol=eps, atol=4 * eps)
    grad = torch.randn(T, F, generator=torch.Generator().manual_seed(1)).to(dtype)
    for a, b in zip(
        torch.autograd.grad(ours_, (x, w), grad),
        torch.autograd.grad(expected, (x, w), grad.double()),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=eps, atol=4 * eps)


def test_gradients_of_both_orders():
    offsets = torch.tensor(OFFSETS["tail"])
    assert torch.autograd.gradcheck(grouped_mm, (*operands(), offsets))
    assert torch.autograd.gradgradcheck(grouped_mm, (*operands(), offsets))


def test_trace_and_registration():
    x, w = operands(torch.float32)
    offsets = torch.tensor(OFFSETS["tail"])
    ops = traced_ops(grouped_mm, [x, w, offsets], [0, 1])
    assert sorted(ours(ops)) == ["functitan.grouped_mm.default"] * 2 + ["functitan.grouped_mm_dw.default"]
    assert ours(traced_ops(grouped_mm, [x, w, offsets], [0])) == ["functitan.grouped_mm.default"] * 2
    torch.library.opcheck(torch.ops.functitan.grouped_mm.default, (x, w, offsets))
    dy = torch.randn(T, F, requires_grad=True)
    torch.library.opcheck(torch.ops.functitan.grouped_mm_dw.default, (x, dy, offsets))


def test_errors():
    x, w = operands()
    offsets = torch.tensor(OFFSETS["full"])
    for call, message in (
        (lambda: grouped_mm(x[:, 1:], w, offsets), "agree in D"),
        (lambda: grouped_mm(x.float(), w, offsets), "one floating dtype"),
        (lambda: grouped_mm(x, w, offsets[1:]), "one offset per group"),
        (lambda: grouped_mm(x, w, offsets.double()), "needs integers for the offsets"),
        (lambda: grouped_mm(x, w, offsets + 1), "group 3 runs from 5 to 10"),
        (lambda: grouped_mm(x, w, offsets.flip(0)), "group 1 runs from 9 to 4"),
    ):
        with pytest.raises(ArgumentError, match=message):
            call()
