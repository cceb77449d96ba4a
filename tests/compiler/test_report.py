"""The lowered text, the one-screen summary, and JSON."""

import json
import re

import pytest

from functitan.compiler.report import change, comparison, report
from functitan.errors import ArgumentError
from tests.compiler.mlp import lowered


def test_a_line_per_value():
    program = lowered(fsdp=2, tensor=2)
    lines = program.text().splitlines()
    calls = sum(1 for _, graph in program.graphs() for n in graph.nodes if n.op in ("placeholder", "call_function"))
    assert sum(line.startswith(("    %", ">>> %")) for line in lines) == calls
    for line in lines:
        assert not line.strip().startswith("%") or re.match(r"\s+%\w+: \S.* = ", line)
    sent = [line for line in lines if line.startswith(">>> ")]
    assert len(sent) == len(program.collectives())
    (gather,) = [line for line in sent if "state/params/up" in line and "(gradient)" not in line]
    assert re.fullmatch(
        r">>> %all_gather_2: f32\[32,32\] = all_gather\(%\w+\) over fsdp  "
        r"# 2\.0 KiB sent, state/params/up, aten\.mm reads it, mlp\.py:\d+",
        gather,
    )


def test_the_text_depends_on_nothing_but_the_program():
    """Not on the rank, on what was lowered before, or on whether the mesh runs."""
    text = lowered(fsdp=2, tensor=2).text()
    assert text == lowered(fsdp=2, tensor=2).text()
    assert text == lowered(fsdp=2, tensor=2, simulate=True)[0].text()
    assert "%coord_fsdp: i64[] = input" in text


def test_one_body():
    program = lowered(fsdp=2)
    block = program.text("block")
    assert block.splitlines()[0] == "block:" and "block backward:" in block and "step:" not in block
    step = program.text("step")
    assert "block x 4(" in step and "block backward x 4(" in step
    with pytest.raises(ArgumentError, match=r'no body "blok"; there are step, block. Did you mean "block"'):
        program.text("blok")


def test_summary_is_one_screen():
    text = str(lowered(data=2, fsdp=2, tensor=2, hardware="h100"))
    lines = text.splitlines()
    assert len(lines) < 35 and max(map(len, lines)) <= 100
    assert lines[0].startswith("step on data=2, fsdp=2, tensor=2 (abstract): ") and "bodies: block" in lines[0]
    for word in (
        "parameters",
        "optimizer",
        "gradients",
        "saved activations",
        "peak",
        "sent per step",
        "on h100",
    ):
        assert word in text
    assert "on h100" not in str(lowered(fsdp=2))


def test_json_holds_everything():
    program = lowered(data=2, fsdp=2, tensor=2)
    found = json.loads(program.to_json("h100"))
    assert found["mesh"] == {"data": 2, "fsdp": 2, "tensor": 2} and found["ranks"] == 8
    assert found["memory"]["largest"]["parameters"] == program.memory()["parameters"]
    assert found["sent"] == program.collectives().total == sum(c["total"] for c in found["collectives"])
    assert found["cost"]["hardware"] == "h100" and found["cost"]["fits"] is True
    up = next(row for row in found["inputs"] if row["path"] == "state/params/up")
    assert up["layout"] == "(None, fsdp, tensor)" and up["local_shape"] == [4, 16, 32]
    assert json.loads(program.to_json())["cost"] is None


def test_two_meshes_side_by_side():
    rows = [report(p, p.memory(), p.cost("h100")) for p in (lowered(fsdp=4), lowered(fsdp=2, tensor=2))]
    lines = comparison(("fsdp=4", "fsdp=2,tensor=2"), (rows[0], rows[1])).splitlines()
    assert lines[0].split()[-3:] == ["fsdp=4", "fsdp=2,tensor=2", "change"]
    assert any(re.match(r"parameters +16\.0 KiB +16\.0 KiB +=", line) for line in lines)
    assert any(re.match(r"all_gather tensor +0 +\d+ +0 B .* new", line) for line in lines)
    assert any(line.startswith("time: overlapped") for line in lines)


def test_changes():
    assert [change(*pair) for pair in ((2, 3), (4, 1), (1, 1), (0, 5))] == ["+50%", "-75%", "=", "new"]
