"""The table of collectives: bytes from formulas, totals, and what is printed."""

import functitan as ft
from functitan.compiler.collectives import Collectives, tail
from tests.compiler.mlp import D, F, L, Sizes, lowered


def test_fsdp_bytes_and_reasons():
    """One gather per parameter and use, one reduce-scatter per gradient, each (n - 1) / n of the whole."""
    found = lowered(fsdp=4).collectives()
    each = 4 * D * F * 3 // 4
    gathers = found.of(kind="all_gather", axes=("fsdp",))
    assert [(c.param, c.backward, c.count, c.nbytes) for c in gathers] == [
        ("state/params/up", False, L, each),
        ("state/params/down", False, L, each),
        ("state/params/down", True, L, each),
        ("state/params/up", True, L, each),
    ]
    scatters = found.of(kind="reduce_scatter")
    assert sorted(c.param for c in scatters) == ["state/params/down", "state/params/up"]
    assert all((c.backward, c.count, c.nbytes, c.dtype) == (True, L, each, "float32") for c in scatters)
    assert all(c.where in ("block", "block.backward") for c in (*gathers, *scatters))
    rest = [c for c in found if c not in gathers and c not in scatters]
    assert all(c.kind == "all_reduce" and c.nbytes <= 64 for c in rest)


def test_tensor_bytes_and_lines():
    sizes = Sizes(1, 1, 2)
    found = lowered(tensor=2).collectives()
    moved = [c for c in found if c.kind in ("all_gather", "reduce_scatter")]
    assert [(c.kind, c.backward, c.count) for c in moved] == [
        ("all_gather", False, L),
        ("reduce_scatter", False, L),
        ("all_gather", True, L),
        ("reduce_scatter", True, L),
    ]
    # Half of the whole stream, which is twice what a rank holds.
    assert all(c.nbytes == sizes.stream and c.line.startswith("mlp.py:") for c in moved)
    assert moved[0].why == "constrain(batch, inner_seq, embed)"


def test_totals_and_top():
    found = lowered(data=2, fsdp=2, tensor=2).collectives()
    totals = found.totals()
    assert sum(n for n, _ in totals.values()) == found.runs == sum(c.count for c in found)
    assert sum(b for _, b in totals.values()) == found.total == sum(c.total for c in found)
    top = found.top(3)
    assert isinstance(top, Collectives) and len(top) == 3 and top[0].total >= top[1].total >= top[2].total
    assert max(c.total for c in found) == top[0].total
    assert found[0] in found and found[:2] == (found[0], found[1])


def test_the_table():
    found = lowered(data=2, fsdp=2, tensor=2).collectives()
    lines = str(found).splitlines()
    assert lines[0].split() == [
        "collective",
        "over",
        "axes",
        "count",
        "x",
        "bytes",
        "sent",
        "pass",
        "of",
        "why",
    ]
    assert len(lines) == 1 + len(found) + 1 + 1 + len(found.totals()) + 1
    assert max(map(len, lines)) <= 100
    assert any(
        line.startswith("all_gather fsdp") and "4 x 2.0 KiB f32" in line and "params/up" in line for line in lines
    )
    assert lines[-1].startswith("all")
    assert str(lowered().collectives()) == "no collectives: no rank sends anything"
    assert tail("a/b/c") == "b/c"


def test_machine_readable():
    rows = lowered(fsdp=2).collectives().to_json()
    assert rows[0]["kind"] == "all_gather" and rows[0]["total"] == rows[0]["count"] * rows[0]["nbytes"]


def test_nothing_is_sent_on_one_rank():
    assert lowered(remat=ft.nothing_saveable).collectives() == ()
