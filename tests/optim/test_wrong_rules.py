"""Rules that are wrong in ways that others were, each caught by a check that the right rule passes.

A check says what must hold of a rule for matrices and a rule for the rest; a mutant is the right pair with one mistake.
"""

import math

import pytest
import torch

from functitan import optim, tree
from functitan.optim import Blocks, GradientTransformation
from functitan.recipes import load_recipe

RATE, DECAY = 0.1, 0.5  # their product is far above any tolerance here
MATRICES = ("layers/wq", "layers/wk", "layers/wv", "layers/wo", "layers/gate", "layers/up", "layers/down")


def _random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _muon(**settings):
    return optim.muon(RATE, **{"weight_decay": DECAY, "scale": "match_rms", "ns_dtype": torch.float32, **settings})


def _first(rule, params, grads):
    return rule.update(grads, rule.init(params), params)[0]


def _orthogonal(x):
    return optim.newton_schulz(x, dtype=torch.float32)


# --- what must hold ------------------------------------------------------------------------------------------------


def routing(labels):
    """Matrices of layers go to Muon; embedding, head and norms, 2-D as some are, do not."""
    params = {p: x for p, x in tree.flatten_with_paths(load_recipe("llama3-debug-muon").family.declare(
        load_recipe("llama3-debug-muon").model))[0]}  # fmt: skip
    found = optim.label_tree(params, labels)
    return {path for path, rule in found.items() if rule == "muon"} == set(MATRICES)


def decay_of_base_rate(make):
    """(1 - lr wd) w, whatever c is: c is 0.2 * sqrt(32) here, and lr wd is 0.05."""
    params = {"w": _random(8, 32)}
    updates = _first(make(), params, {"w": torch.zeros(8, 32)})
    return torch.allclose(updates["w"], -RATE * DECAY * params["w"], rtol=1e-5, atol=0)


def size_of_update(make):
    """lr * 0.2 * sqrt(max(A, B)) of the orthogonal matrix, for wide and for tall ones."""
    params = {"wide": _random(8, 32), "tall": _random(32, 8)}
    updates = _first(make(weight_decay=0.0), params, params)
    factor = RATE * 0.2 * math.sqrt(32)
    return all(torch.allclose(u, -factor * _orthogonal(params[k]), atol=1e-5) for k, u in updates.items())


def orientation(make):
    """Outputs are columns: sqrt(A / B) is 2 for 8 -> 32 and, clamped, 1 for 32 -> 8."""
    params = {"up": _random(8, 32), "down": _random(32, 8)}
    updates = _first(make(weight_decay=0.0, scale="original"), params, params)
    sizes = {"up": 2.0, "down": 1.0}
    return all(torch.allclose(u, -RATE * sizes[k] * _orthogonal(params[k]), atol=1e-5) for k, u in updates.items())


def blocks_stand_alone(make):
    """Each block of a fused leaf is orthogonalised, scaled and decayed as a leaf of its own."""
    params, grads = {"w": _random(8, 24)}, {"w": _random(8, 24, seed=1)}
    fused = _first(make(blocks={"w": Blocks(-1, (16, 8))}), params, grads)["w"]
    apart = lambda x: dict(zip("ab", x["w"].split([16, 8], -1), strict=True))  # noqa: E731
    single = _first(make(), apart(params), apart(grads))
    return torch.allclose(fused, torch.cat([single["a"], single["b"]], -1), rtol=1e-5, atol=1e-6)


def matrices_of_a_stack_stand_alone(make):
    """Report B27: with three leaves of (4, 3, 2), with one, and with a single matrix, a matrix gets the same update."""
    params = {k: _random(4, 3, 2, seed=i) for i, k in enumerate("abc")}
    grads = {k: _random(4, 3, 2, seed=9 + i) for i, k in enumerate("abc")}
    together, one = _first(make(), params, grads), _first(make(), {"b": params["b"]}, {"b": grads["b"]})
    matrix = _first(make(), {"w": params["b"][2]}, {"w": grads["b"][2]})["w"]
    return torch.equal(together["b"], one["b"]) and torch.equal(one["b"][2], matrix)


