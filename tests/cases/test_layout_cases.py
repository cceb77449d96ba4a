"""Faults that others reported in strided collectives, dims that do not divide, and defaults of the command line."""

from __future__ import annotations

import pytest
import torch

import functitan as ft
from functitan.cli.settings import chosen_recipe
from functitan.errors import ShardingError
from functitan.recipes import load_recipe
from tests.cases.toy import assert_close, mesh_of

VIEWS = {
    "columns": lambda x: x[:, 2:6],
    "transpose": lambda x: x.T,
    "expanded": lambda x: x[:, :1].expand(-1, 8),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("to", [ft.P(None, None), ft.P(None, "data"), ft.P("data", None)], ids=str)
def test_b50_collectives_of_strided_values(view, to):
    """Collectives read strided operands as if they were contiguous, and dropped strided gradients. Every move of a
    view, and of its gradient, is as with a contiguous copy; values are all distinct, gradients too."""
    mesh = mesh_of(data=2)
    x = torch.arange(64.0, dtype=torch.float64).reshape(8, 8)

    def f(x):
        y = VIEWS[view](ft.constrain(x * 1.5, ft.P(None, None)))
        moved = ft.constrain(ft.constrain(y, ft.P("data", None)), to)
        return (moved * torch.arange(y.numel()).reshape(y.shape)).sum() + moved.sum(), moved

    step = ft.value_and_grad(f, has_aux=True)
    assert_close(ft.compile(step, mesh=mesh)(ft.device_put(x, ft.P("data", None), mesh)), step(x))


def test_b51_an_indivisible_dim_is_an_error():
    """A constraint that did not divide was silently replication. Parameter and intermediate are named, with dim and
    axis."""
    mesh, rules = mesh_of(tensor=2), ft.Rules(vocab="tensor", embed=None)
    with pytest.raises(ShardingError, match=r"^emb: dim 0 has size 17, which does not divide by tensor=2"):
        ft.init(ft.random.key(0), {"emb": ft.Param((17, 4), ("vocab", "embed"))}, mesh, rules)
    f = ft.compile(lambda x: ft.constrain(x @ torch.ones(4, 17), (None, "vocab")), mesh=mesh, rules=rules)
    with pytest.raises(ShardingError, match=r"^constrain of float32\[2, 17\] at .*: dim 1 has size 17, which does not"):
        f.lower(torch.ones(2, 4))


def test_b56_a_flag_that_is_not_given_leaves_the_recipe_alone(tmp_path):
    """The option object itself arrived as the default, and a default of False overrode the file. A recipe's own values
    stand where no flag is given."""
    file = tmp_path / "mine.py"
    file.write_text(
        "from functitan.recipes import load_recipe, override\n"
        "def own():\n"
        "    return override(load_recipe('llama3-debug'), ['simulate=true', 'mesh.fsdp=2', 'run.steps=7'])\n"
    )
    own = chosen_recipe(f"{file}:own")
    assert own == load_recipe(f"{file}:own")
    assert (own.simulate, dict(own.mesh), own.run.steps) == (True, {"fsdp": 2}, 7)
    assert chosen_recipe(f"{file}:own", simulate=False).simulate is False
