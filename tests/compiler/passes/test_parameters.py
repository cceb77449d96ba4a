"""Buckets and prefetch: fewer collectives with the same bytes, started earlier, and the same numbers."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

import functitan as ft
from functitan import tree
from functitan.compiler.passes import Passes
from functitan.errors import ConfigError
from tests.compiler.mlp import D, F, L, lowered
from tests.compiler.placing import agree, randn, whole

OFF = Passes.off()
BUCKETS = replace(OFF, bucket_bytes=1 << 20)
AHEAD = replace(OFF, prefetch=1)
BUCKETS_AHEAD = replace(BUCKETS, prefetch=1)
BOTH = replace(OFF, bucket_bytes=1 << 20, prefetch=2)

W = {"a": randn(4, 8, 16, seed=1) / 3, "b": randn(4, 16, 8, seed=2) / 3, "scale": randn(4, 8, seed=3)}
W_NAMES = {"a": "param layers embed mlp", "b": "param layers mlp embed", "scale": "param layers embed"}
X = randn(4, 4, 8, seed=4)


def loss(w, x):
    def block(c, u):
        h = ft.constrain(c * u["scale"], ("batch", "whole_seq", "embed"))
        return c + ft.constrain(torch.tanh(h @ u["a"]) @ u["b"], ("batch", "seq", "embed")), c.mean()

    y, means = ft.scan(block, x, w)
    return y.square().sum() + means.sum()


def run(passes, axes):
    return agree(ft.value_and_grad(loss, argnums=(0, 1)), (W, X), (W_NAMES, "batch seq embed"), axes, passes=passes)


@pytest.mark.parametrize("axes", [{"fsdp": 2}, {"data": 2, "fsdp": 2}, {"fsdp": 2, "tensor": 2}], ids=str)
def test_one_device_and_the_program_as_lowered_are_met(axes):
    _, plain = run(OFF, axes)
    for passes in (BUCKETS, AHEAD, BOTH):
        _, found = run(passes, axes)  # equal to one device in float64 by itself
        for a, b in zip(tree.leaves(plain), tree.leaves(found), strict=True):
            assert torch.equal(whole(a), whole(b))


def test_a_bucket_sends_the_bytes_of_its_members_at_once():
    plain, packed = lowered(fsdp=4, passes=OFF).collectives(), lowered(fsdp=4, passes=BUCKETS).collectives()
    assert packed.total == plain.total
    for kind in ("all_gather", "reduce_scatter"):
        two, one = plain.of(kind=kind), packed.of(kind=kind)
        assert len(one) * 2 == len(two) and all(c.count == L for c in one)
        assert {c.nbytes for c in one} == {2 * 4 * D * F * 3 // 4}
        assert all(c.param.endswith("params/{up,down}") or c.param.endswith("params/{down,up}") for c in one)
        assert all(c.why.startswith("bucket of 2: ") for c in one)


def test_a_bucket_is_no_larger_than_asked():
    one_matrix = 4 * D * F
    assert (
        lowered(fsdp=4, passes=replace(OFF, bucket_bytes=one_matrix)).collectives()
        == lowered(fsdp=4, passes=OFF).collectives()
    )
    whole = lowered(fsdp=4, passes=replace(OFF, bucket_bytes=2 * one_matrix)).collectives()
    assert whole.runs < lowered(fsdp=4, passes=OFF).collectives().runs


def test_replicated_gradients_are_bucketed_too():
    plain, packed = lowered(data=2, passes=OFF).collectives(), lowered(data=2, passes=BUCKETS).collectives()
    assert plain.of(kind="all_reduce", axes=("data",)).runs - packed.of(kind="all_reduce", axes=("data",)).runs == L


def test_gathers_of_the_next_step_are_started_before_this_one_computes():
    program = lowered(fsdp=4, passes=AHEAD)
    text = program.text("block")
    assert [t.splitlines()[0] for t in text.split("\n\n")] == [
        "block starts:",
        "block:",
        "block backward starts:",
        "block backward:",
        "block backward finish:",
    ]
    starts, forward, late_starts, backward, finish = text.split("\n\n")
    assert starts.count("all_gather(") == late_starts.count("all_gather(") == 2
    assert "all_gather(" not in forward + backward and forward.count("wait_tensor(") == 2
    assert "wait_tensor(" not in starts + late_starts
    assert backward.count("reduce_scatter(") == 2 and finish.count("wait_tensor(") == 2
    same = lowered(fsdp=4, passes=OFF).collectives()
    assert (program.collectives().runs, program.collectives().total) == (same.runs, same.total)


def test_a_sum_over_a_second_axis_has_a_step_of_its_own():
    program = lowered(data=2, fsdp=2, passes=BOTH)
    finish, second = program.text("block").split("\n\n")[-2:]
    assert [t.splitlines()[0] for t in (finish, second)] == ["block backward finish:", "block backward finish2:"]
    assert "all_reduce" in finish and "= wait_tensor(%reduce_scatter" in finish
    assert ">>>" not in second and second.count("wait_tensor(") == 1
    seconds = program.cost("h100")
    assert seconds.ahead > lowered(data=2, fsdp=2, passes=OFF).cost("h100").ahead == 0


def by_regions(w, x):
    """The scan of ``loss`` as calls of one region after another."""

    def block(c, a, b, scale):
        h = ft.constrain(c * scale, ("batch", "whole_seq", "embed"))
        return c + ft.constrain(torch.tanh(h @ a) @ b, ("batch", "seq", "embed"))

    layer = ft.region(block, name="layer")
    for i in range(len(w["a"])):
        x = layer(x, w["a"][i], w["b"][i], w["scale"][i])
    return x.square().sum()


@pytest.mark.parametrize("axes", [{"fsdp": 2}, {"data": 2, "fsdp": 2}, {"fsdp": 2, "tensor": 2}], ids=str)
def test_regions_start_the_gathers_of_the_next(axes):
    f, names = ft.value_and_grad(by_regions, argnums=(0, 1)), (W_NAMES, "batch seq embed")
    _, plain = agree(f, (W, X), names, axes, passes=OFF)
    program, found = agree(f, (W, X), names, axes, passes=BUCKETS_AHEAD)
    for a, b in zip(tree.leaves(plain), tree.leaves(found), strict=True):
        assert torch.equal(whole(a), whole(b))
    step = [line.split(" = ")[1].split("  #")[0] for line in program.text("step").splitlines()[1:] if " = " in line]
    order = [i for i, t in enumerate(step) if t.startswith(("all_gather", "reduce_scatter", "layer"))]
    first = [step[i].split("(")[0] for i in order]
    # Of four layers forward: two gathers, a call, a gather, a call, and so on.
    assert first[:8] == ["all_gather", "all_gather", "layer", "all_gather", "layer", "all_gather", "layer", "layer"]
    assert first[8:12] == ["all_gather", "all_gather", "layer backward", "all_gather"]
    assert "all_gather(" not in "".join(t for t in program.text("layer").splitlines() if "fsdp" in t and "param" in t)


def test_memory_counts_what_is_gathered_ahead():
    layer = 2 * 4 * D * F
    held = [lowered(fsdp=4, passes=replace(OFF, prefetch=n)).memory()["gathered parameters"] for n in (1, 2, 3)]
    assert [b - a for a, b in pairwise(held)] == [layer, layer]


def test_what_changed_is_recorded():
    bucket, prefetch = (r for r in lowered(fsdp=4, passes=BOTH).passes if r.name in ("bucket", "prefetch"))
    assert "block: 2 all_gather fsdp as one of 12.0 KiB: state/params/{up,down}" in bucket.changes
    assert prefetch.changes == (
        "block: 2 gathers are started 2 steps ahead, 1 reduction of gradients is waited for one step later",
    )


def test_settings_count_from_zero():
    with pytest.raises(ConfigError, match="prefetch=-1"):
        Passes(prefetch=-1)