def clipping_spares_healthy_updates(build):
    """A clip by the global norm acts on gradients: an orthogonal update is as large with it as without."""
    params = {"w": _random(16, 16)}
    updates = _first(build(_muon(weight_decay=0.0)), params, {"w": 1e-3 * params["w"]})["w"]
    return math.isclose(updates.norm(), RATE * 0.2 * math.sqrt(16) * _orthogonal(params["w"]).norm(), rel_tol=1e-3)


def momentum_is_nesterovs_average(make):
    """m <- 0.95 m + 0.05 g, and 0.95 m + 0.05 g is orthogonalised: after two steps, against a formula in place."""
    params, grads = {"w": _random(6, 9)}, [{"w": _random(6, 9, seed=i)} for i in (1, 2)]
    rule = make(weight_decay=0.0)
    _, state = rule.update(grads[0], rule.init(params), params)
    updates, _ = rule.update(grads[1], state, params)
    m = 0.05 * grads[0]["w"]
    m = 0.95 * m + 0.05 * grads[1]["w"]
    expected = -RATE * 0.2 * 3 * _orthogonal(0.95 * m + 0.05 * grads[1]["w"])
    return torch.allclose(updates["w"], expected, atol=1e-5)


def free_of_the_gradients_scale(make):
    """A gradient of 2**-40 of the size is the same direction: no floor under the norm is near."""
    params, grads = {"w": torch.zeros(6, 9)}, {"w": _random(6, 9)}
    tiny = {"w": grads["w"] * 2.0**-40}
    return torch.equal(_first(make(eps=1e-30), params, grads)["w"], _first(make(eps=1e-30), params, tiny)["w"])


def inputs_stay(make):
    """Gradients, state and parameters are as they were."""
    params, grads = {"w": _random(4, 4)}, {"w": _random(4, 4, seed=1)}
    rule = make()
    state = rule.init(params)
    _, state = rule.update(grads, state, params)
    before = [x.clone() for x in tree.leaves((grads, state, params))]
    rule.update(grads, state, params)
    return all(torch.equal(a, b) for a, b in zip(before, tree.leaves((grads, state, params)), strict=True))


# --- what was wrong elsewhere ----------------------------------------------------------------------------------------


def _changed(change):
    """Muon whose updates are changed: ``change(path, update, parameter, its settings)``."""

    def make(**settings):
        rule = _muon(**settings)

        def update(grads, state, params):
            updates, state = rule.update(grads, state, params)
            return tree.map_with_path(lambda path, u, p: change(path, u, p, settings), updates, params), state

        return GradientTransformation(rule.init, update)

    return make


def _decay_of(settings):
    return RATE * settings.get("weight_decay", DECAY)


def _c(p):
    return 0.2 * math.sqrt(max(p.shape[-2:]))


def _fused(blocks=None, **settings):
    """The scale of the fused shape on each block."""
    rule = _muon(blocks=blocks, **settings)

    def update(grads, state, params):
        updates, state = rule.update(grads, state, params)
        cut = lambda p: p.split([16, 8], -1) if blocks else (p,)  # noqa: E731

        def one(u, p):
            decay = -_decay_of(settings) * p
            parts = zip(cut(u - decay), cut(p), strict=True)
            return torch.cat([part / _c(own) * _c(p) for part, own in parts], -1) + decay

        return tree.map(one, updates, params), state

    return GradientTransformation(rule.init, update)


