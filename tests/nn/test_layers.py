"""Layers against torch's own, and against closed forms."""

import math

import pytest
import torch
import torch.nn.functional as F

from functitan import nn, random
from functitan.annotations import Param
from functitan.errors import TreeError
from functitan.nn import init


def test_rms_norm_equals_torch_and_computes_in_float32():
    x, scale = torch.randn(3, 16), torch.randn(16)
    torch.testing.assert_close(nn.rms_norm(x, scale, 1e-5), F.rms_norm(x, (16,), scale, 1e-5))
    low = (x * 300).to(torch.float16)  # squares overflow float16
    out = nn.rms_norm(low, scale, 1e-5)
    assert out.dtype == torch.float16 and out.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cross_entropy_equals_torch_in_value_and_gradient(dtype):
    logits = (torch.randn(2, 5, 11) * 30).to(dtype).requires_grad_()
    labels = torch.randint(0, 11, (2, 5))
    labels[0, :3] = nn.IGNORE_INDEX
    total, count = nn.cross_entropy(logits, labels)
    theirs = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum")
    assert total.dtype == torch.float32 and int(count) == 7
    torch.testing.assert_close(total, theirs)
    torch.testing.assert_close(
        torch.autograd.grad(total, logits)[0], torch.autograd.grad(theirs, logits)[0], rtol=1e-4, atol=1e-6
    )


def test_cross_entropy_of_shards_of_the_vocabulary_adds_up():
    """The formula has only reductions over the vocabulary: a maximum and two sums of parts give the whole."""
    logits, labels = torch.randn(4, 10), torch.tensor([0, 9, 4, 5])
    parts = [(logits[:, :5], torch.arange(5)), (logits[:, 5:], torch.arange(5, 10))]
    top = torch.stack([p.amax(-1) for p, _ in parts]).amax(0)
    normaliser = sum((p - top[:, None]).exp().sum(-1) for p, _ in parts).log() + top
    label = sum(torch.where(ids == labels[:, None], p, 0.0).sum(-1) for p, ids in parts)
    torch.testing.assert_close(nn.cross_entropy(logits, labels)[0], (normaliser - label).sum())


def test_all_labels_ignored_gives_zero_and_no_nan_gradient():
    logits = torch.randn(1, 2, 3, requires_grad=True)
    total, count = nn.cross_entropy(logits, torch.full((1, 2), nn.IGNORE_INDEX))
    assert total.item() == 0 and int(count) == 0
    assert torch.autograd.grad(total, logits)[0].abs().max() == 0


def test_llama3_rope_scaling_counts():
    plain, scaled = nn.rope_frequencies(128, 5e5), nn.rope_frequencies(128, 5e5, nn.RopeScaling())
    unchanged = (plain / scaled - 1).abs() < 1e-12
    divided = (plain / scaled / 8 - 1).abs() < 1e-12
    interpolated = ~unchanged & ~divided
    assert [int(m.sum()) for m in (unchanged, interpolated, divided)] == [29, 6, 29]


@pytest.mark.parametrize("layout", ["interleaved", "half"])
def test_rope_is_a_rotation_by_relative_position(layout):
    q, k = torch.randn(8), torch.randn(8)
    cos, sin = nn.rope_table(torch.arange(20), 8, 100.0)
    rotate = lambda x, at: nn.apply_rope(x.reshape(1, 1, 1, 8), cos[at : at + 1], sin[at : at + 1], layout)  # noqa: E731
    scores = [(rotate(q, i + 7) * rotate(k, i)).sum() for i in (0, 3, 12)]
    torch.testing.assert_close(scores[0], scores[1])
    torch.testing.assert_close(scores[0], scores[2])
    torch.testing.assert_close(rotate(q, 5).norm(), q.norm())


def test_rope_layouts_differ_by_a_permutation():
    x = torch.randn(2, 3, 4, 8)
    cos, sin = nn.rope_table(torch.arange(3), 8, 100.0)
    to_half = torch.arange(8).reshape(4, 2).T.flatten()
    interleaved = nn.apply_rope(x, cos, sin, "interleaved")
    torch.testing.assert_close(interleaved[..., to_half], nn.apply_rope(x[..., to_half], cos, sin, "half"))


def test_initialisers_have_their_standard_deviations():
    shape, key = (4, 64, 256), random.key(0)
    draw = lambda f: f(key, shape, torch.float32)  # noqa: E731
    assert draw(init.normal(0.5)).std().item() == pytest.approx(0.5, rel=0.02)
    truncated = draw(init.truncated_normal(0.02, cutoff=2.0))
    assert truncated.std().item() == pytest.approx(0.02, rel=0.02)
    assert truncated.abs().max().item() < 0.02 * 2 / 0.87
    assert draw(init.fan_in_scaled(1)).std().item() == pytest.approx(64**-0.5, rel=0.02)
    assert draw(init.fan_in_scaled((0, 1), 2.0)).std().item() == pytest.approx(2 * 256**-0.5, rel=0.02)
    by_layer = draw(init.depth_scaled(init.truncated_normal(0.02))).std(dim=(1, 2))
    assert by_layer.tolist() == pytest.approx([0.02 / math.sqrt(2 * (i + 1)) for i in range(4)], rel=0.03)
    assert init.truncated_normal() == init.truncated_normal(0.02)


def test_init_params_fills_by_path():
    declared = {"a": Param((3, 4), ("embed", "mlp")), "b": {"c": Param((3, 4), ("embed", "mlp"))}}
    params = init.init_params(random.key(0), declared)
    assert not torch.equal(params["a"], params["b"]["c"])
    alone = init.init_params(random.key(0), {"b": declared["b"]})
    assert torch.equal(alone["b"]["c"], params["b"]["c"])


def test_init_params_names_every_wrong_leaf():
    bad = Param((2,), ("embed",), init=lambda key, shape, dtype: torch.zeros(3))
    with pytest.raises(TreeError, match=r"2 problems(.|\n)*a is declared \(2,\)(.|\n)*b is a int"):
        init.init_params(random.key(0), {"a": bad, "b": 3})
