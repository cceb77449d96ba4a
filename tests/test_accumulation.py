"""Gradients summed over microbatches, on plain tensors: the same as those of one big batch."""

import pytest
import torch

import functitan as ft
from functitan import tree
from functitan.errors import TreeError


def loss(params, batch):
    """A sum over labels that count, and their number, as a language model's loss is."""
    scores = torch.tanh(batch["x"] @ params["w"]) + params["b"]
    counts = batch["labels"] >= 0
    picked = scores.gather(-1, batch["labels"].clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return torch.where(counts, picked.square(), 0.0).sum(), counts.sum()


def arguments(dtype=torch.float64):
    g = torch.Generator().manual_seed(0)
    params = {"w": torch.randn(3, 4, generator=g, dtype=dtype), "b": torch.randn(4, generator=g, dtype=dtype)}
    labels = torch.randint(0, 4, (8, 5), generator=g)
    # From no label to all of them: a mean of means would show, and some microbatches are empty.
    kept = torch.arange(5) < torch.tensor([0, 5, 0, 4, 0, 3, 0, 1])[:, None]
    batch = {"x": torch.randn(8, 5, 3, generator=g, dtype=dtype), "labels": torch.where(kept, labels, -100)}
    return params, batch


@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_equal_to_one_big_batch(n):
    params, batch = arguments()
    (want, count), gradient = ft.value_and_grad(loss, has_aux=True)(params, batch)
    (total, labels), found = ft.accumulate_grads(loss, n)(params, batch)
    assert int(labels) == int(count) == 13
    torch.testing.assert_close(total, want, rtol=1e-12, atol=0)
    for a, b in zip(tree.leaves(found), tree.leaves(gradient), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_the_largest_of_a_third_result_is_kept(n):
    params, batch = arguments()

    def measured(params, batch):
        return *loss(params, batch), {"x": batch["x"].amax((0, 1))}

    (total, count, largest), gradient = ft.accumulate_grads(measured, n)(params, batch)
    (want, labels), same = ft.accumulate_grads(loss, n)(params, batch)
    assert torch.equal(total, want) and torch.equal(count, labels)
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(gradient), tree.leaves(same), strict=True))
    assert torch.equal(largest["x"], batch["x"].amax((0, 1)))


def test_every_row_is_in_one_microbatch():
    seen = []

    def rows(params, batch):
        seen.append(batch["id"].tolist())
        return (params * batch["id"]).sum(), torch.tensor(len(batch["id"]))

    # The types of the results are found on fakes, which have no values.
    ft.accumulate_grads(lambda p, b: rows(p, b) if not is_fake(b) else fake_result(p), 3)(
        torch.tensor(1.0), {"id": torch.arange(6)}
    )
    assert seen == [[0, 3], [1, 4], [2, 5]]


def is_fake(batch):
    return type(batch["id"]).__name__ == "FakeTensor"


def fake_result(params):
    return params * 1.0, torch.tensor(1)


def test_bfloat16_gradients_are_added_up_in_float32():
    """256 + 1 eight times is 264; in bfloat16 each 1 would be lost."""
    w = torch.zeros((), dtype=torch.bfloat16)
    batch = {"x": torch.tensor([256.0] + [1.0] * 8, dtype=torch.bfloat16)}
    _, gradient = ft.accumulate_grads(lambda w, b: ((w * b["x"]).sum(), torch.tensor(1)), 9)(w, batch)
    assert gradient.dtype == torch.bfloat16 and float(gradient) == 264.0


def test_a_count_of_weights():
    """A count may be a float: the sum of the weights of tokens."""
    batch = {"x": torch.arange(4.0), "weight": torch.tensor([1.0, 0.5, 0.25, 0.0])}

    def weighted(w, batch):
        return (w * batch["x"] * batch["weight"]).sum(), batch["weight"].sum()

    (total, count), _ = ft.accumulate_grads(weighted, 2)(torch.tensor(2.0), batch)
    assert float(count) == 1.75 and float(total) == 2.0


def test_rows_that_do_not_divide_are_named():
    with pytest.raises(TreeError, match=r"into 3 microbatches .*x: \(8, 5, 3\)\. .*multiple of 3"):
        ft.accumulate_grads(loss, 3)(*arguments())
    with pytest.raises(TreeError, match="microbatches=0"):
        ft.accumulate_grads(loss, 0)
