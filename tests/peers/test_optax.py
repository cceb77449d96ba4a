"""Rules step as Optax's, after 100 steps on given gradients: pip install '.[peers]'.

What the rules must be without it is proved by their formulas in tests/optim.
"""

import numpy
import pytest
import torch

from functitan import optim

optax = pytest.importorskip("optax")

RULES = {
    "adamw": (optim.adamw(1e-2, b2=0.999, weight_decay=1.0), optax.adamw(1e-2, weight_decay=1.0)),
    "adam": (optim.adam(1e-2), optax.adam(1e-2)),
    "lion": (optim.lion(1e-3, weight_decay=1.0), optax.lion(1e-3, weight_decay=1.0)),
    "sgd": (optim.sgd(1e-2, momentum=0.9), optax.sgd(1e-2, momentum=0.9)),
    "nesterov": (optim.sgd(1e-2, momentum=0.9, nesterov=True), optax.sgd(1e-2, momentum=0.9, nesterov=True)),
    "clipped": (
        optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-2, b2=0.999, weight_decay=1.0)),
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2, weight_decay=1.0)),
    ),
}


def _random(seed):
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", RULES)
def test_a_hundred_steps(name):
    """Within 1e-5 of weights of size 1: both round in float32, in other orders. Decay is two thirds of a weight."""
    rule, theirs = RULES[name]
    mine, other = {"w": _random(1000)}, {"w": _random(1000).numpy()}
    state, their_state = rule.init(mine), theirs.init(other)
    for i in range(100):
        updates, state = rule.update({"w": _random(i)}, state, mine)
        mine = optim.apply_updates(mine, updates)
        moved, their_state = theirs.update({"w": _random(i).numpy()}, their_state, other)
        other = optax.apply_updates(other, moved)
    found = numpy.asarray(other["w"])
    assert numpy.abs(mine["w"].numpy() - found).max() <= 1e-5
    assert numpy.abs(found - _random(1000).numpy()).max() > 0.1  # it moved
