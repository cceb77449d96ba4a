"""Muon against torch.optim.Muon bit for bit, its scales, blocks and batches."""

import math

import pytest
import torch

from functitan import optim, tree
from functitan.errors import ArgumentError
from functitan.optim import Blocks
from functitan.optim.orthogonalize import SCALES


def _random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _steps(rule, params, grads):
    """Parameters and state after a step per tree of gradients."""
    state = rule.init(params)
    for g in grads:
        updates, state = rule.update(g, state, params)
        params = optim.apply_updates(params, updates)
    return params, state


def _grads(params, n):
    return [tree.map(lambda p, i=i: _random(*p.shape, seed=p.numel() + i), params) for i in range(n)]


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("scale,theirs", [("original", "original"), ("match_rms", "match_rms_adamw")])
def test_ten_steps_are_torch_muon_bit_for_bit(scale, theirs, nesterov):
    """Our leaves are (in, out), torch's (out, in); wide, tall and square."""
    params = {"tall": _random(48, 32), "wide": _random(24, 40), "square": _random(32, 32)}
    settings = dict(lr=0.02, momentum=0.95, weight_decay=0.5, nesterov=nesterov)
    grads = _grads(params, 10)
    mine, state = _steps(optim.muon(**settings, scale=scale, as_torch=True), params, grads)
    near, _ = _steps(optim.muon(**settings, scale=scale), params, grads)
    other = {k: p.T.contiguous().requires_grad_() for k, p in params.items()}
    reference = torch.optim.Muon(other.values(), **settings, adjust_lr_fn=theirs)
    for g in grads:
        for k, p in other.items():
            p.grad = g[k].T.contiguous()
        reference.step()
    for k, p in other.items():
        assert torch.equal(mine[k], p.detach().T), k
        assert torch.equal(state.mu[k], reference.state[p]["momentum_buffer"].T), k
        torch.testing.assert_close(near[k], p.detach().T, rtol=0, atol=2e-6)
    assert int(state.step) == 10


def test_bfloat16_without_nesterov_does_not_write_into_the_momentum():
    """torch 2.13's own update normalises a bfloat16 momentum in place."""
    params = {"w": torch.ones(2, 2, dtype=torch.bfloat16)}
    rule = optim.muon(0.1, nesterov=False)
    state = rule.init(params).replace(mu={"w": torch.zeros(2, 2, dtype=torch.bfloat16)})
    _, new = rule.update({"w": torch.full((2, 2), 2.0, dtype=torch.bfloat16)}, state, params)
    assert new.mu["w"].float().unique().tolist() == pytest.approx([0.1], rel=4e-3)


@pytest.mark.parametrize(
    "scale,outs_twice_ins,ins_twice_outs",
    [
        ("original", math.sqrt(2), 1.0),
        ("match_rms", 0.2 * math.sqrt(16), 0.2 * math.sqrt(16)),
        ("unclamped", math.sqrt(2), math.sqrt(0.5)),
    ],
)
def test_scales_read_in_and_out_the_right_way_round(scale, outs_twice_ins, ins_twice_outs):
    params = {"up": _random(8, 16), "down": _random(16, 8)}
    rule = optim.muon(1.0, weight_decay=0.0, scale=scale, ns_dtype=torch.float32, momentum=0.0, nesterov=False)
    updates, _ = rule.update(params, rule.init(params), params)
    for name, factor in (("up", outs_twice_ins), ("down", ins_twice_outs)):
        plain = optim.newton_schulz(params[name], dtype=torch.float32)
        torch.testing.assert_close(updates[name], -factor * plain, rtol=1e-5, atol=1e-6)


def test_scales_of_a_real_matrix():
    """2048 inputs and 11264 outputs, and the other way round."""
    c = lambda name, *shape: SCALES[name](*shape)  # noqa: E731
    assert c("original", 11264, 2048) == pytest.approx(2.3452, abs=5e-5)
    assert c("match_rms", 11264, 2048) == pytest.approx(21.226, abs=5e-4) == c("match_rms", 2048, 11264)
    assert c("original", 2048, 11264) == 1.0


def test_decay_uses_the_base_rate():
    """Not the rate times c: c is 4 here."""
    params = {"w": torch.ones(2, 32)}
    rule = optim.muon(0.5, weight_decay=0.25, ns_dtype=torch.float32)
    updates, _ = rule.update({"w": torch.zeros(2, 32)}, rule.init(params), params)
    assert updates["w"].unique().tolist() == [-0.125]


@pytest.mark.parametrize("as_torch", [False, True])
def test_layers_and_experts_are_single_matrices_bit_for_bit(as_torch):
    params = {"experts": _random(2, 3, 8, 12)}
    grads = _grads(params, 3)
    rule = optim.muon(0.02, as_torch=as_torch)
    together, _ = _steps(rule, params, grads)
    for i in range(2):
        for j in range(3):
            alone, _ = _steps(rule, {"w": params["experts"][i, j]}, [{"w": g["experts"][i, j]} for g in grads])
            assert torch.equal(together["experts"][i, j], alone["w"])


