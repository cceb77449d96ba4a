"""Faults that others reported in how losses are averaged and sharded."""

from __future__ import annotations

import pytest
import torch

import functitan as ft
from functitan.nn.loss import cross_entropy
from functitan.train.evaluate import mean_loss as evaluate_loss
from tests.cases.toy import CONFIG, RULES, assert_close, mean_loss, mesh_of, on, params, rows, uneven_batch

MESHES = [{"data": 2}, {"fsdp": 2}, {"data": 2, "tensor": 2}]


@pytest.mark.parametrize("axes", MESHES, ids="x".join)
def test_b01_a_token_weighs_the_same_wherever_its_sample_lies(axes):
    """Each rank averaged over its own valid labels, and ranks were averaged: the lone label of a rank weighed as
    much as eight of another. Loss and gradients are those of the joined batch, whoever holds which sample."""
    mesh, step = mesh_of(**axes), ft.value_and_grad(mean_loss)
    oracle = step(params(), uneven_batch())
    compiled = ft.compile(step, mesh=mesh, rules=RULES)
    for swap in (False, True):
        assert_close(compiled(on(mesh, params()), rows(mesh, uneven_batch(swap))), oracle)


@pytest.mark.parametrize("axes", [{}, {"data": 2}], ids=["one", "data"])
def test_b02_validation_is_a_total_by_a_total(axes):
    """A mean of per-batch means let a nearly empty batch weigh as much as a full one. The loss on 10 valid tokens is
    one number for every batch size and every number of ranks."""
    losses = torch.arange(1.0, 33).reshape(8, 4)
    valid = torch.zeros(8, 4, dtype=torch.bool)
    valid[0, 0] = True  # one valid token in the first rows,
    valid[5:8, :3] = True  # and nine in the last ones
    expected = losses[valid].mean().item()
    mesh = mesh_of(**axes)

    def evaluate(_, batch):
        return torch.where(batch["valid"], batch["losses"], 0.0).sum(), batch["valid"].sum()

    compiled = ft.compile(evaluate, mesh=mesh, rules=RULES)
    for size in (2, 4, 8):
        batches = [
            rows(mesh, {"losses": losses[i : i + size], "valid": valid[i : i + size]}) for i in range(0, 8, size)
        ]
        assert evaluate_loss(compiled, {}, batches) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("vocab", ["vocab", None], ids=["sharded", "whole"])
def test_b03_the_loss_knows_how_logits_lie(vocab):
    """A vocabulary-parallel loss ran on logits that every rank held whole: too large by log of the ranks. The same
    call gives the same loss and gradients for split and for whole logits."""
    mesh = mesh_of(tensor=2)

    def loss(head, x, labels):
        logits = ft.constrain(ft.constrain(x, (None, None, None)) @ head, (None, None, vocab))
        total, count = cross_entropy(logits, labels)
        return total / count

    labels = uneven_batch()["labels"]
    x = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    head = params()["head"]
    step = ft.value_and_grad(loss, argnums=(0, 1))
    compiled = ft.compile(step, mesh=mesh, rules=RULES)
    assert_close(compiled(on(mesh, params())["head"], x, labels), step(head, x, labels))
    assert CONFIG.vocab == head.shape[1]
