"""QK-clip: no logit above tau on the batch that was measured, on any mesh, and nothing else moves."""

import dataclasses
import math

import pytest
import torch

import functitan as ft
from functitan import optim, tree
from functitan.errors import ArgumentError
from functitan.nn.models import llama3
from functitan.optim.qk_clip import clip_factors
from functitan.recipes.llama3 import llama3_rules
from functitan.sharding.array import put

TAU = 1.5


def _normal(*shape, seed=0, scale=1.0):
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _logits(params, x, heads):
    """All logits (B, H, S, S) of one layer without positions."""
    apart = lambda w, n: (x @ w).unflatten(-1, (n, -1)).transpose(1, 2)  # noqa: E731
    q = apart(params["wq"], heads)
    groups = params["wk"].shape[-1] * heads // params["wq"].shape[-1]
    k = apart(params["wk"], groups).repeat_interleave(heads // groups, 1)
    return q @ k.mT / math.sqrt(q.shape[-1])


def _layer(heads, groups, width=4):
    params = {"wq": _normal(8, heads * width), "wk": _normal(8, groups * width, seed=1), "wv": _normal(8, 4, seed=2)}
    # Heads of very different sizes: some above tau, some below.
    params["wq"] *= (6.0 ** -torch.arange(heads)).repeat_interleave(width)
    return params, _normal(3, 5, 8, seed=3)


def _apply(rule, params, logits, updates=None):
    zero = tree.map(torch.zeros_like, params) if updates is None else updates
    found, state = rule.update(zero, rule.init(params), params, max_logits=logits)
    return optim.apply_updates(params, found), state


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("heads,groups", [(4, 4), (4, 2), (6, 1)])
def test_the_largest_logit_of_each_head_becomes_tau_and_the_others_stay(heads, groups, alpha):
    params, x = _layer(heads, groups)
    before = _logits(params, x, heads)
    largest = before.amax((0, 2, 3))
    clipped, state = _apply(optim.qk_clip(TAU, alpha=alpha), params, {"": largest})
    after = _logits(clipped, x, heads)
    assert after.max() <= TAU * (1 + 1e-12)
    gamma = (TAU / largest).clamp(max=1.0)
    assert 0 < int((gamma < 1).sum()) < heads  # some are clipped, some are not
    # Linear: all of the head's logits, not only the largest.
    torch.testing.assert_close(after, before * gamma[:, None, None], rtol=1e-12, atol=1e-12)
    assert torch.equal(clipped["wv"], params["wv"])
    assert float(state.max_logit) == pytest.approx(float(largest.max()), rel=1e-6)
    if heads == groups:
        expected = gamma.repeat_interleave(4)
        torch.testing.assert_close(clipped["wq"], params["wq"] * expected**alpha, rtol=1e-12, atol=0)
        torch.testing.assert_close(clipped["wk"], params["wk"] * expected ** (1 - alpha), rtol=1e-12, atol=0)
        kept = (gamma == 1).repeat_interleave(4)
        assert torch.equal(clipped["wq"][:, kept], params["wq"][:, kept])


LATENT = {"wq_b": ((4, 0.5), (2, 1.0)), "wkv_b": ((4, 0.5), (3, 0.0))}


def _latent(heads=3):
    """Multi-head latent attention: rotary keys (here without positions) come from one matrix for all heads."""
    params = {
        "wq_b": _normal(8, heads * 6),
        "wkv_b": _normal(8, heads * 7, seed=1),
        "wk_rope": _normal(8, 2, seed=2),
    }
    params["wq_b"] *= (6.0 ** -torch.arange(heads)).repeat_interleave(6)
    return params, _normal(3, 5, 8, seed=3)


def _latent_logits(params, x, heads=3):
    q = (x @ params["wq_b"]).unflatten(-1, (heads, 6)).transpose(1, 2)
    k = (x @ params["wkv_b"]).unflatten(-1, (heads, 7)).transpose(1, 2)
    return q[..., :4] @ k[..., :4].mT + q[..., 4:] @ (x @ params["wk_rope"])[:, None].mT


def test_parts_of_a_head_have_powers_of_their_own():
    params, x = _latent()
    before = _latent_logits(params, x)
    largest = before.amax((0, 2, 3))
    tau = float(largest[1]) * 1.01  # the first head is clipped, the others stay
    clipped, _ = _apply(optim.qk_clip(tau, parts=LATENT), params, {"": largest})
    gamma = (tau / largest).clamp(max=1.0)
    assert int((gamma < 1).sum()) == 1
    torch.testing.assert_close(_latent_logits(clipped, x), before * gamma[:, None, None], rtol=1e-12, atol=1e-12)
    assert torch.equal(clipped["wk_rope"], params["wk_rope"])
    values = torch.arange(21) % 7 >= 4
    assert torch.equal(clipped["wkv_b"][:, values], params["wkv_b"][:, values])
    assert torch.equal(clipped["wq_b"][:, 6:], params["wq_b"][:, 6:])


def test_parts_on_a_mesh_are_those_of_one_device():
    params, x = _latent(4)
    rule, mesh = (
        optim.chain(optim.sgd(0.1), optim.qk_clip(TAU, parts=LATENT)),
        ft.make_mesh({"tensor": 2}, simulate=True),
    )
    logits = {"": _latent_logits(params, x, 4).amax((0, 2, 3))}
    expected, _ = rule.update(params, rule.init(params), params, max_logits=logits)
    specs = {"wq_b": ft.P(None, "tensor"), "wkv_b": ft.P(None, "tensor"), "wk_rope": ft.P(None, None)}
    put_all = {k: ft.device_put(p, specs[k], mesh) for k, p in params.items()}
    state = ft.compile(rule.init, mesh=mesh)(put_all)
    update = ft.compile(lambda g, s, p, m: rule.update(g, s, p, max_logits=m), mesh=mesh)
    found, _ = update(put_all, state, put_all, logits)
    for k, u in expected.items():
        whole = found[k].full() if isinstance(found[k], ft.Array) else found[k]
        torch.testing.assert_close(whole, u, rtol=1e-14, atol=1e-14)
    assert all(isinstance(found[k], ft.Array) and found[k].spec == specs[k] for k in LATENT)


def test_parts_that_do_not_fit():
    params, _ = _latent()
    zero, logits = tree.map(torch.zeros_like, params), {"": torch.ones(3)}
    rule = optim.qk_clip(parts={"wq_b": ((4, 0.5),), "wk_b": ((4, 0.5),)})
    with pytest.raises(ArgumentError, match=r'there is no parameter wk_b; there are .*Did you mean "wkv_b"'):
        rule.update(zero, rule.init(params), params, max_logits=logits)
    rule = optim.qk_clip(parts={"wq_b": ((4, 0.5),)})
    with pytest.raises(ArgumentError, match=r"do not fit wq_b \(8, 18\): they are \(..., H\) for \(..., D, H \* 4\)"):
        rule.update(zero, rule.init(params), params, max_logits=logits)
    with pytest.raises(ArgumentError, match=r"(?s)3 problems.*width of each part.*a power of gamma is.*leave alpha"):
        optim.qk_clip(alpha=0.3, parts={"a": ((0, 0.5),), "b": ((4, 2.0),)})
    with pytest.raises(ArgumentError, match=r"parts is empty"):
        optim.qk_clip(parts={})


def test_logits_of_zero_or_below_are_no_special_case():
    """tau / S would be infinite, or negative."""
    q, k = clip_factors(torch.tensor([0.0, -3.0, -math.inf, 100.0, 100.5]), 5, 100.0, 0.5)
    assert q[:4].tolist() == k[:4].tolist() == [1.0] * 4 and 0.99 < float(q[4]) < 1


def test_an_update_below_tau_keeps_its_bits_and_above_it_is_clipped_too():
    """The parameters after the update are scaled, not those before it."""
    params = {"layers": {"wq": _normal(2, 8, 8), "wk": _normal(2, 8, 4, seed=1), "norm": _normal(8)}}
    updates = tree.map(lambda p: 0.1 * p.flip(0), params)
    logits = {"layers": torch.tensor([[1.0, 1.0], [6.0, 1.0]], dtype=torch.float64)}
    rule = optim.qk_clip(TAU)
    found, _ = rule.update(updates, rule.init(params), params, max_logits=logits)
    stepped = tree.map(lambda p, u: p + u, params, updates)["layers"]
    new = tree.map(lambda p, u: p + u, params, found)["layers"]
    assert torch.equal(found["layers"]["wq"][0], updates["layers"]["wq"][0])
    assert torch.equal(found["layers"]["norm"], updates["layers"]["norm"])
    # Layer 1: the first head of the one group is clipped by 1/4, so the key by 1/2, and the second head makes up for it.
    torch.testing.assert_close(new["wk"][1], 0.5 * stepped["wk"][1], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(new["wq"][1, :, :4], 0.5 * stepped["wq"][1, :, :4], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(new["wq"][1, :, 4:], 2.0 * stepped["wq"][1, :, 4:], rtol=1e-12, atol=1e-14)


def test_masters_are_scaled_not_only_their_rounded_copies():
    wide = {"wq": _normal(8, 8).float(), "wk": _normal(8, 8, seed=1).float()}
    params = tree.map(lambda p: p.to(torch.bfloat16), wide)
    rule = optim.with_master(optim.chain(optim.sgd(0.0), optim.qk_clip(1.0)))
    state = rule.init(params).replace(master=wide)
    zero = tree.map(torch.zeros_like, params)
    logits = {"": torch.tensor([16.0, 1.0])}
    updates, state = rule.update(zero, state, params, max_logits=logits)
    for name, p in wide.items():
        expected = p * torch.tensor([0.25, 1.0]).repeat_interleave(4)
        torch.testing.assert_close(state.master[name], expected, rtol=1e-6, atol=0)
        assert torch.equal(optim.apply_updates(params, updates)[name], state.master[name].to(torch.bfloat16))


def test_every_wrapper_hands_the_logits_on():
    params = {"layers": {"wq": torch.ones(2, 4, 4), "wk": torch.ones(2, 4, 4)}, "embed": torch.ones(3)}
    clip = optim.chain(optim.sgd(0.0), optim.qk_clip(1.0))
    rules = {
        "guard": optim.skip_nonfinite(clip, max_norm=1.0),
        "average": optim.with_ema(clip, 0.5),
        "masked": optim.masked(clip, lambda path: path.startswith("layers")),
        "partition": optim.partition({"a": clip, "b": optim.sgd(0.0)}, [("layers/*", "a"), ("*", "b")]),
        "injected": optim.inject_hyperparams(lambda tau: optim.chain(optim.sgd(0.0), optim.qk_clip(tau)))(tau=1.0),
    }
    logits = {"layers": torch.tensor([[4.0], [1.0]])}
    zero = tree.map(torch.zeros_like, params)
    for name, rule in rules.items():
        assert rule.extra == {"max_logits"}, name
        updates, _ = rule.update(zero, rule.init(params), params, max_logits=logits)
        assert updates["layers"]["wq"][:, 0, 0].tolist() == [-0.5, 0.0], name
        with pytest.raises((ArgumentError, TypeError), match="max_logits"):
            rule.update(zero, rule.init(params), params)


def test_extra_values_that_are_missing_or_that_nothing_reads():
    params = {"w": torch.ones(2)}
    rule = optim.chain(optim.sgd(0.1))
    with pytest.raises(ArgumentError, match=r"was given max_logits=, and the rule reads nothing beside the gradient"):
        rule.update(params, rule.init(params), params, max_logits={})
    rule = optim.chain(optim.qk_clip())
    with pytest.raises(ArgumentError, match=r"(?s)2 problems.*was not given it.*reads max_logits.*Did you mean"):
        rule.update(params, rule.init(params), params, max_logit={})


def test_logits_that_do_not_fit_come_in_one_message():
    params = {"layers": {"wq": torch.ones(2, 4, 8), "wk": torch.ones(2, 4, 4)}}
    zero = tree.map(torch.zeros_like, params)
    rule = optim.qk_clip()
    logits = {"layer": torch.ones(2, 4), "layers": torch.ones(3, 4)}
    with pytest.raises(ArgumentError) as error:
        rule.update(zero, rule.init(params), params, max_logits=logits)
    text = str(error.value)
    assert 'there is no parameter layer/wq; there are layers/wk, layers/wq. Did you mean "layers/wq"?' in text
    assert 'max_logits of "layers", (3, 4), do not fit wq (2, 4, 8) and wk (2, 4, 4)' in text
    for heads in (3, 1):  # no whole heads, or a key of half a head
        with pytest.raises(ArgumentError, match="do not fit"):
            rule.update(zero, rule.init(params), params, max_logits={"layers": torch.ones(2, heads)})
    with pytest.raises(ArgumentError, match=r"(?s)tau=0.*alpha=2"):
        optim.qk_clip(0, alpha=2)


CONFIG = llama3.Llama3Config(
    dim=16, layers=2, heads=4, kv_heads=2, mlp_dim=32, vocab=32, max_seq=16, compute_dtype=torch.float64
)


def _model(config):
    declared = tree.map(lambda p: dataclasses.replace(p, dtype=torch.float64), llama3.declare(config))
    params = ft.init(ft.random.key(0), declared)
    layers = params["layers"]
    params = {**params, "layers": {**layers, "wq": 30 * layers["wq"], "wk": 30 * layers["wk"]}}
    ids = torch.randint(0, config.vocab, (4, 8), generator=torch.Generator().manual_seed(1))
    return declared, params, {"tokens": ids, "labels": ids.roll(-1, 1)}


def _step(config, rule):
    def step(params, state, batch):
        def loss(params, batch):
            total, count, logits = llama3.loss_and_max_logits(params, batch, config, remat=ft.nothing_saveable)
            return total / count, logits

        (value, logits), grads = ft.value_and_grad(loss, has_aux=True)(params, batch)
        updates, state = rule.update(grads, state, params, max_logits=logits)
        return optim.apply_updates(params, updates), state, value, logits

    return step


def test_a_model_measures_and_clips_itself_on_the_same_batch():
    """One layer, so that a clip changes no other layer's input."""
    config = dataclasses.replace(CONFIG, layers=1)
    _, params, batch = _model(config)
    plain = llama3.loss(params, batch, config)
    total, count, logits = llama3.loss_and_max_logits(params, batch, config)
    assert torch.equal(total, plain[0]) and torch.equal(count, plain[1])
    assert logits["layers"].shape == (1, 4) and float(logits["layers"].max()) > TAU
    clipped, _ = _apply(optim.qk_clip(TAU), params, logits)
    _, _, after = llama3.loss_and_max_logits(clipped, batch, config)
    torch.testing.assert_close(after["layers"], logits["layers"].clamp(max=TAU), rtol=1e-10, atol=0)


def test_a_mesh_clips_as_one_device_does_with_one_reduction_for_all_layers():
    declared, params, batch = _model(CONFIG)
    rule = optim.chain(optim.sgd(0.1), optim.qk_clip(TAU))
    expected = _step(CONFIG, rule)(params, rule.init(params), batch)
    mesh = ft.make_mesh({"data": 2, "fsdp": 2, "tensor": 2}, simulate=True)
    rules = llama3_rules()
    layout = ft.init(ft.random.key(0), declared, mesh, rules)
    spread = tree.map(lambda p, a: put(p, a.layout, mesh) if isinstance(a, ft.Array) else p, params, layout)
    rows = {k: ft.device_put(x, ft.P(("data", "fsdp"), None), mesh) for k, x in batch.items()}
    step = ft.compile(_step(CONFIG, rule), mesh=mesh, rules=rules)
    args = (spread, ft.compile(rule.init, mesh=mesh, rules=rules)(spread), rows)
    found = tree.map(lambda x: x.full() if isinstance(x, ft.Array) else x, step(*args))
    for (path, a), b in zip(tree.flatten_with_paths(found)[0], tree.leaves(expected), strict=True):
        assert (a - b).abs().max() <= 1e-10, path
    program = step.lower(*args)
    # Each rank measures its rows and heads: the maxima of 2 layers x 2 heads (of 4, over tensor) are joined once.
    ours = [c for c in program.collectives() if c.line.startswith("model.py") and c.why == "amax"]
    assert [(c.kind, set(c.axes), c.count) for c in ours] == [("all_reduce", {"data", "fsdp"}, 1)]
    # In forward only, once per layer: backward recomputes attention, and not what was measured.
    assert program.text().count("functitan.attention_max_logits") == 1
    assert sum(times for _, node, times in program.calls() if "max_logits" in str(node.target)) == CONFIG.layers