@pytest.mark.parametrize("dim,sizes", [(-1, (16, 8, 8)), (-1, 8), (-2, 8), (-2, (8, 24))])
@pytest.mark.parametrize("lead", [(), (2,)])
def test_blocks_are_parameters_of_their_own_bit_for_bit(dim, sizes, lead):
    """Scale and decay included."""
    shape = [*lead, 12, 12]
    shape[dim] = 32
    params = {"attn/wqkv": _random(*shape)}
    grads = _grads(params, 3)
    settings = dict(lr=0.02, scale="match_rms", as_torch=True)
    fused, _ = _steps(optim.muon(**settings, blocks={"*wqkv": Blocks(dim, sizes)}), params, grads)
    widths = [sizes] * (32 // sizes) if isinstance(sizes, int) else list(sizes)
    apart = lambda x: dict(enumerate(torch.split(x["attn/wqkv"], widths, dim=dim)))  # noqa: E731
    named = lambda x: {str(i): part.contiguous() for i, part in apart(x).items()}  # noqa: E731
    single, _ = _steps(optim.muon(**settings), named(params), [named(g) for g in grads])
    for i, part in apart(fused).items():
        assert torch.equal(part, single[str(i)])


def test_pure():
    params = {"w": _random(3, 8, 8)}
    grads = _grads(params, 1)[0]
    rule = optim.muon(0.02)
    state = rule.init(params)
    before = [t.clone() for t in tree.leaves((params, grads, state))]
    first = rule.update(grads, state, params)
    second = rule.update(grads, state, params)
    assert all(torch.equal(a, b) for a, b in zip(before, tree.leaves((params, grads, state)), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(first), tree.leaves(second), strict=True))
    assert tree.structure(first[1]) == tree.structure(state)
    assert [(t.dtype, t.shape) for t in tree.leaves(first[1])] == [(t.dtype, t.shape) for t in tree.leaves(state)]


def test_numbers_of_the_state_decide_and_a_schedule_moves_the_rate():
    params = {"w": _random(8, 8)}
    rule = optim.muon(optim.warmup_stable_decay(1.0, steps=10, warmup=2))
    state, rates = rule.init(params), []
    for _ in range(3):
        _, state = rule.update(params, state, params)
        rates.append(float(state.lr))
    assert rates == [0.5, 1.0, 1.0]
    rule = optim.muon(0.1)
    state = rule.init(params)
    changed = state.replace(lr=state.lr * 2)
    one, two = (rule.update(params, s, params)[0]["w"] for s in (state, changed))
    torch.testing.assert_close(two, 2 * one)


def test_clipping_first_changes_nothing_but_the_momentum_mix():
    """Orthogonalisation is free of scale, so a clip that came after it would cut healthy updates."""
    params = {"w": _random(8, 8)}
    rule = optim.muon(0.1, weight_decay=0.0)
    clipped = optim.chain(optim.clip_by_global_norm(2.0**-6), rule)
    grads = {"w": params["w"] / params["w"].norm()}
    mine, _ = clipped.update(grads, clipped.init(params), params)
    plain, _ = rule.update(grads, rule.init(params), params)
    torch.testing.assert_close(mine["w"], plain["w"], rtol=2e-2, atol=1e-3)
    assert mine["w"].norm() > 0.1


def test_leaves_that_are_no_matrices_come_in_one_message():
    params = {"norm": torch.ones(4), "wqkv": torch.ones(4, 6), "heads": torch.ones(4, 6)}
    rule = optim.muon(0.1, blocks={"wqkv": Blocks(-1, (2, 2)), "heads": Blocks(-1, 4), "wo": Blocks(-1, 2)})
    with pytest.raises(ArgumentError) as error:
        rule.init(params)
    text = str(error.value)
    for expected in (
        "4 problems in the leaves of muon",
        "leaf norm has shape (4,); muon takes matrices",
        "its blocks (2, 2) add up to 4, and dim -1 has size 6",
        "its blocks of 4 do not divide dim -1 of size 6",
        'blocks for "wo" match no leaf',
    ):
        assert expected in text


def test_settings_that_do_not_fit():
    with pytest.raises(ArgumentError, match=r'(?s)Did you mean "match_rms".*write a tuple of mesh axes'):
        optim.muon(0.1, scale="match_rm", axes="fsdp")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="needs the mesh axes"):
        optim.muon(0.1, layout="stacked")
    with pytest.raises(ArgumentError, match=r"leaf w has shape \(4, 4\); layout=\"stacked\""):
        optim.muon(0.1, layout="stacked", axes=("fsdp",)).init({"w": torch.ones(4, 4)})