def _flattened(**settings):
    """Stacks of one shape joined to one matrix: the mistake that one leaf per shape does not show."""
    rule = _muon(**settings)

    def update(grads, state, params):
        shapes = {k: p.shape for k, p in params.items()}
        flat = lambda t: {k: x.reshape(-1, x.shape[-1]) for k, x in t.items()}  # noqa: E731
        own = state.replace(mu=flat(state.mu))
        updates, own = rule.update(flat(grads), own, flat(params))
        back = lambda t: {k: x.reshape(shapes[k]) for k, x in t.items()}  # noqa: E731
        return back(updates), own.replace(mu=back(own.mu))

    return GradientTransformation(rule.init, update)


def _in_place(**settings):
    """The momentum is blended into the gradient's memory."""
    rule = _muon(**settings)

    def update(grads, state, params):
        result = rule.update(grads, state, params)
        tree.map(lambda g, m: g.lerp_(m, 0.95), grads, state.mu)
        return result

    return GradientTransformation(rule.init, update)


def _clip_after(rule):
    return optim.chain(rule, optim.clip_by_global_norm(0.01))


RIGHT = [
    (routing, load_recipe("llama3-debug-muon").optim.labels()),
    (clipping_spares_healthy_updates, lambda rule: optim.chain(optim.clip_by_global_norm(0.01), rule)),
    *((check, _muon) for check in (
        decay_of_base_rate, size_of_update, orientation, blocks_stand_alone, matrices_of_a_stack_stand_alone,
        momentum_is_nesterovs_average, free_of_the_gradients_scale, inputs_stay,
    )),
]  # fmt: skip

WRONG = {
    "embedding and head in Muon": (routing, [("*norm", "adamw"), ("*", "muon")]),
    "every 2-D leaf in Muon, stacks in AdamW": (routing, [("tok_embeddings", "muon"), ("head", "muon"), ("*", "adamw")]),
    "Muon silently off": (routing, [("*", "adamw")]),
    "decay times c": (decay_of_base_rate, _changed(lambda path, u, p, s: u + _decay_of(s) * p * (1 - _c(p)))),
    "decay times the rate twice": (decay_of_base_rate, _changed(lambda path, u, p, s: u + _decay_of(s) * p * (1 - RATE))),
    "no decay": (decay_of_base_rate, _changed(lambda path, u, p, s: u + _decay_of(s) * p)),
    "without 0.2": (size_of_update, _changed(lambda path, u, p, s: u / 0.2)),
    "both factors": (size_of_update, _changed(lambda path, u, p, s: u * max(1.0, p.shape[-1] / p.shape[-2]) ** 0.5)),
    "scale of the smaller side": (size_of_update, _changed(lambda path, u, p, s: u * (min(p.shape) / max(p.shape)) ** 0.5)),
    "inputs for outputs": (orientation, lambda **s: _transposed(**s)),
    "scale of the fused shape": (blocks_stand_alone, _fused),
    "blocks not cut": (blocks_stand_alone, lambda blocks=None, **s: _muon(**s)),
    "stacks flattened": (matrices_of_a_stack_stand_alone, _flattened),
    "clipped after orthogonalisation": (clipping_spares_healthy_updates, _clip_after),
    "no look-ahead": (momentum_is_nesterovs_average, lambda **s: _muon(nesterov=False, **s)),
    "no momentum": (momentum_is_nesterovs_average, lambda **s: _muon(momentum=0.0, **s)),
    "a floor under the norm": (free_of_the_gradients_scale, lambda eps=0.0, **s: _muon(eps=1e-7, **s)),
    "written in place": (inputs_stay, _in_place),
}  # fmt: skip


def _transposed(**settings):
    """Scales of (out, in) weights on (in, out) ones."""
    turn = lambda t: {k: x.mT for k, x in t.items()}  # noqa: E731
    rule = _muon(**settings)

    def update(grads, state, params):
        updates, own = rule.update(turn(grads), state.replace(mu=turn(state.mu)), turn(params))
        return turn(updates), own.replace(mu=turn(own.mu))

    return GradientTransformation(rule.init, update)


@pytest.mark.parametrize("check,rule", RIGHT, ids=lambda x: getattr(x, "__name__", ""))
def test_the_right_rule_passes(check, rule):
    assert check(rule)


