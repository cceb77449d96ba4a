"""Report B45 for sizes that no axis divides: padded by declaration, with the values and the training of no padding."""

from __future__ import annotations

import pytest
import torch

import functitan as ft
from functitan import optim, tree
from functitan.checkpoint import load_params, save_params
from functitan.errors import ShardingError
from functitan.nn.padding import unpadded
from tests.cases.toy import assert_close, mesh_of, whole

VOCAB, PADDED, D = 33, 36, 8
RULES = ft.Rules(batch="data", vocab="tensor", embed=None)
WEIGHT = ft.nn.init.truncated_normal(0.5)


def declare(pad):
    """An embedding and a head, padded to 36 rows and columns, or not at all."""
    size, rows, cols = (PADDED, (PADDED - VOCAB, 0), (0, PADDED - VOCAB)) if pad else (VOCAB, None, None)
    return {
        "emb": ft.Param((size, D), ("vocab", "embed"), init=WEIGHT, dtype=torch.float64, pad=rows),
        "head": ft.Param((D, size), ("embed", "vocab"), init=WEIGHT, dtype=torch.float64, pad=cols),
    }


def loss(p, batch):
    h = ft.constrain(ft.nn.embedding(batch["tokens"], p["emb"]), ("batch", None, "embed"))
    logits = torch.tanh(h) @ p["head"]
    real = torch.arange(logits.shape[-1]) < VOCAB  # what keeps padding out of the loss
    total, count = ft.nn.cross_entropy(torch.where(real, logits, -torch.inf), batch["labels"])
    return total / count


RULE = optim.chain(optim.clip_by_global_norm(0.1), optim.adamw(1e-2, weight_decay=0.1))


def step(p, state, batch):
    value, g = ft.value_and_grad(loss)(p, batch)
    updates, state = RULE.update(g, state, p)
    return optim.apply_updates(p, updates), state, value


def batch():
    tokens = ft.random.randint(ft.random.key(1), (4, 6), 0, VOCAB)
    return {"tokens": tokens, "labels": tokens.roll(-1, 1)}


@pytest.mark.parametrize("ranks", [2, 4])
def test_b45_padded_parameters_begin_and_train_as_unpadded_ones(ranks, tmp_path):
    mesh = mesh_of(tensor=ranks)
    plain = ft.init(ft.random.key(0), declare(pad=False))
    made = ft.init(ft.random.key(0), declare(pad=True), mesh, RULES)
    assert made["emb"].spec == ft.P("tensor", None) and made["head"].spec == ft.P(None, "tensor")
    for name, x in unpadded(declare(pad=True), whole(made)).items():
        assert torch.equal(x, plain[name])
    state = RULE.init(plain)
    compiled = ft.compile(step, mesh=mesh, rules=RULES)
    padded_state = ft.compile(RULE.init, mesh=mesh, rules=RULES)(made)
    for _ in range(3):
        plain, state, expected = step(plain, state, batch())
        made, padded_state, value = compiled(made, padded_state, batch())
        assert_close(value, expected)
        assert_close(padded_state[0].norm, state[0].norm, 1e-6)  # in float32: padding adds nothing
    whole_params = whole(made)
    assert_close(unpadded(declare(pad=True), whole_params), plain)
    assert not whole_params["emb"][VOCAB:].any() and not whole_params["head"][:, VOCAB:].any()

    save_params(tmp_path / "p", unpadded(declare(pad=True), whole_params))
    assert load_params(tmp_path / "p", declare(pad=False))["emb"].shape == (VOCAB, D)
    again = load_params(tmp_path / "p", declare(pad=True))
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(again), tree.leaves(whole_params), strict=True))


@pytest.mark.parametrize("pad", [(1,), (4, 0), (-1, 0)])
def test_padding_that_does_not_fit(pad):
    with pytest.raises(ShardingError, match=r"Param of shape \(4, 2\) has pad=.*give one count per dim, 0 for none"):
        ft.Param((4, 2), ("vocab", "embed"), pad=pad)
