"""Each leaf is stepped by exactly one rule, chosen by its path."""

import re

import pytest
import torch

import functitan as ft
from functitan import optim, tree
from functitan.errors import ArgumentError

LABELS = [(re.compile(r"layers/w\w"), "sgd"), ("*norm*", "none"), ("*", "adamw")]


def _params():
    return {
        "embed": torch.ones(4, 2),
        "layers": {"wq": torch.ones(2, 2, 2), "norm": torch.ones(2, 2)},
        "norms": [torch.ones(2)],
    }


def _times(factor):
    return optim.GradientTransformation(lambda p: (), lambda g, s, p: (tree.map(lambda x: factor * x, g), s))


def test_every_leaf_has_one_rule_and_the_table_says_which():
    params = _params()
    found = optim.label_tree(params, LABELS)
    assert found == {"embed": "adamw", "layers": {"wq": "sgd", "norm": "none"}, "norms": ["none"]}
    groups = optim.masks(params, LABELS)
    assert all(sum(rows) == 1 for rows in zip(*(tree.leaves(m) for m in groups.values()), strict=True))
    assert optim.table(params, LABELS).splitlines()[1:] == [
        "embed        4x2    adamw",
        "layers/norm  2x2    none",
        "layers/wq    2x2x2  sgd",
        "norms/0      2      none",
    ]


def test_partition_equals_each_rule_on_its_own_leaves():
    params, grads = _params(), tree.map(lambda p: 0.5 * p, _params())
    rule = optim.partition({"sgd": _times(3), "none": _times(0), "adamw": optim.adamw(0.1)}, LABELS)
    state = rule.init(params)
    updates, new = rule.update(grads, state, params)
    assert updates["layers"]["wq"].unique().tolist() == [1.5] and not updates["norms"][0].any()
    alone = optim.adamw(0.1)
    own = {"embed": params["embed"]}
    expected, _ = alone.update({"embed": grads["embed"]}, alone.init(own), own)
    assert torch.equal(updates["embed"], expected["embed"])
    assert tree.structure(new) == tree.structure(state)
    assert tree.paths(state.groups["adamw"].mu) == ["embed"]
    again, _ = rule.update(grads, state, params)
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(updates), tree.leaves(again), strict=True))


def test_partition_compiles_with_the_state_that_it_starts_with():
    mesh = ft.make_mesh({"fsdp": 2}, simulate=True)
    rule = optim.partition({"sgd": _times(3), "none": _times(0), "adamw": optim.adamw(0.1)}, LABELS)
    params = _params()
    state = ft.compile(rule.init, mesh=mesh)(params)
    assert tree.structure(state) == tree.structure(rule.init(params))
    _, new = ft.compile(rule.update, mesh=mesh)(params, state, params)
    assert tree.structure(new) == tree.structure(state)


def test_all_problems_of_labels_come_in_one_message():
    with pytest.raises(ArgumentError) as error:
        optim.label_tree(_params(), [("layers/wk", "sgd"), ("layers/*", "adamw"), ("layers/norm", "none")])
    text = str(error.value)
    for expected in (
        "4 problems in the labels",
        "leaf embed matches no pattern",
        "leaf norms/0 matches no pattern",
        'pattern "layers/wk" for "sgd" matches no leaf. Did you mean "layers/wq"?',
        'pattern "layers/norm" for "none" gives no leaf its label: earlier patterns match layers/norm first',
    ):
        assert expected in text


def test_labels_and_rules_must_name_each_other():
    with pytest.raises(ArgumentError, match=r'(?s)"adam".*Did you mean "adamw".*no pattern gives the label "adamw"'):
        optim.partition({"adamw": optim.adamw(0.1)}, [("*", "adam")])


def test_masked_leaves_pass_through():
    params = _params()
    rule = optim.masked(_times(2), lambda path: "norm" not in path)
    updates, _ = rule.update(params, rule.init(params), params)
    assert updates["embed"].unique().tolist() == [2] and updates["norms"][0].tolist() == [1, 1]
