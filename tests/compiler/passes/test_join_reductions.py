"""Small reductions become one collective where nothing has to wait for it, and no bit changes."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

import functitan as ft
from functitan import tree
from tests.compiler.llama import setup

OFF = ft.Passes.off()


def joining(nbytes=1 << 16):
    """This pass alone."""
    return replace(OFF, join_bytes=nbytes)


MESH = ft.make_mesh({"data": 4}, simulate=True)


def rows(*shape, dtype=torch.float32, seed=0, mesh=MESH, spec=("data",)):
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
    return ft.device_put(x, ft.P(*spec, *[None] * (len(shape) - len(spec))), mesh)


def reductions(program):
    """(kind, axes, dtype, elements, backward) of every reduction of a step, with multiplicity."""
    found = Counter()
    for c in program.collectives():
        if c.kind in ("all_reduce", "reduce_scatter"):
            found[c.kind, "+".join(c.axes), c.dtype, torch.Size(c.shape).numel()] += c.count
    return found


def both(f, *args, mesh=MESH, rules=None, join_bytes=1 << 16):
    """The reductions without and with the pass; the results are the same bits."""
    programs, results = [], []
    for passes in (OFF, joining(join_bytes)):
        compiled = ft.compile(f, mesh=mesh, rules=rules, passes=passes)
        programs.append(compiled.lower(*args))
        out = compiled(*args)
        results.append([v.full() if isinstance(v, ft.Array) else v for v in tree.leaves(out)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    return tuple(reductions(p) for p in programs), programs[1]


def all_reduce(elements, dtype="float32", axes="data"):
    return ("all_reduce", axes, dtype, elements)


def test_sums_of_different_sizes_become_one():
    x, y = rows(8, 3), rows(8, 5, seed=1)
    (before, after), program = both(lambda x, y: (x.sum(0), y.sum(0), (x * x).sum()), x, y)
    assert before == {all_reduce(3): 1, all_reduce(5): 1, all_reduce(1): 1}
    assert after == {all_reduce(9): 1}
    (record,) = [r for r in program.passes if r.name == "join_reductions"]
    assert (record.before.collectives, record.after.collectives) == (3, 1)
    # An all-reduce of n ranks sends 2 (n - 1) / n of its bytes from each.
    assert record.after.sent == 2 * 3 * 9 * 4 // 4
    (change,) = record.changes
    line = change.partition("(")[2].partition(")")[0]
    reasons = "; ".join(f"output {i} ({line})" for i in range(3))
    assert change == f"step: 3 all_reduce data as one: {reasons}" and line.startswith("test_join_reductions.py:")
    assert f"# 54 B sent, 3 joined: {reasons}" in program.text()


def test_dtypes_operations_and_axes_stay_apart():
    mesh = ft.make_mesh({"data": 2, "model": 2}, simulate=True)
    x = rows(8, 3, mesh=mesh)
    y = rows(8, 3, mesh=mesh, spec=("model",))
    z = rows(8, 3, mesh=mesh, dtype=torch.float64)
    (before, after), _ = both(lambda x, y, z: (x.sum(), y.sum(), z.sum(), x.amax()), x, y, z, mesh=mesh)
    assert before == after and sum(after.values()) == 4


def test_a_sum_that_depends_on_another_is_not_joined_with_it():
    x = rows(8, 3)
    (before, after), _ = both(lambda x: (x * x.sum()).sin().sum(), x)
    assert before == after == {all_reduce(1): 2}


def test_crossed_dependences_do_not_close_a_circle():
    """A then B, C then D: A and D could be one, B and C could be one, not both."""
    x, wide = rows(8, 3), rows(8, 3, dtype=torch.float64)

    def f(x, wide):
        a = x.sum()
        b = (wide * a).sin().sum()
        c = wide.cos().sum()
        d = (x * c.float()).sin().sum()
        return a, b, c, d

    (before, after), _ = both(f, x, wide)
    assert before == {all_reduce(1): 2, all_reduce(1, "float64"): 2}
    assert after == {all_reduce(1): 2, all_reduce(2, "float64"): 1}


def test_what_is_large_does_not_wait():
    """The packed sum stands before the first large op that needs a part of it, or there is none."""
    x, big = rows(8, 3), rows(8, 64, seed=1)

    def made_later(x, big):
        scaled = big * x.sum()
        return scaled, scaled.sin().sum()

    def made_before(x, big):
        a, b = x.sum(), x.cos().sum()
        return big * a, b

    (_, after), _ = both(made_later, x, big, join_bytes=256)
    assert after == {all_reduce(1): 2}
    (_, after), _ = both(made_before, x, big, join_bytes=256)
    assert after == {all_reduce(2): 1}
    # With a limit above the large value it may wait, but the sum depends on it.
    (_, after), _ = both(made_later, x, big, join_bytes=4096)
    assert after == {all_reduce(1): 2}


def test_the_limit_is_on_each_operand():
    x, y = rows(8, 16), rows(8, 17)
    f = lambda x, y: (x.sum(0), y.sum(0), x.sum())  # noqa: E731
    (_, after), _ = both(f, x, y, join_bytes=4 * 16)
    assert sum(after.values()) == 2 and after == {all_reduce(17): 2}  # 16 + 1 in one, and 17
    (before, after), _ = both(f, x, y, join_bytes=0)
    assert before == after


def test_gradients_of_a_scan_are_joined_per_step():
    """The scatters of a layer's norms, and the sums over data that read what they give: one each per layer."""
    layers, limit = 3, 4 * 32  # a norm of 32
    s = setup({"data": 2, "fsdp": 2}, layers=layers)
    programs = [
        ft.compile(s.step, mesh=s.mesh, rules=s.rules, passes=p).lower(s.state, s.batch) for p in (OFF, joining(limit))
    ]
    before, after = map(reductions, programs)
    norm, shard = ("reduce_scatter", "fsdp", "float32", 32), all_reduce(16)
    assert before[norm] == 2 * layers + 1 and before[shard] == 2 * layers + 1
    assert after[norm] == 1 and after[shard] == 1  # the last norm, outside the scan
    assert after["reduce_scatter", "fsdp", "float32", 64] == layers and after[all_reduce(32)] == layers
    sent = [p.collectives().total for p in programs]
    assert sent[0] == sent[1]


@pytest.mark.parametrize("axes", [{"data": 2, "fsdp": 2}], ids=str)
def test_a_train_step_keeps_its_bits_and_equals_one_device(axes):
    s = setup(axes)
    (before, after), program = both(s.step, s.state, s.batch, mesh=s.mesh, rules=s.rules)
    assert sum(after.values()) < sum(before.values()) / 2
    assert program.memory().peak > 0
    report = ft.check(s.step, (s.state, s.batch), s.mesh, s.rules, layouts=False, passes=joining())
    assert report, report
