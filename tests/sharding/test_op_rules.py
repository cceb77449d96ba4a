"""Every op family by value: each single split of each operand, and each operand as a pending sum, forward and backward.

The error messages of ops without a rule stand here too, and a rule that a user registers.
"""

from __future__ import annotations

import pytest
import torch
from tests.sharding.harness import difference, with_gradients
from tests.sharding.op_cases import CASES, Case

import functitan as ft
from functitan.sharding import covered, register_rule

P = ft.P
MESH = ft.make_mesh({"a": 2}, simulate=True)


def _summed(case: Case):
    """The case on operands that are sums of two addends, so that a split of the addends is a pending sum."""
    return lambda *xs: case.f(*(x.sum(0) if x.is_floating_point() else x for x in xs))


def _addends(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x * 0.25, x * 0.75]) if x.is_floating_point() else x


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_split_equals_one_device(case):
    inputs = [_addends(x) for x in case.inputs]
    f = with_gradients(_summed(case), inputs, case.constant)
    want = f(*inputs)
    compiled = ft.compile(f, mesh=MESH, conflicts="auto")
    assert difference(compiled(*inputs), want) < 1e-10
    for i, x in enumerate(inputs):
        for d, n in enumerate(x.shape):
            if n % 2 == 0:
                spec = P(*("a" if j == d else None for j in range(x.ndim)))
                given = [ft.device_put(x, spec, MESH) if j == i else y for j, y in enumerate(inputs)]
                worst = difference(compiled(*given), want)
                assert worst < 1e-10, f"operand {i} as {spec} (dim 0 of a float is its addends): differs by {worst}"
