"""The iteration against singular value decompositions, torch's own, and its count of operations."""

import math

import pytest
import torch
from torch.optim._muon import _zeropower_via_newtonschulz
from torch.utils.flop_counter import FlopCounterMode

from functitan.errors import ArgumentError
from functitan.optim.newton_schulz import (
    SCHEDULES,
    Coefficients,
    newton_schulz,
    newton_schulz_flops,
    singular_value_map,
)

SHAPES = [(6, 10), (10, 6), (8, 8), (1, 5)]


def _random(shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("schedule", list(SCHEDULES))
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype,near", [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
def test_singular_values_go_where_the_polynomials_take_them(schedule, shape, dtype, near):
    """And the singular vectors stay."""
    x = _random(shape).double()
    x = x.to(dtype).double()
    U, S, Vh = torch.linalg.svd(x, full_matrices=False)
    out = newton_schulz(x, schedule, dtype=dtype).double()
    expected = U @ torch.diag(singular_value_map(S / S.norm(), schedule)) @ Vh
    assert (out - expected).norm() <= near * expected.norm()


@pytest.mark.parametrize("shape", [(24, 32), (32, 24), (48, 48)])
@pytest.mark.parametrize(
    "dtype,each,all_of_it",
    [(torch.float64, 1e-12, 1e-12), (torch.float32, 1e-5, 1e-5), (torch.bfloat16, 5e-2, 2.5e-2)],
)
def test_each_singular_value_by_itself(shape, dtype, each, all_of_it):
    """p(s) of every singular value, and no more beside them than rounding leaves. None is above 1.21."""
    x = _random(shape).to(dtype).double()
    U, S, Vh = torch.linalg.svd(x, full_matrices=False)
    expected = singular_value_map(S / S.norm())
    out = U.mT @ newton_schulz(x, dtype=dtype).double() @ Vh.mT
    assert (out.diagonal() - expected).abs().max() <= each
    assert (out - torch.diag(expected)).norm() <= all_of_it * expected.norm()
    assert torch.linalg.svdvals(out).max() <= 1.21


def test_two_phases_end_near_one_and_the_constant_schedule_stays_in_its_band():
    sigma = torch.logspace(-2.6, 0, 200, dtype=torch.float64)
    assert (singular_value_map(sigma, "two_phase") - 1).abs().max() < 2.5e-3
    once = singular_value_map(torch.logspace(math.log10(2e-3), 0, 200, dtype=torch.float64), "quintic")
    assert once.max() <= 1.21 and once.min() >= 0.67
    # A matrix is not promised the band: a small singular value does not get there.
    assert singular_value_map(torch.tensor(1e-4, dtype=torch.float64)) < 0.1


@pytest.mark.parametrize("shape", [(48, 32), (32, 48), (32, 32), (5, 7)])
def test_the_default_is_torch_bit_for_bit_in_any_batch(shape):
    batch = _random((2, 2, *shape))
    out = newton_schulz(batch)
    for i, j in ((0, 0), (0, 1), (1, 0), (1, 1)):
        theirs = _zeropower_via_newtonschulz(batch[i, j], (3.4445, -4.7750, 2.0315), 5, 1e-7)
        assert torch.equal(out[i, j], theirs) and torch.equal(newton_schulz(batch[i, j]), theirs)


@pytest.mark.parametrize("dtype,near", [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2.5e-2)])
@pytest.mark.parametrize("shape", [(24, 32), (32, 24), (32, 32)])
def test_transposes_and_powers_of_two(shape, dtype, near):
    x = _random(shape)
    by = lambda x: newton_schulz(x, dtype=dtype).double()  # noqa: E731
    assert (by(x.mT) - by(x).mT).norm() <= near * by(x).norm()
    for power in (-12, 3, 30):
        assert torch.equal(by(x), by(2.0**power * x))


def test_zero_stays_zero_and_the_input_is_untouched():
    zero = torch.zeros(3, 4, dtype=torch.bfloat16)
    assert not newton_schulz(zero).any()
    x = _random((4, 4)).to(torch.bfloat16)
    before = x.clone()
    newton_schulz(x)
    assert torch.equal(x, before)  # a cast to the dtype it has is no copy


@pytest.mark.parametrize("schedule", list(SCHEDULES))
@pytest.mark.parametrize("shape", [(3, 6, 10), (2, 10, 6), (8, 8)])
def test_operations_are_the_formula(schedule, shape):
    steps = SCHEDULES[schedule].steps
    x = torch.empty(shape, device="meta")
    with FlopCounterMode(display=False) as counter:
        for _ in steps:
            wide = x.mT if shape[-2] > shape[-1] else x
            gram = wide @ wide.mT
            (gram @ gram) @ wide
    assert newton_schulz_flops(shape, len(steps)) == counter.get_total_flops()


def test_what_is_no_matrix_and_no_schedule():
    with pytest.raises(ArgumentError, match=r"found torch.float32 \(3,\)"):
        newton_schulz(torch.ones(3))
    with pytest.raises(ArgumentError, match='Did you mean "polar_express"'):
        newton_schulz(torch.ones(3, 3), "polar_expres")
    own = Coefficients(((1.5, -0.5, 0.0),))
    torch.testing.assert_close(newton_schulz(torch.eye(1), own, dtype=torch.float32), torch.eye(1))


def test_operations_of_real_matrices():
    """Two operations for each multiply-add."""
    assert newton_schulz_flops((2048, 2048), 5) == 2 * 128_849_018_880
    assert newton_schulz_flops((2048, 11264), 5) == newton_schulz_flops((11264, 2048), 5) == 2 * 515_396_075_520
