"""Process meshes equal the simulated mesh, through shared memory and over gloo."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.runtime.gloo import run_ranks


@pytest.mark.parametrize(
    ("mesh", "transport"), [("fsdp=2", "gloo"), ("tensor=2", "gloo"), ("tensor=2", "auto"), ("data=2", "auto")]
)
def test_two_processes_equal_the_simulated_mesh_bit_for_bit(mesh: str, transport: str) -> None:
    """With two addends a sum has one order, so the bits are equal over gloo too."""
    run_ranks(2, "tests.runtime.ranks_llama", mesh, "float32", "0", "1", transport=transport)


@pytest.mark.parametrize("pending", [[], ["fsdp"]], ids=["sharded", "pending"])
def test_microbatches_on_two_processes(pending: list[str]) -> None:
    run_ranks(2, "tests.runtime.ranks_llama", "fsdp=2", "float32", "0", "2", *pending)


@pytest.mark.parametrize("mesh", ["fsdp=4", pytest.param("fsdp=2,tensor=2", marks=pytest.mark.slow)])
def test_four_processes_equal_the_simulated_mesh_bit_for_bit(mesh: str) -> None:
    run_ranks(4, "tests.runtime.ranks_llama", mesh, "float32", "0", "1")


def test_four_processes_over_gloo_equal_the_simulated_mesh() -> None:
    """Gloo adds up four parts in another order."""
    run_ranks(4, "tests.runtime.ranks_llama", "fsdp=4", "float64", "1e-12", "1", transport="gloo")


@pytest.mark.parametrize(
    ("mesh", "dtype", "transport"),
    [
        ("data=2,tensor=2", "float32", "gloo"),
        pytest.param("data=2,tensor=2", "int64", "auto", marks=pytest.mark.slow),
    ],
)
def test_programs_that_only_move_data_on_four_processes(mesh: str, dtype: str, transport: str) -> None:
    """Every way to lay a value over the mesh, and exchanges in bodies: the same bits."""
    run_ranks(4, "tests.runtime.ranks_moves", mesh, dtype, transport=transport)


def test_one_process_of_a_machine_compiles_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    first, second = (
        re.search(r"graphs (\d+), cached (\d+)", out) for out in run_ranks(2, "tests.runtime.ranks_compile")
    )
    assert first is not None and second is not None
    assert int(first[1]) > 0 and int(first[2]) == 0
    assert second[1] == second[2] == first[1]


def _functitan(*arguments: str, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "functitan.cli.main", *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def _alive(session: int) -> list[str]:
    """The processes of a session."""
    found = subprocess.run(["ps", "-o", "pid=,args=", "-s", str(session)], capture_output=True, text=True, check=False)
    return found.stdout.split("\n")[:-1]


SMALL = [f"--set={s}" for s in ("model.layers=1", "model.dim=32", "model.heads=2", "model.kv_heads=2", "data.seq=16")]


def test_an_error_on_all_ranks_is_shown_once(tmp_path: Path) -> None:
    job = _functitan("train", "llama3-debug", "--mesh", "fsdp=3", "--nproc", "3", "--steps", "1", folder=tmp_path)
    out, err = job.communicate(timeout=60)
    assert job.returncode == 2
    assert err.count("error:") == 1 and "data.batch=8 is not divisible by the 3 parts" in err
    assert "Traceback" not in out + err
    assert not list(tmp_path.iterdir())


def test_interrupting_leaves_nothing_behind(tmp_path: Path) -> None:
    job = _functitan(
        "train", "llama3-debug", "--mesh", "fsdp=2", "--nproc", "2", "--steps", "100000", *SMALL, folder=tmp_path
    )
    assert job.stdout is not None
    assert job.stdout.readline().startswith("step")  # training has begun
    os.killpg(job.pid, signal.SIGINT)
    job.communicate(timeout=30)
    end = time.monotonic() + 10
    while _alive(job.pid) and time.monotonic() < end:
        time.sleep(0.1)
    assert not _alive(job.pid)
    assert job.returncode != 0
