"""Muon's two forms of momentum, and convolutions as matrices."""

import math

import pytest
import torch
from spmd_types.types import PartitionSpec as P

import functitan as ft
from functitan import optim, tree
from functitan.errors import ArgumentError
from tests.optim.stacked import mesh_of, normal, stepped


def _run(rule, params, grads):
    state = rule.init(params)
    for g in grads:
        params, state = stepped(rule)(g, state, params)
    return params, state


@pytest.mark.parametrize("nesterov", [True, False])
def test_the_sum_of_gradients_gives_the_steps_of_their_average(nesterov):
    """1 / (1 - beta) times the average, which orthogonalisation does not see."""
    params = {"w": normal((6, 10), 0).double()}
    grads = [{"w": normal((6, 10), i).double()} for i in range(1, 6)]
    settings = dict(momentum=0.9, nesterov=nesterov, ns_dtype=torch.float64)
    average, one = _run(optim.muon(0.1, **settings), params, grads)
    total, two = _run(optim.muon(0.1, momentum_form="sum", **settings), params, grads)
    assert (average["w"] - total["w"]).abs().max() <= 1e-12
    torch.testing.assert_close(two.mu["w"], one.mu["w"] / (1 - 0.9), rtol=1e-12, atol=0)
    by_hand = torch.zeros_like(params["w"])
    for g in grads:
        by_hand = 0.9 * by_hand + g["w"]
    torch.testing.assert_close(two.mu["w"], by_hand, rtol=1e-12, atol=0)


def test_the_forms_differ_when_beta_moves():
    params = {"w": normal((6, 10), 0).double()}
    found = []
    for form in ("ema", "sum"):
        rule = optim.muon(0.1, momentum_form=form, ns_dtype=torch.float64)
        state = rule.init(params)
        for i, beta in enumerate((0.5, 0.95, 0.95)):
            state = state.replace(momentum=torch.full_like(state.momentum, beta))
            updates, state = rule.update({"w": normal((6, 10), 5 + i).double()}, state, params)
        found.append(updates["w"])
    assert (found[0] - found[1]).abs().max() > 1e-3


def test_forms_that_do_not_exist_or_fit():
    with pytest.raises(ArgumentError, match=r'momentum_form="summ": there are "ema" and "sum". Did you mean "sum"'):
        optim.muon(0.1, momentum_form="summ")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r'as_torch=True with momentum_form="sum"'):
        optim.muon(0.1, momentum_form="sum", as_torch=True)


@pytest.mark.parametrize("kernel", [(3,), (3, 2), (2, 1, 2)])
@pytest.mark.parametrize("lead", [(), (2,)])
def test_a_convolution_is_torch_muon_on_its_flattened_weight_bit_for_bit(kernel, lead):
    """(out, in * kernel), with that shape in the scale too."""
    outs, ins = 12, 4
    params = {"stem/conv": normal((*lead, outs, ins, *kernel), 0)}
    grads = [{"stem/conv": normal((*lead, outs, ins, *kernel), i)} for i in range(1, 5)]
    rule = optim.muon(0.02, weight_decay=0.5, convs={"*conv": len(kernel)}, as_torch=True)
    mine, _ = _run(rule, params, grads)
    flat = lambda x: x["stem/conv"].reshape(-1, outs, ins * math.prod(kernel))  # noqa: E731
    for i, weight in enumerate(flat(params)):
        theirs = weight.clone().requires_grad_()
        reference = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.5)
        for g in grads:
            theirs.grad = flat(g)[i].clone()
            reference.step()
        assert torch.equal(flat(mine)[i], theirs.detach())


@pytest.mark.parametrize(
    "scale,factor", [("original", math.sqrt(2)), ("match_rms", 0.2 * 4), ("unclamped", math.sqrt(2))]
)
def test_the_scale_of_a_convolution_reads_the_flattened_shape(scale, factor):
    """16 outputs of 2 x 2 x 2 = 8 inputs: A / B is 2, and max is 16."""
    params = {"conv": normal((16, 2, 2, 2), 0).double()}
    rule = optim.muon(
        1.0, scale=scale, convs={"conv": 2}, momentum=0.0, nesterov=False, weight_decay=0.0, ns_dtype=torch.float64
    )
    updates, _ = rule.update(params, rule.init(params), params)
    plain = optim.newton_schulz(params["conv"].reshape(16, 8), dtype=torch.float64).reshape(16, 2, 2, 2)
    torch.testing.assert_close(updates["conv"], -factor * plain, rtol=1e-12, atol=1e-14)


def test_how_many_leaves_share_a_shape_does_not_matter():
    """Report B27: three weights of one shape, or stacked, are orthogonalised one by one."""
    single = {"a": normal((4, 3, 2), 0)}
    rule = optim.muon(0.02, convs={"*": 1}, as_torch=True)
    alone, _ = _run(rule, single, [single])
    three = {name: single["a"] for name in "abc"}
    together, _ = _run(rule, three, [three])
    stack = {"a": torch.stack([single["a"]] * 3)}
    stacked, _ = _run(rule, stack, [stack])
    for i, name in enumerate("abc"):
        assert torch.equal(together[name], alone["a"]) and torch.equal(stacked["a"][i], alone["a"])


@pytest.mark.parametrize("layout,spec,kinds", [
    ("stacked", P(None, "fsdp", None, None, None), {"all_to_all"}),
    ("gathered", P(None, "fsdp", None, None, None), {"all_gather"}),
    (None, P("fsdp", None, None, None, None), set()),
])  # fmt: skip
def test_convolutions_on_a_mesh_have_the_bits_of_one_device(layout, spec, kinds):
    mesh = mesh_of(fsdp=2)
    params, grads = ({"conv": normal((4, 8, 3, 2, 2), i)} for i in range(2))
    axes = ("fsdp",) if layout == "stacked" else ()
    rule = optim.muon(0.02, convs={"conv": 2}, layout=layout, axes=axes)
    put = lambda values: {k: ft.device_put(x, spec, mesh) for k, x in values.items()}  # noqa: E731
    state = ft.compile(rule.init, mesh=mesh)(put(params))
    step = ft.compile(stepped(rule), mesh=mesh)
    args = (put(grads), state, put(params))
    assert {c.kind for c in step.lower(*args).collectives()} == kinds
    found = tree.map(lambda x: x.full() if isinstance(x, ft.Array) else x, step(*args))
    expected = stepped(rule)(grads, rule.init(params), params)
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(found), tree.leaves(expected), strict=True))


def test_convolutions_that_cannot_be_matrices_are_named():
    rule = optim.muon(0.1, convs={"conv": 2, "gone": 2}, blocks={"conv": optim.Blocks(-1, 2)})
    with pytest.raises(ArgumentError) as error:
        rule.init({"conv": torch.ones(4, 3, 2, 2)})
    assert "declared in both blocks and convs" in str(error.value) and 'convs for "gone" match no leaf' in str(
        error.value
    )
    with pytest.raises(ArgumentError, match=r"takes matrices \(\.\.\., out, in, k, k\)"):
        optim.muon(0.1, convs={"conv": 2}).init({"conv": torch.ones(4, 3, 2)})
    with pytest.raises(ArgumentError, match=r'convs\["conv"\]=0: write how many kernel dims'):
        optim.muon(0.1, convs={"conv": 0})
