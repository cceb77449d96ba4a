"""Costs by first principles: operations and seconds from formulas."""

import dataclasses

import pytest

import functitan as ft
from functitan.compiler.cost import collective_seconds, together
from functitan.compiler.hardware import CHIPS, chip
from functitan.errors import ConfigError
from functitan.optim.newton_schulz import newton_schulz_flops
from functitan.recipes import load_recipe
from functitan.train.abstract import lower_step
from tests.compiler.mlp import B, D, F, L, S, lowered
from tests.optim.owned import lowered as lowered_update
from tests.optim.owned import owned, trees
from tests.optim.stacked import mesh_of

H100 = CHIPS["h100"]


@pytest.mark.parametrize("remat,products", [(None, 6), (ft.dots_saveable, 6), (ft.nothing_saveable, 7)], ids=str)
@pytest.mark.parametrize("axes", [{}, dict(fsdp=4), dict(tensor=2), dict(data=2, fsdp=2, tensor=2)], ids=str)
def test_operations_of_matrix_products(axes, remat, products):
    """Two products forward, four backward; what is not saved is computed again, but for the last product."""
    program = lowered(**axes, remat=remat)
    assert program.cost("h100").flops == products * 2 * B * S * D * F * L // program.mesh.size


def test_operations_of_a_llama():
    """Six per weight and token, and attention: two products forward, five backward, with the logits again."""
    recipe = load_recipe("llama3-debug").replace(mesh={"fsdp": 2, "tensor": 2})
    model, tokens = recipe.model, recipe.data.batch * recipe.data.seq
    matrices = model.layers * (4 * model.dim * model.dim + 3 * model.dim * model.mlp_dim) + model.dim * model.vocab
    attention = 14 * model.layers * model.heads * model.head_dim * recipe.data.seq
    found = lower_step(recipe.textless_task()).cost("h100").flops
    assert found == tokens * (6 * matrices + attention) // 4


def test_axes_within_a_node():
    mesh = ft.abstract_mesh({"data": 4, "fsdp": 4, "tensor": 4})
    assert [together(mesh, (a,), 8) for a in mesh.names] == [1, 2, 4]
    assert together(mesh, ("fsdp", "tensor"), 8) == 8
    assert together(ft.abstract_mesh({"fsdp": 8}), ("fsdp",), 8) == 8
    assert together(ft.abstract_mesh({"data": 2, "fsdp": 16}), ("data",), 8) == 1


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce"])
def test_seconds_of_gathers_and_reductions(kind):
    mesh = ft.abstract_mesh({"data": 2, "fsdp": 16, "tensor": 2})
    assert collective_seconds(kind, ("tensor",), 900, mesh, H100) == 900 / H100.fast
    # Sixteen ranks, four to a node: 12 of 15 parts come from other nodes, over four ports.
    assert collective_seconds(kind, ("fsdp",), 900, mesh, H100) == pytest.approx(900 * 12 / 15 / 4 / H100.slow)
    # No two ranks in one node.
    assert collective_seconds(kind, ("data",), 900, mesh, H100) == 900 / H100.slow


def test_seconds_of_an_exchange():
    mesh = ft.abstract_mesh({"expert": 16})
    assert collective_seconds("all_to_all", ("expert",), 900, mesh, H100) == pytest.approx(900 * 8 / 15 / H100.slow)


def test_times_add_up():
    cost = lowered(data=2, fsdp=2, tensor=2).cost("h100")
    assert cost.serial == pytest.approx(cost.compute + cost.parameters + cost.activations)
    assert cost.ahead == 0 and cost.overlapped == pytest.approx(cost.serial)  # as lowered, it waits for each
    assert cost.sent == lowered(data=2, fsdp=2, tensor=2).collectives().total
    assert sum(p.flops for p in cost.parts.values()) == cost.flops
    assert cost.parameters > 0 and cost.activations > 0


def test_what_is_started_ahead_runs_beside_compute():
    mesh = ft.abstract_mesh({"data": 1, "fsdp": 4, "tensor": 1})
    program = lowered(fsdp=4, passes=dataclasses.replace(ft.Passes.off(), prefetch=1))
    cost = program.cost("h100")
    layers = program.collectives().of(axes=("fsdp",))
    seconds = [
        c.count * collective_seconds(c.kind, c.axes, c.nbytes, mesh, H100) for c in layers if "params/" in c.param
    ]
    assert cost.ahead == pytest.approx(sum(seconds)) and 0 < cost.ahead < cost.communication
    assert cost.overlapped == pytest.approx(max(cost.compute, cost.ahead) + cost.communication - cost.ahead)


@pytest.mark.parametrize("buckets", [1, 2, 4])
def test_exchanges_run_beside_the_matrices_that_are_worked_on(buckets):
    """Muon's owned layout, a matrix a rank and bucket: e seconds an exchange there or back, c seconds a matrix.

    Slow links: beside every matrix another exchange is under way, unless there is one bucket alone. Slow products: every
    exchange is covered but the first one there and the last one back.
    """
    rule, values = owned(bucket_bytes=24 * 24 * 2), trees(2, {"w": (4 * buckets, 24, 24)})
    program = lowered_update(rule, mesh_of(fsdp=4), {"w": ft.P(None, "fsdp", None)}, values)
    sent = program.collectives()
    assert sent.runs == 2 * buckets
    exchange = {collective_seconds(c.kind, c.axes, c.nbytes, program.mesh, H100) for c in sent}
    (e,) = exchange
    c = newton_schulz_flops((24, 24), 5) / H100.rate("bfloat16")
    links = dataclasses.replace(H100, fast=H100.fast / 1e4, slow=H100.slow / 1e4)
    products = dataclasses.replace(H100, flops={k: v / 1e6 for k, v in H100.flops.items()})
    assert program.cost(links).ahead == pytest.approx(buckets * c if buckets > 1 else 0.0)
    found = program.cost(products)
    assert found.ahead == pytest.approx((2 * buckets - 2) * e)
    assert found.communication == found.parameters == pytest.approx(2 * buckets * e)
    assert found.overlapped == pytest.approx(found.compute + 2 * e)


def test_what_does_not_fit_is_said():
    program = lowered(fsdp=2)
    small = dataclasses.replace(H100, name="small", memory=1000.0)
    assert program.cost("h100").fits and "fits" in str(program.cost("h100"))
    assert not program.cost(small).fits and "DOES NOT FIT" in str(program.cost(small))


def test_every_chip_has_its_source():
    for name, c in CHIPS.items():
        assert (
            c.name == name and c.source and c.rate("float8_e4m3fn") == pytest.approx(2 * c.rate("bfloat16"), rel=1e-3)
        )
        assert c.fast > c.slow and c.rate("bfloat16") > c.rate("float32")


def test_unknown_chip():
    with pytest.raises(ConfigError, match=r'no chip "h10" in the table.*Did you mean "h100"'):
        chip("h10")
    with pytest.raises(ConfigError, match=r"cost needs a chip"):
        lowered(fsdp=2).cost()
