"""Parameters are the same bits on every mesh, and each rank makes its part alone."""

import pytest
import torch

import functitan as ft
from functitan import tree
from functitan.errors import ShardingError, TreeError
from functitan.nn import init

DECLARED = {
    "norm": ft.Param((16,), ("embed",), init=init.ones()),
    "table": ft.Param((8, 16), ("vocab", "embed"), init=init.normal(1.0)),
    "layers": {
        "up": ft.Param(
            (3, 16, 24), ("layers", "embed", "mlp"), fan_in=1, init=init.depth_scaled(init.fan_in_scaled(1))
        ),
        "down": ft.Param((3, 24, 16), ("layers", "mlp", "embed"), dtype=torch.bfloat16),
    },
}
KEY = ft.random.key(7)
NAMES = dict(embed=None, layers=None)
RULES = {
    "dim 0": ft.Rules(**NAMES, vocab="tensor", mlp=None, storage=dict(vocab="fsdp")),
    "dim 1": ft.Rules(**NAMES, vocab=None, mlp=None, storage=dict(embed=("fsdp", "tensor"))),
    "both": ft.Rules(**NAMES, vocab="tensor", mlp="tensor", storage=dict(embed="fsdp")),
}


def whole(x):
    return x.full() if isinstance(x, ft.Array) else x


@pytest.mark.parametrize("rules", RULES.values(), ids=list(RULES))
@pytest.mark.parametrize("sizes", [(1, 1), (2, 1), (1, 4), (2, 2), (4, 2)], ids=str)
def test_same_bits_on_every_mesh(rules, sizes):
    mesh = ft.make_mesh(dict(zip(("fsdp", "tensor"), sizes, strict=True)), simulate=True)
    made = ft.init(KEY, DECLARED, mesh, rules)
    plain = ft.init(KEY, DECLARED)
    tree.check_same_structure(made, plain)
    for path, a, b in zip(tree.paths(plain), tree.leaves(made), tree.leaves(plain), strict=True):
        assert whole(a).dtype == b.dtype and torch.equal(whole(a), b), path


def test_born_in_storage_layout():
    mesh = ft.make_mesh({"fsdp": 2, "tensor": 2}, simulate=True)
    made = ft.init(KEY, DECLARED, mesh, RULES["both"])
    assert made["layers"]["up"].spec == ft.P(None, "fsdp", "tensor")
    assert made["layers"]["up"].layout.storage == {"fsdp"}
    assert made["layers"]["up"].shards[0].shape == (3, 8, 12)
    # No rank makes a whole parameter, and none is sent.
    assert made["table"].shards[3].untyped_storage().nbytes() == 4 * 4 * 8


def test_abstract_parameters_have_the_same_layouts():
    sizes = {"fsdp": 2, "tensor": 2}
    real = ft.init(KEY, DECLARED, ft.make_mesh(sizes, simulate=True), RULES["both"])
    abstract = ft.abstract_init(DECLARED, ft.abstract_mesh(sizes), RULES["both"])
    for a, b in zip(tree.leaves(real), tree.leaves(abstract), strict=True):
        assert (a.shape, a.dtype, a.layout) == (b.shape, b.dtype, b.layout)


def test_errors():
    mesh = ft.make_mesh({"fsdp": 3, "tensor": 1}, simulate=True)
    with pytest.raises(ShardingError, match=r"init on a mesh needs rules=ft.Rules"):
        ft.init(KEY, DECLARED, mesh)
    with pytest.raises(ShardingError, match=r"(?s)4 problems.*layers/down.*norm.*table"):
        ft.init(KEY, DECLARED, mesh, RULES["both"])
    with pytest.raises(TreeError, match="w is a float; declare it as a Param"):
        ft.init(KEY, {"w": 1.0}, ft.make_mesh({"fsdp": 2, "tensor": 1}, simulate=True), RULES["both"])
