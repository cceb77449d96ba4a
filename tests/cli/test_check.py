"""functitan check: on a simulated mesh, and on processes that run op by op or compiled."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import functitan as ft
from functitan.errors import ArgumentError
from tests.cli.test_cli import TINY, call

SETTINGS = [word for setting in TINY for word in ("--set", setting)]


def functitan(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "functitan.cli", *words], capture_output=True, text=True, cwd=folder, timeout=900
    )


def test_inductor_needs_processes(monkeypatch, capsys):
    """A simulated mesh is interpreted: to say that compiled code was checked would be wrong."""
    words = ["check", "llama3-debug", "--mesh", "fsdp=2", "--backend", "inductor"]
    code, out, err = call(monkeypatch, capsys, *words)
    assert code == 2 and not out
    assert "--backend inductor compiles what one process runs" in err and "--nproc 2" in err
    mesh = ft.make_mesh({"data": 2}, simulate=True)
    with pytest.raises(ArgumentError, match='backend="inductor" compiles what one process runs'):
        ft.check(lambda x: x, (), mesh, backend="inductor")
    with pytest.raises(ArgumentError, match="nothing runs on data=2"):
        ft.check(lambda x: x, (), ft.abstract_mesh({"data": 2}))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--mesh", "fsdp=2", "--nproc", "3"],
            "--nproc 3 is one process per rank, and the mesh fsdp=2 has 2; write --nproc 2",
        ),
        (["--nproc", "0"], "--nproc 0 starts no process"),
        (["--nproc", "2", "--backend", "inducto"], "run.backend"),
    ],
)
def test_what_cannot_start_starts_nothing(monkeypatch, capsys, words, said):
    code, out, err = call(monkeypatch, capsys, "check", "llama3-debug", *words)
    assert code == 2 and not out
    assert err.startswith("error: ") and said in err and "process " not in err.split(said)[0]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_two_processes(tmp_path, backend):
    done = functitan("check", "llama3-debug", "--nproc", "2", "--backend", backend, *SETTINGS, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("train_step on data=2") == 1 and "(process): equal" in done.stdout
    assert "gradients on the mesh, float64" in done.stdout and "0 unchecked" in done.stdout


WRONG = '''
from dataclasses import replace
from functitan.recipes import load_recipe
from functitan.sharding import processes


def wrong():
    """The second process scales its loss."""
    recipe = load_recipe("llama3-debug")
    loss = recipe.family.loss

    def scaled(*args, **kwargs):
        total, count = loss(*args, **kwargs)
        return total * (1 + processes.rank() / 100), count

    return recipe.replace(family=replace(recipe.family, loss=scaled))
'''


@pytest.mark.slow
def test_a_difference_between_processes_is_reported_once(tmp_path):
    (tmp_path / "mine.py").write_text(WRONG)
    done = functitan("check", "mine.py:wrong", "--nproc", "2", *SETTINGS, folder=tmp_path)
    assert done.returncode == 1
    assert done.stdout.count("NOT equal") == 1 and "first difference: none when all ranks are" in done.stdout
    assert not done.stderr
