"""The commands that report: lower, show, rules."""

import json
import sys

import pytest

from functitan.cli.main import main
from functitan.nn.models import llama3

MESH = ["--mesh", "data=2,fsdp=2,tensor=2"]


def call(monkeypatch, capsys, *words):
    monkeypatch.setattr(sys, "argv", ["functitan", *words])
    with pytest.raises(SystemExit) as stop:
        main()
    out = capsys.readouterr()
    assert stop.value.code in (0, None), out.err
    lines = out.out.splitlines()
    return out.out, lines


def test_one_screen(monkeypatch, capsys):
    out, lines = call(monkeypatch, capsys, "lower", "llama3-debug", *MESH, "--hardware", "h100")
    assert len(lines) < 40 and max(map(len, lines)) <= 100
    assert lines[0] == "llama3-debug: 6.16 M parameters, 8 x 64 tokens a step"
    for word in (
        "parameters",
        "optimizer",
        "gradients",
        "sent per step",
        "all_gather fsdp",
        "fits",
        "step with overlap",
    ):
        assert word in out
    table = lines[lines.index(next(line for line in lines if line.startswith("collective over axes"))) :]
    assert table.index("") == 6  # a head and the top five


def test_collectives_and_text(monkeypatch, capsys):
    out, lines = call(monkeypatch, capsys, "lower", "llama3-debug", *MESH, "--collectives", "--text")
    assert "per rank and step" in out and "block backward:" in lines and "step:" not in lines
    assert "reduce_scatter tensor" in out
    out, lines = call(monkeypatch, capsys, "lower", "llama3-debug", *MESH, "--body", "step")
    assert "step:" in lines and "block:" not in lines


def test_json(monkeypatch, capsys):
    words = (
        "lower",
        "llama3-debug",
        *MESH,
        "--json",
        "--hardware",
        "mi300x",
        "--set",
        "remat=nothing_saveable",
    )
    found = json.loads(call(monkeypatch, capsys, *words)[0])
    # Every parameter is split over fsdp, and the matrices over tensor too.
    model = llama3.flavor("debugmodel")
    norms = 4 * (2 * model.layers + 1) * model.dim
    rest = 4 * llama3.num_params(model) - norms
    assert found["memory"]["largest"]["parameters"] == norms // 2 + rest // 4
    assert found["cost"]["hardware"] == "mi300x" and found["unused_rules"] == []


def test_two_meshes(monkeypatch, capsys):
    words = ("lower", "llama3-debug", "--mesh", "fsdp=4", "--vs", "fsdp=2,tensor=2", "--hardware", "b200")
    out, lines = call(monkeypatch, capsys, *words)
    assert lines[2].split()[-3:] == ["fsdp=4", "fsdp=2,tensor=2", "change"]
    assert "time: overlapped" in out and max(map(len, lines)) <= 100


def test_an_unknown_chip_is_refused_before_anything_is_lowered(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["functitan", "lower", "llama3-405b", "--hardware", "h10"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2 and 'Did you mean "h100"' in capsys.readouterr().err


def test_a_mesh_that_does_not_fit(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["functitan", "lower", "llama3-debug", "--mesh", "tensor=3"])
    with pytest.raises(SystemExit) as stop:
        main()
    err = capsys.readouterr().err
    assert stop.value.code == 2 and "does not divide by tensor=3" in err and "Traceback" not in err


def test_show(monkeypatch, capsys):
    _, lines = call(monkeypatch, capsys, "show", "llama3-8b", "--mesh", "fsdp=4,tensor=8")
    assert lines[0] == "llama3-8b on fsdp=4, tensor=8"
    (gate,) = [line for line in lines if line.startswith("layers/gate")]
    assert gate.split() == (
        [
            "layers/gate",
            "32x4096x14336",
            "f32",
            "layers,",
            "embed,",
            "mlp",
            "(None,",
            "fsdp,",
            "tensor)",
            "224.0",
            "MiB",
        ]
    )
    assert lines[-1].startswith("8.03 G parameters (8,030,261,248), ") and max(map(len, lines)) <= 100
    assert call(monkeypatch, capsys, "show", "llama3-8b")[1][0] == "llama3-8b on fsdp=8"


def test_rules(monkeypatch, capsys):
    out, lines = call(monkeypatch, capsys, "rules")
    assert "aten.mm" in out and "functitan.attention" in out and max(map(len, lines)) <= 100
    out, _ = call(monkeypatch, capsys, "rules", "embedding")
    assert "functitan.embedding" in out and "aten.mm" not in out


def test_passes(monkeypatch, capsys):
    words = ("lower", "llama3-debug", "--mesh", "fsdp=2", "--passes", "--set", "passes.prefetch=0", "--set")
    out, lines = call(monkeypatch, capsys, *words, "passes.regather=false")
    rows = [line.split()[:2] for line in lines[1 : lines.index("")]]
    names = [name for name, _ in rows]
    assert names == ["regather", "common_subexpressions", "bucket", "join_reductions", "prefetch"]
    assert [name for name, second in rows if second == "off"] == ["regather", "prefetch"]
    assert "block: 9 gathered parameters" in out and "block: 9 all_gather fsdp as one of" in out
