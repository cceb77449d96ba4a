"""Remat policies are plain values; on plain tensors remat changes nothing."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from functitan import random
from functitan import remat_policies as policies
from functitan.annotations import activate, checkpoint_name
from functitan.autodiff import value_and_grad
from functitan.errors import ArgumentError

torch.set_num_threads(1)

POLICIES = [
    policies.nothing_saveable,
    policies.everything_saveable,
    policies.dots_saveable,
    policies.save_only_these_names("attn_out", "ffn_in"),
]


def test_policies_are_values():
    assert len(set(POLICIES)) == 4
    for policy in POLICIES:
        assert pickle.loads(pickle.dumps(policy)) == policy == copy.deepcopy(policy)
    assert [str(p) for p in POLICIES] == [
        "nothing_saveable",
        "everything_saveable",
        "dots_saveable",
        "save_only_these_names(attn_out, ffn_in)",
    ]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_values_and_gradients_are_those_of_the_function(policy):
    key = random.key(1)

    def block(w, x):
        hidden = checkpoint_name(torch.nn.functional.silu(x @ w), "ffn_in")
        return hidden * random.bernoulli(key, 0.5, (4, 5)) / 0.5

    w, x = random.normal(key, (3, 5)), random.normal(random.fold_in(key, 1), (4, 3))
    plain = value_and_grad(lambda w: block(w, x).pow(2).sum())(w)
    kept = value_and_grad(lambda w: policies.remat(block, policy)(w, x).pow(2).sum())(w)
    assert all(torch.equal(a, b) for a, b in zip(plain, kept, strict=True))


def test_a_tracer_gets_the_policy():
    got = {}

    class Annotator:
        def region(self, f, args, options):
            got.update(options)
            return f(*args)

    with activate(Annotator()):
        policies.remat(torch.sin, policies.dots_saveable, name="wave")(torch.zeros(1))
    assert got == {"name": "wave", "remat": policies.dots_saveable}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: policies.remat(torch.sin, "dots_savable"),
            'found .dots_savable.. Did you mean "dots_saveable"',
        ),
        (
            lambda: policies.remat(torch.sin, policies.save_only_these_names),
            'Did you mean "save_only_these_names"',
        ),
        (lambda: policies.save_only_these_names(), "one or more strings; found no names"),
        (lambda: policies.save_only_these_names(["a"]), r"found \['a'\]"),
    ],
)
def test_errors_say_what_to_write(call, message):
    with pytest.raises(ArgumentError, match=message):
        call()
