"""The owned layout: the bits of one rank on any mesh, every matrix worked on once, exact bytes, and its order."""

import json
import math

import pytest
import torch
from spmd_types.types import PartitionSpec as P

import functitan as ft
from functitan import _torch, optim, tree
from functitan.compiler.flops import flops
from functitan.compiler.owned import Exchange, Orthogonalize
from functitan.errors import ArgumentError, ShardingError
from functitan.optim.newton_schulz import newton_schulz_flops
from functitan.runtime.lockstep import Lockstep
from functitan.sharding.array import abstract_array
from functitan.sharding.logical import layout_of
from tests.optim.owned import EXPERT_SPECS, EXPERTS, SHAPES, SPECS, TENSOR, lowered, owned, run_on, run_plain, trees
from tests.optim.stacked import mesh_of, normal

WORK = sum(newton_schulz_flops(s, 5) for s in SHAPES.values())
ELEMENTS = sum(math.prod(s) for s in SHAPES.values())


def equal(found, expected):
    assert tree.structure(found) == tree.structure(expected)
    for (path, a), b in zip(tree.flatten_with_paths(found)[0], tree.leaves(expected), strict=True):
        assert torch.equal(a, b), f"{path} differs by {(a - b).abs().max()}"


@pytest.mark.parametrize("settings", [{}, {"ns_dtype": torch.float32, "as_torch": True}], ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_any_number_of_ranks_gives_the_bits_of_plain_torch(ranks, settings):
    rule = owned(**settings)
    equal(run_on(rule, mesh_of(fsdp=ranks)), run_plain(rule))


@pytest.mark.parametrize("bucket_bytes", [1, 1500, 1 << 20])
def test_buckets_do_not_change_a_bit(bucket_bytes):
    rule = owned(bucket_bytes=bucket_bytes)
    equal(run_on(rule, mesh_of(fsdp=2)), run_plain(rule))


@pytest.mark.parametrize(
    "mesh,axes,specs",
    [
        ({"fsdp": 2, "tensor": 2}, ("fsdp", "tensor"), TENSOR),
        ({"fsdp": 2, "tensor": 2}, ("fsdp",), TENSOR),  # gathered over tensor first
        ({"data": 2, "fsdp": 2}, ("data", "fsdp"), SPECS),  # replicas share the work
        ({"data": 2, "fsdp": 2}, ("fsdp",), SPECS),  # or each does its own
        ({"data": 3}, ("data",), SPECS),  # nothing is split
        ({"fsdp": 2, "tensor": 3}, ("tensor", "fsdp"), {**SPECS, "wq": P("tensor", "fsdp", None)}),
    ],
    ids=str,
)
def test_axes_that_split_copy_or_hold_layers(mesh, axes, specs):
    rule = owned(axes, bucket_bytes=3000)
    equal(run_on(rule, mesh_of(**mesh), specs), run_plain(rule))


@pytest.mark.parametrize(
    "sizes,bucket_bytes",
    [
        ({"fsdp": 2, "tensor": 2}, 1),
        ({"fsdp": 2, "tensor": 2}, 1 << 20),
        ({"tensor": 4, "fsdp": 3}, 3000),
        ({"fsdp": 4, "tensor": 2}, 3000),
    ],
    ids=str,
)
def test_groups_of_ranks_with_owners_of_their_own(sizes, bucket_bytes):
    """A group that has a large matrix besides its experts has other owners for them than its neighbour."""
    rule, values, mesh = owned(("fsdp", "tensor"), bucket_bytes=bucket_bytes), trees(3, EXPERTS), mesh_of(**sizes)
    equal(run_on(rule, mesh, EXPERT_SPECS, values), run_plain(rule, values))
    program = lowered(rule, mesh, EXPERT_SPECS, values[:2])
    (plan,) = program.plans()
    experts = [b for b in plan.buckets if b.apart]
    assert {b.apart for b in experts} == {("tensor",)}
    assert any(len(set(b.owners)) > 1 for b in experts)
    assert sum(plan.loads) == sum(newton_schulz_flops(s, 5) for s in EXPERTS.values())
    fsdp, ranks = sizes["fsdp"], mesh.size
    # Experts within their groups; each way everything but what stays where it is.
    among = {"experts": fsdp, "dense": ranks, "wq": ranks}
    exact = sum(math.prod(s) * 2 * (among[k] - 1) // among[k] for k, s in EXPERTS.items())
    assert sum(plan.received("in")) == sum(plan.received("out")) == exact
    sent = [c for c in program.collectives()]
    assert exact * 2 / ranks <= sum(c.nbytes * c.count for c in sent) <= exact * 2 / ranks + len(sent)
    assert len(sent) == 2 * len(plan.buckets) and {(c.kind, c.dtype) for c in sent} == {("all_to_all", "bfloat16")}
    assert "0 unchecked" in str(ft.verify(program))


def test_ranks_without_a_matrix_and_a_zero_gradient():
    shapes = {"a": (4, 8), "b": (1, 8)}
    values = [{k: x * (i != 1) for k, x in t.items()} for i, t in enumerate(trees(shapes=shapes))]
    rule = owned()
    specs = {"a": P("fsdp", None), "b": P(None, "fsdp")}
    equal(run_on(rule, mesh_of(fsdp=4), specs, values), run_plain(rule, values))
    (plan,) = lowered(rule, mesh_of(fsdp=4), specs, values[:2]).plans()
    assert plan.matrices() == [1, 1, 0, 0]


def test_a_tree_without_a_matrix_has_an_empty_plan():
    """A stage of a pipeline may have none."""
    rule, mesh = owned(), mesh_of(fsdp=2)
    state = ft.compile(rule.init, mesh=mesh)({})
    program = ft.compile(rule.update, mesh=mesh).lower({}, state, {})
    assert not program.plans() and not program.collectives()
    assert rule.update({}, rule.init({}), {})[0] == {}


@pytest.mark.parametrize("layout", ["owned", "stacked", "gathered"])
def test_a_gradient_is_whole_before_it_is_orthogonalised(layout):
    """Each rank has the addend of its share of the batch; orthogonalising addends would be another rule."""
    axes = () if layout == "gathered" else ("fsdp",)
    rule = optim.muon(0.02, layout=layout, axes=axes, ns_dtype=torch.float64)
    x, y, w = normal((2, 8, 6), 0).double(), normal((2, 8, 4), 1).double(), normal((2, 6, 4), 2).double()

    def step(x, y, state, params):
        return rule.update({"w": x.mT @ y}, state, params)[0]["w"]

    mesh, batch = mesh_of(fsdp=2), P(None, "fsdp", None)
    params = {"w": ft.device_put(w, batch, mesh)}
    state = ft.compile(rule.init, mesh=mesh)(params)
    found = ft.compile(step, mesh=mesh)(ft.device_put(x, batch, mesh), ft.device_put(y, batch, mesh), state, params)
    torch.testing.assert_close(found.full(), step(x, y, rule.init({"w": w}), {"w": w}), rtol=0, atol=1e-12)


def test_padding_that_is_declared_stays_zero_and_keeps_the_bits():
    """Three rows of fifteen are padding, so that four ranks divide it."""
    values = trees(shapes={"w": (2, 12, 20), "v": (2, 20, 24)})
    for t in values:
        t["w"][:, 9:] = 0
    rule = owned(ns_dtype=torch.float32)
    specs = {"w": P(None, "fsdp", None), "v": P(None, "fsdp", None)}
    found = run_on(rule, mesh_of(fsdp=4), specs, values)
    equal(found, run_plain(rule, values))
    assert not found[0]["w"][:, 9:].any()


@pytest.mark.parametrize(
    "specs", [SPECS, {**SPECS, "up": P(None, "fsdp", None), "down": P(None, "fsdp")}], ids=["", "other"]
)
def test_blocks_are_cut_from_whole_matrices(specs):
    """The boundary of a rank's part lies inside a block; a block has its own shape in c(A, B)."""
    blocks = {"up": optim.Blocks(-1, (5, 7, 24)), "down": optim.Blocks(-2, 12)}
    rule = owned(blocks=blocks, scale="match_rms")
    equal(run_on(rule, mesh_of(fsdp=4), specs), run_plain(rule))
    apart = {"q": (24, 5), "k": (24, 7), "v": (24, 24)}
    single = [{f"{k}{i}": t["up"][i].split([5, 7, 24], -1)[j].contiguous() for i in range(5) for j, k in enumerate(apart)}
              for t in trees()]  # fmt: skip
    alone, _ = run_plain(optim.muon(0.02, scale="match_rms"), single)
    fused = run_on(rule, mesh_of(fsdp=2), specs)[0]["up"]
    for i in range(5):
        assert torch.equal(fused[i], torch.cat([alone[f"{k}{i}"] for k in apart], -1))


def test_convolutions_are_matrices():
    values = trees(shapes={"conv": (8, 4, 3, 3), "w": (8, 12)})
    rule = owned(convs={"conv": 2})
    specs = {"conv": P("fsdp", None, None, None), "w": P("fsdp", None)}
    equal(run_on(rule, mesh_of(fsdp=4), specs, values), run_plain(rule, values))


def _calls(rule, mesh):
    """The shapes and dtypes that Newton-Schulz is called with on all ranks together in one step."""
    found = []

    class Watch(_torch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.functitan.orthogonalize.default:
                found.extend((tuple(x.shape), args[3]) for x in args[0] if not isinstance(x, _torch.FakeTensor))
            return func(*args, **(kwargs or {}))

    values = trees(2)
    with Watch():
        run_on(rule, mesh, values=values)
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_all_ranks_together_do_the_work_of_one(ranks):
    """Counted while it runs, in the plan, and in the graph of each rank."""
    rule = owned(bucket_bytes=2000)
    ran = _calls(rule, mesh_of(fsdp=ranks))
    assert sum(newton_schulz_flops(shape, 5) for shape, _ in ran) == WORK
    assert {dtype for _, dtype in ran} == {torch.bfloat16}
    if ranks > 1:
        program = lowered(rule, mesh_of(fsdp=ranks))
        (plan,) = program.plans()
        assert sum(plan.loads) == WORK and sum(plan.matrices()) == 10
        assert sum(times * flops(node) for _, node, times in program.calls()) == max(plan.loads)
        assert plan.balance <= max(plan.bound * 1.01, 4 / 3)
        (told,) = json.loads(program.to_json())["plans"]
        assert told["flops"] == list(plan.loads) and told["hash"] == plan.hash and len(told["received_in"]) == ranks


@pytest.mark.parametrize("ranks", [8, 64, 1024])
def test_the_work_of_large_meshes_adds_up(ranks):
    mesh = ft.abstract_mesh({"fsdp": ranks})
    shapes = {"wq": (40, 1024, 1024), "up": (33, 1024, 3072)}
    arrays = {k: _abstract(s, mesh) for k, s in shapes.items()}
    rule = owned()
    state = ft.compile(rule.init, mesh=mesh).lower(arrays)
    pairs = zip(state.out_types, state.out_layouts, strict=True)
    leaves = [abstract_array(t.shape, t.dtype, lay, mesh) for t, lay in pairs]
    program = ft.compile(rule.update, mesh=mesh).lower(arrays, tree.unflatten(state.out_tree, leaves), arrays)
    (plan,) = program.plans()
    nodes = [n for _, n, _ in program.calls() if isinstance(n.target, Orthogonalize)]
    whole = sum(newton_schulz_flops(s, 5) for s in shapes.values())
    assert sum(f for n in nodes for row in n.target.what.flops for f in row) == sum(plan.loads) == whole
    sent = program.collectives()
    elements = sum(math.prod(s) for s in shapes.values())
    exact = 2 * elements * 2 * (ranks - 1) / ranks**2
    assert exact <= sent.total <= exact + sent.runs  # each is rounded up to a byte
    assert {(c.kind, c.dtype) for c in sent} == {("all_to_all", "bfloat16")}


def _abstract(shape, mesh):
    return abstract_array(shape, torch.float32, layout_of(shape, P(None, "fsdp", None), mesh, "w"), mesh)


@pytest.mark.parametrize(
    "settings,dtype",
    [({}, "bfloat16"), ({"ns_dtype": torch.float32}, "float32"),
     ({"ns_dtype": torch.float32, "wire_dtype": torch.bfloat16}, "bfloat16")],
)  # fmt: skip
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_bytes_are_exact_both_ways(ranks, settings, dtype):
    """(R - 1) / R^2 of all elements a rank, each way; nothing is padded, whatever the numbers of matrices are."""
    size = getattr(torch, dtype).itemsize
    program = lowered(owned(**settings), mesh_of(fsdp=ranks))
    found = program.collectives()
    each = ELEMENTS * size * (ranks - 1) / ranks**2
    assert [c.nbytes for c in found] == [math.ceil(each)] * 2
    assert {(c.kind, c.axes, c.dtype) for c in found} == {("all_to_all", ("fsdp",), dtype)}
    (plan,) = program.plans()
    assert sum(plan.received("in")) == sum(plan.received("out")) == ELEMENTS * size * (ranks - 1) // ranks


def test_what_is_sent_is_what_the_plan_says():
    """The parts that ranks give to exchanges while a step runs."""
    mesh = mesh_of(fsdp=4)
    program = lowered(owned(), mesh)
    seen = {}
    params, grads = trees(2)
    state = ft.compile(owned().init, mesh=mesh)({k: ft.device_put(x, SPECS[k], mesh) for k, x in params.items()})
    arrays = [*tree.leaves({k: ft.device_put(x, SPECS[k], mesh) for k, x in grads.items()}), *tree.leaves(state),
              *tree.leaves({k: ft.device_put(x, SPECS[k], mesh) for k, x in params.items()})]  # fmt: skip
    columns = [x.shards if isinstance(x, ft.Array) else [x] * 4 for x in arrays]

    def observe(name, node, values):
        if isinstance(node.target, Exchange):
            seen[node.target.way] = [v.numel() for v in values]

    Lockstep(mesh, program.bodies, observe).graph("step", program.graph, columns)
    (plan,) = program.plans()
    (bucket,) = plan.buckets
    assert seen == {"in": [4 * n for n in bucket.elements[0]], "out": [bucket.sent] * 4}
    assert [2 * (n - n // 4) for n in seen["in"]] == plan.received("in")


@pytest.mark.parametrize("bucket_bytes", [1, 2100, 1 << 20])
def test_two_collectives_for_a_bucket_and_no_gather(bucket_bytes):
    program = lowered(owned(bucket_bytes=bucket_bytes), mesh_of(fsdp=4))
    (plan,) = program.plans()
    assert {c.kind for c in program.collectives()} == {"all_to_all"}
    assert program.collectives().runs == 2 * len(plan.buckets)
    assert len(plan.buckets) == {1: 3, 2100: 2, 1 << 20: 1}[bucket_bytes]


def test_matrices_that_are_whole_in_storage_do_not_move():
    specs = {"wq": P(None, None, None), "up": P("fsdp", None, None), "down": P(None, None), "head": P(None, None)}
    values = trees(2, {**SHAPES, "up": (6, 24, 36)})
    mesh = mesh_of(fsdp=2)
    experts = [{"up": t["up"]} for t in values]
    assert not lowered(owned(), mesh, specs, experts).collectives()
    # Where every rank holds every matrix the work is shared, and only results move.
    (plan,) = lowered(owned(), mesh, specs, values).plans()
    assert plan.received("in") == [0, 0] and min(plan.received("out")) > 0


def test_a_bucket_is_on_its_way_while_the_one_before_is_worked_on():
    program = lowered(owned(bucket_bytes=1), mesh_of(fsdp=2))
    order = {}
    for i, (_, node, _) in enumerate(program.calls()):
        if isinstance(node.target, Exchange):
            order[node.target.way, node.target.bucket] = i
            (wait,) = node.users
            order["wait " + node.target.way, node.target.bucket] = [n for _, n, _ in program.calls()].index(wait)
        elif isinstance(node.target, Orthogonalize):
            order["work", node.target.bucket] = i
    last = max(b for _, b in order)
    assert last >= 3
    for b in range(last):
        assert order["in", b + 1] < order["wait in", b] < order["work", b] < order["out", b]
        assert order["work", b + 1] < order["wait out", b]
        # Two buckets at a time: results are back before the one after the next is worked on.
        if b + 2 <= last:
            assert order["wait out", b] < order["work", b + 2]


@pytest.mark.parametrize("buckets", [1, 2, 4, 8])
def test_memory_holds_two_buckets_at_a_time(buckets):
    """Of each the parts that are sent, those that come, the results, and what comes back; one matrix a rank here."""
    values = trees(2, {"w": (4 * buckets, 24, 24)})
    size = 24 * 24 * 2
    program = lowered(owned(bucket_bytes=size), mesh_of(fsdp=4), {"w": P(None, "fsdp", None)}, values)
    (plan,) = program.plans()
    assert len(plan.buckets) == buckets and all(len(set(b.elements[0])) == 1 for b in plan.buckets)
    held = program.memory()["collective buffers"]
    assert held <= min(buckets, 2) * 4 * size
    assert held >= 2 * size


def test_a_new_rate_does_not_compile_again():
    """``run_on`` allows one trace; here the rate follows a schedule."""
    rule = optim.muon(optim.warmup_stable_decay(0.1, steps=4, warmup=2), layout="owned", axes=("fsdp",))
    equal(run_on(rule, mesh_of(fsdp=2), values=trees(5)), run_plain(rule, trees(5)))


def test_every_part_of_a_step_is_verified():
    for mesh, axes, specs in (({"fsdp": 3}, ("fsdp",), SPECS), ({"fsdp": 2, "tensor": 2}, ("fsdp", "tensor"), TENSOR)):
        found = ft.verify(lowered(owned(axes), mesh_of(**mesh), specs))
        assert "0 unchecked" in str(found)


def test_one_device_against_the_mesh_in_float64():
    params, grads = trees(2)
    rule = owned(bucket_bytes=2000)
    state = rule.init(params)
    assert ft.check(rule.update, (grads, state, params), mesh_of(fsdp=2))


def test_the_layout_with_the_lower_load_is_the_default():
    even = trees(2, {"wq": (4, 24, 24), "up": (8, 24, 36)})
    specs = {k: P(None, "fsdp", None) for k in ("wq", "up")} | {"down": P("fsdp", None), "head": P(None, "fsdp")}
    rule = optim.muon(0.02, axes=("fsdp",))
    program = lowered(rule, mesh_of(fsdp=4), specs, even)
    assert not program.plans() and program.collectives().runs == 4
    assert "2 leaves of matrices over fsdp: stacked, since the layers of every leaf divide by 4 ranks" in str(program)
    program = lowered(rule, mesh_of(fsdp=4), specs)
    assert program.plans()
    assert "4 leaves of matrices over fsdp: owned, since 4 ranks do not divide the layers of" in str(program)
    for values in (even, trees()):
        equal(run_on(rule, mesh_of(fsdp=4), specs, values), run_plain(rule, values))


def test_settings_that_do_not_fit():
    with pytest.raises(ArgumentError, match=r'layout="owned" needs the mesh axes that matrices are spread over'):
        optim.muon(0.1, layout="owned")
    with pytest.raises(ArgumentError, match=r'with layout="gathered", where every rank has every matrix'):
        optim.muon(0.1, layout="gathered", axes=("fsdp",))
    with pytest.raises(ShardingError, match=r'unknown mesh axis "fdsp".*Did you mean "fsdp"'):
        lowered(owned(("fdsp",)), mesh_of(fsdp=2))
