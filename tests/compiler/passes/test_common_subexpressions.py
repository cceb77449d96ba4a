"""Equal values of a graph are computed once; what remat computes again is not undone, and no bit changes."""

from dataclasses import replace

import pytest
import torch

import functitan as ft
from functitan import tree
from functitan.compiler.split import depends_on
from tests.compiler.llama import setup

OFF = ft.Passes.off()
ON = replace(OFF, common_subexpressions=True)
MESH = ft.make_mesh({"data": 2}, simulate=True)
X = ft.device_put(torch.arange(8.0).reshape(4, 2), ft.P("data", None), MESH)


def both(f, *args, mesh=MESH, rules=None):
    """The program without and with the pass; the results are the same bits."""
    compiled = [ft.compile(f, mesh=mesh, rules=rules, passes=p) for p in (OFF, ON)]
    results = [[v.full() if isinstance(v, ft.Array) else v for v in tree.leaves(c(*args))] for c in compiled]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    return [c.lower(*args) for c in compiled]


def count(program, op, where="step"):
    graph = dict(program.graphs())[where]
    return sum(op in str(n.target) for n in graph.nodes)


def test_equal_calls_become_one_and_what_reads_them_too():
    before, after = both(lambda x: (x.sin() * 2).neg() + (x.sin() * 2).neg() + (x.sin() * 3), X)
    assert [count(before, op) for op in ("sin", "mul", "neg")] == [3, 3, 2]
    assert [count(after, op) for op in ("sin", "mul", "neg")] == [1, 2, 1]
    (record,) = [r for r in after.passes if r.name == "common_subexpressions"]
    assert record.before.nodes - record.after.nodes == 4
    assert record.changes == ("step: 4 calls had equals before them: 2 sin, 1 mul, 1 neg",)


def test_numbers_that_compare_equal_are_not_the_same():
    before, after = both(lambda x: (x + 1, x + 1.0, x * 0.0, x * -0.0), X)
    assert count(after, "add") == 2 and count(after, "mul") == 2 and before.nodes() == after.nodes()


def test_random_numbers_of_one_key_are_made_once_of_two_keys_twice():
    key = ft.random.key(0)

    def f(x, key):
        a, b = ft.random.split(key)
        return ft.random.normal(a, (4,)) + ft.random.normal(a, (4,)), ft.random.normal(b, (4,)), x

    before, after = both(f, X, key)
    made = [count(p, "threefry") for p in (before, after)]
    assert made[0] - made[1] == 1


def test_a_result_twice_shares_no_memory():
    a, b = ft.compile(lambda x: (x.sin(), x.sin()), mesh=MESH, passes=ON)(X)
    shards = [p.untyped_storage().data_ptr() for v in (a, b) for p in v.shards]
    assert len(set(shards)) == 4


def gathered(x, w):
    """Two gathers of one weight that the lowering keeps apart: of equal values, not of one value."""
    first = x @ ft.constrain(w.neg(), ft.P(None, None))
    return first, ft.constrain(w.neg(), ft.P(None, None))


W = ft.device_put(torch.arange(6.0).reshape(2, 3), ft.P("data", None), MESH)


def test_a_gathered_value_that_is_still_read_is_not_gathered_again():
    def f(x, w):
        first, again = gathered(x, w)
        more = ft.constrain(w.neg(), ft.P(None, None)).sum()
        return first, more, again.sum()

    before, after = both(f, X, W)
    assert [p.collectives().of(kind="all_gather").runs for p in (before, after)] == [3, 2]
    (one, calls) = next(r for r in after.passes if r.name == "common_subexpressions").changes
    assert one.startswith("step: one all_gather over data of test_common_subexpressions.py:") and "neg" in calls


@pytest.mark.parametrize("remat", [ft.nothing_saveable, ft.dots_saveable], ids=str)
def test_what_a_policy_saves_and_computes_again_stays(remat):
    s = setup({"fsdp": 2}, remat=remat)
    before, after = (
        ft.compile(s.step, mesh=s.mesh, rules=s.rules, passes=p).lower(s.state, s.batch) for p in (OFF, ON)
    )
    assert after.nodes() < before.nodes()
    for a, b in zip(before.bodies.values(), after.bodies.values(), strict=True):
        assert a.saved_inputs == b.saved_inputs
        assert [(v.shape, v.dtype) for v in a.saved_values] == [(v.shape, v.dtype) for v in b.saved_values]
        assert _recomputed(a) == _recomputed(b) == (6 if remat is ft.nothing_saveable else 0)
    for category in ("saved activations", "gathered parameters"):
        assert before.memory()[category] == after.memory()[category]
    assert after.memory().peak <= before.memory().peak


def _recomputed(body):
    """Matrix products that backward computes again, that depend on no cotangent: all but the last of a block."""
    cotangents = [n for n in body.backward.nodes if n.op == "placeholder"][-len(body.tangent_of) :]
    late = depends_on(body.backward, cotangents)
    return sum(n.target is torch.ops.aten.mm.default and n not in late for n in body.backward.nodes)


def test_forward_and_backward_of_a_step_are_not_mixed():
    """Without a region the step holds both: backward gathers the weight again, and no pass holds it instead."""
    declared = {"w": ft.Param((2, 3), ("embed", None))}
    rules = ft.Rules(embed=None, storage=dict(embed="data"))
    params = ft.init(ft.random.key(0), declared, MESH, rules)
    f = ft.value_and_grad(lambda p, x: (x @ p["w"]).sin().sum() + (x.sin() @ p["w"]).sum(), argnums=(0, 1))
    before, after = both(f, params, X, rules=rules)
    assert before.collectives().of(kind="all_gather").runs == after.collectives().of(kind="all_gather").runs == 2


def test_a_sharded_train_step_equals_one_device():
    s = setup({"data": 2, "tensor": 2}, remat=ft.dots_saveable)
    report = ft.check(s.step, (s.state, s.batch), s.mesh, s.rules, layouts=False, passes=ON)
    assert report, report