@pytest.mark.parametrize("name", list(WRONG))
def test_the_wrong_rule_is_caught(name):
    check, rule = WRONG[name]
    assert not check(rule)


@pytest.mark.parametrize(
    "check,rule",
    [
        (decay_of_base_rate, _changed(lambda path, u, p, s: u + _decay_of(s) * p * 0.0)),
        (size_of_update, _changed(lambda path, u, p, s: 1.0 * u)),
        (decay_of_base_rate, _fused),
        (momentum_is_nesterovs_average, _flattened),
        (size_of_update, lambda **s: _transposed(**s)),
        (orientation, _in_place),
    ],
)
def test_a_mutant_passes_where_its_mistake_does_not_show(check, rule):
    """What catches it is the mistake, not the way that it is made."""
    assert check(rule)


# --- figures that a rule is chosen by --------------------------------------------------------------------------------


def test_bfloat16_iterations_do_not_run_away_on_hard_spectra():
    """Rounded to 8 bits, the fast schedule could leave its range; the safety factor keeps every singular value low."""
    worst = {}
    for schedule in ("quintic", "polar_express"):
        found = []
        for seed in range(6):
            for power in (0, 2, 4, 8):
                u, _, v = torch.linalg.svd(_random(24, 32, seed=seed), full_matrices=False)
                x = u @ torch.diag(torch.logspace(0, -power, 24)) @ v
                for scale in (1.0, 1e4, 1e-4):
                    out = optim.newton_schulz(scale * x, schedule).float()
                    found.append(torch.linalg.matrix_norm(out, 2).item())
        worst[schedule] = max(found)
    assert worst["quintic"] < 1.25 and worst["polar_express"] < 1.25


def test_no_matrix_at_all_is_an_empty_step():
    """A pipeline stage without matrices."""
    rule = _muon()
    updates, state = rule.update({}, rule.init({}), {})
    assert updates == {} and state.mu == {} and int(state.step) == 1


@pytest.mark.parametrize("kind", ["for-loop", "foreach", "fused"])
def test_adamw_after_100_steps_is_each_of_torchs_forms(kind):
    """Within 1e-5, eight times the rounding that the forms differ by; lr wd is 1e-2 a step, in sum two thirds of a weight."""
    p = _random(8, 8)
    rule = optim.adamw(1e-2, b2=0.999, weight_decay=1.0)
    mine, state, theirs = {"w": p}, rule.init({"w": p}), p.clone().requires_grad_()
    form = {"for-loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}[kind]
    other = torch.optim.AdamW([theirs], lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=1.0, **form)
    for i in range(100):
        theirs.grad = _random(8, 8, seed=i)
        updates, state = rule.update({"w": theirs.grad.clone()}, state, mine)
        mine = optim.apply_updates(mine, updates)
        other.step()
    assert (mine["w"] - theirs.detach()).abs().max() < 1e-5 * max(1.0, p.abs().max())


def test_adamw_after_100_steps_is_optaxs_formula_in_float64():
    """p - lr (m_hat / (sqrt(v_hat) + eps) + wd p), decay with the old p: nearer to it than torch's own forms are."""
    p, m, v = _random(8, 8).double(), torch.zeros(8, 8).double(), torch.zeros(8, 8).double()
    rule = optim.adamw(1e-2, b2=0.999, weight_decay=1.0)
    mine, state = {"w": p.float()}, rule.init({"w": p.float()})
    for t in range(1, 101):
        g = _random(8, 8, seed=t)
        updates, state = rule.update({"w": g}, state, mine)
        mine = optim.apply_updates(mine, updates)
        m, v = 0.9 * m + 0.1 * g.double(), 0.999 * v + 0.001 * g.double().square()
        p = p - 1e-2 * ((m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8) + 1.0 * p)
    assert (mine["w"].double() - p).abs().max() < 3e-6
