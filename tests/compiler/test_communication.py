"""Which collectives a Llama train step sends, from formulas: counts and bytes, and nothing that is not listed."""

from __future__ import annotations

from collections import Counter
from math import prod

import pytest

import functitan as ft
from tests.compiler.llama import Setup, param_bytes, setup

LAYERS = 3
B, S = 8, 16
F32 = 4


def sent(s: Setup) -> Counter:
    """(kind, axes, what, bytes each) -> times per step; ``what`` is a parameter, or "" for values."""
    program = ft.compile(s.step, mesh=s.mesh, rules=s.rules, passes=ft.Passes.off()).lower(s.state, s.batch)
    found: Counter = Counter()
    for c in program.collectives():
        found[(c.kind, "+".join(c.axes), c.param.removeprefix("state/params/"), c.nbytes)] += c.count
    return found


def times(path: str) -> int:
    return LAYERS if path.startswith("layers/") else 1


def gather(nbytes: float, n: int) -> int:
    return int(nbytes * (n - 1) / n)


def all_reduce(nbytes: float, n: int) -> int:
    return int(-(-2 * nbytes * (n - 1) // n))


#: Loss and label count are scalars of the step; they are added up once each.
def scalars(axes: str, n: int) -> Counter:
    return Counter({("all_reduce", axes, "", all_reduce(F32, n)): 1, ("all_reduce", axes, "", all_reduce(8, n)): 1})


def test_data_parallel() -> None:
    """Pure data parallelism: one reduction per parameter, nothing for the clip norm."""
    s = setup({"data": 4}, layers=LAYERS)
    want = scalars("data", 4)
    for path, nbytes in param_bytes(s).items():
        want[("all_reduce", "data", path, all_reduce(nbytes, 4))] += times(path)
    assert sent(s) == want


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("remat", [None, ft.nothing_saveable], ids=["default", "nothing_saveable"])
def test_fsdp(tied: bool, remat: object) -> None:
    """One gather in forward, one in backward, one scatter per parameter, one joined sum for the clip norm.

    What nothing_saveable computes again reads the parameters that backward gathers anyway.
    """
    s = setup({"fsdp": 4}, layers=LAYERS, tied=tied, remat=remat)
    want = scalars("fsdp", 4)
    for path, nbytes in param_bytes(s).items():
        # The table's backward does not read it. A tied table is read by the head too: forward has it already.
        uses = 1 if path == "tok_embeddings" and not tied else 2
        want[("all_gather", "fsdp", path, gather(nbytes, 4))] += uses * times(path)
        want[("reduce_scatter", "fsdp", path, gather(nbytes, 4))] += times(path)
    want[("all_reduce", "fsdp", "", all_reduce(8, 4))] += 1  # the squared norm, float64
    assert sent(s) == want


def test_hybrid_sharding() -> None:
    """data (replicated) x fsdp (sharded): what was scattered over fsdp is added up over data, on the shard."""
    s = setup({"data": 2, "fsdp": 2}, layers=LAYERS)
    want = scalars("data+fsdp", 4)
    for path, nbytes in param_bytes(s).items():
        uses = 1 if path == "tok_embeddings" else 2
        want[("all_gather", "fsdp", path, gather(nbytes, 2))] += uses * times(path)
        want[("reduce_scatter", "fsdp", path, gather(nbytes, 2))] += times(path)
        want[("all_reduce", "data", path, all_reduce(nbytes / 2, 2))] += times(path)
    want[("all_reduce", "fsdp", "", all_reduce(8, 2))] += 1
    assert sent(s) == want


@pytest.mark.parametrize("remat", [None, ft.nothing_saveable], ids=["default", "nothing_saveable"])
def test_tensor_with_sequence_sharding(remat: object) -> None:
    """Per layer 2 gathers and 2 scatters forward, 2 and 2 backward; nothing_saveable repeats the forward ones."""
    n = 4
    s = setup({"tensor": n}, layers=LAYERS, remat=remat)
    stream = B * S * s.config.dim * F32
    rows = B * S * F32
    want: Counter = Counter()
    # Embedding scatter, head gather, and their gradients, beside the layers'.
    forward = 2 * LAYERS + 1
    want[("all_gather", "tensor", "", gather(stream, n))] += 2 * forward
    want[("reduce_scatter", "tensor", "", gather(stream, n))] += 2 * forward
    if remat is not None:
        # Recomputed up to where backward needs it: both gathers, and the attention's scatter.
        want[("all_gather", "tensor", "", gather(stream, n))] += 2 * LAYERS
        want[("reduce_scatter", "tensor", "", gather(stream, n))] += LAYERS
    # A loss over a split vocabulary: maximum, sum of exponentials, the label's logit.
    want[("all_reduce", "tensor", "", all_reduce(rows, n))] += 3
    # Norm scales meet different rows of the sequence on each rank.
    for path, nbytes in param_bytes(s).items():
        if "norm" in path:
            want[("all_reduce", "tensor", path, all_reduce(nbytes, n))] += times(path)
    want[("all_reduce", "tensor", "", all_reduce(8, n))] += 1  # the clip norm
    assert sent(s) == want


def test_tensor_without_sequence_sharding() -> None:
    """Per layer 2 all-reduces forward and 2 backward."""
    n = 4
    s = setup({"tensor": n}, layers=LAYERS, sequence_sharding=False)
    stream, rows = B * S * s.config.dim * F32, B * S * F32
    want: Counter = Counter()
    want[("all_reduce", "tensor", "", all_reduce(stream, n))] += 2 * (2 * LAYERS + 1)
    want[("all_reduce", "tensor", "", all_reduce(rows, n))] += 3
    want[("all_reduce", "tensor", "", all_reduce(8, n))] += 1
    assert sent(s) == want


def test_loss_parallel_head_gathers_no_logits() -> None:
    """Three reductions forward for a vocabulary that is split, none backward."""
    s = setup({"tensor": 4}, layers=LAYERS)
    program = ft.compile(s.step, mesh=s.mesh, rules=s.rules, passes=ft.Passes.off()).lower(s.state, s.batch)
    own = [c for c in program.collectives() if c.line.startswith("loss.py")]
    assert [(c.kind, c.backward) for c in own] == [("all_reduce", False)] * 3


def test_a_split_vocabulary_is_nowhere_whole() -> None:
    """Neither logits nor the mask that finds the label's logit, forward and backward: each rank makes its part."""
    s = setup({"tensor": 4}, layers=LAYERS, vocab=96)
    program = ft.compile(s.step, mesh=s.mesh, rules=s.rules, passes=ft.Passes.off()).lower(s.state, s.batch)
    shapes = {tuple(n.meta["val"].shape) for n in program.graph.nodes if hasattr(n.meta.get("val"), "shape")}
    assert any(shape[-1:] == (96 // 4,) for shape in shapes)
    assert not [shape for shape in shapes if len(shape) == 3 and shape[-1] == 96]


PRODUCTS = [
    pytest.param(dict(fsdp=2, tensor=2), True, id="FSDP x TP+SP"),
    pytest.param(dict(fsdp=2, tensor=2), False, id="FSDP x TP", marks=pytest.mark.slow),
    pytest.param(dict(fsdp=4, tensor=2), True, id="wide FSDP x TP+SP", marks=pytest.mark.slow),
    pytest.param(dict(data=2, tensor=2), True, id="DDP x TP+SP"),
    pytest.param(dict(data=2, tensor=2), False, id="DDP x TP", marks=pytest.mark.slow),
    pytest.param(dict(data=2, fsdp=2, tensor=2), True, id="HSDP x TP+SP"),
    pytest.param(dict(data=2, fsdp=2, tensor=2), False, id="HSDP x TP", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("axes", "sequence_sharding"), PRODUCTS)
def test_products(axes: dict[str, int], sequence_sharding: bool) -> None:
    """Each axis sends what it would alone, on the parts that the others leave; the loss is over a split vocabulary."""
    s = setup(axes, layers=LAYERS, sequence_sharding=sequence_sharding)
    data, fsdp, tensor = (axes.get(a, 1) for a in ("data", "fsdp", "tensor"))
    batch_axes = "+".join(a for a in ("data", "fsdp") if axes.get(a, 1) > 1)
    want = scalars(batch_axes, data * fsdp)
    for path, nbytes in param_bytes(s).items():
        norm = "norm" in path
        part = nbytes if norm else nbytes // tensor  # what compute reads: a norm's scale is whole over "tensor"
        if fsdp > 1:
            uses = 1 if path == "tok_embeddings" else 2
            want[("all_gather", "fsdp", path, gather(part, fsdp))] += uses * times(path)
            want[("reduce_scatter", "fsdp", path, gather(part, fsdp))] += times(path)
        # Over a split sequence, a norm's scale meets other rows on each rank of "tensor" as well.
        adding = {"data": data} | ({"tensor": tensor} if norm and sequence_sharding else {})
        ways = prod(adding.values())
        if ways > 1:
            over = "+".join(a for a, n in adding.items() if n > 1)
            want[("all_reduce", over, path, all_reduce(part / fsdp, ways))] += times(path)
    stream, rows = B * S * s.config.dim * F32 // (data * fsdp), B * S * F32 // (data * fsdp)
    moves = 2 * (2 * LAYERS + 1)  # two per layer, and embedding and head one each, forward and backward
    if sequence_sharding:
        want[("all_gather", "tensor", "", gather(stream, tensor))] += moves
        want[("reduce_scatter", "tensor", "", gather(stream, tensor))] += moves
    else:
        want[("all_reduce", "tensor", "", all_reduce(stream, tensor))] += moves
    want[("all_reduce", "tensor", "", all_reduce(rows, tensor))] += 3  # the loss-parallel head
    norm_axes = [a for a in ("fsdp", "tensor") if axes.get(a, 1) > 1]
    want[("all_reduce", "+".join(norm_axes), "", all_reduce(8, prod(axes[a] for a in norm_axes)))] += 1  # the clip norm
    assert sent(s) == want


def test_size_one_axes_send_nothing() -> None:
    s = setup({}, layers=LAYERS)
    assert not sent(s)


def test_lowered_text_is_the_same_for_every_depth() -> None:
    """The same number of nodes for 6 and 126 layers."""
    counts = set()
    for layers in (6, 126):
        s = setup({"fsdp": 2, "tensor": 2}, layers=layers, dim=16, mlp_dim=16, batch=2, seq=4)
        counts.add(
            ft.compile(s.step, mesh=s.mesh, rules=s.rules, passes=ft.Passes.off()).lower(s.state, s.batch).nodes()
        )
    assert len(counts) == 1
