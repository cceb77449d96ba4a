"""Each example runs as a user runs it, with small settings, and says what it should."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name, *words):
    """An example's output."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *words], capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_own_model():
    out = run("own_model.py", "--steps", "2")
    assert re.search(r"all_reduce tensor +1 x 1.0 KiB f32 +1.0 KiB +fwd +own_model.py:\d+ +constrain", out)
    assert "train_step on fsdp=2, tensor=2 (simulated): equal" in out
    assert re.search(r"step +2 +one device (\S+) +mesh \1", out)
    assert "[16, 64] as (fsdp, tensor) on fsdp=2, tensor=2; each rank holds [8, 32]" in out


def test_sharding_experiment():
    out = run("sharding_experiment.py", "--steps", "1", "--layers", "1")
    # Without the rule: reductions of whole activations; with it, half of each is a gather and half a scatter.
    whole, split = out.split("seq=tensor:", 1)
    assert "all_gather     over tensor" not in whole and "reduce_scatter over tensor" in split
    assert float(out.rsplit(" ", 1)[1]) < 1e-5


def test_compare_optimizers(tmp_path):
    small = ["model.dim=16", "model.layers=2", "model.heads=2", "model.mlp_dim=32", "data.batch=4", "data.seq=8"]
    small += ["data.validation_batches=1", "model.vocab=260"]
    words = ["--steps", "2", "--rates", "1e-3", "--runs", str(tmp_path), *(w for s in small for w in ("--set", s))]
    for _ in range(2):  # the second time, the runs are read
        out = run("compare_optimizers.py", *words)
    assert re.fullmatch(
        r"\nrule   rate     first loss  last loss  held out\n"
        r"AdamW  0.001 +\d\.\d{4} +\d\.\d{4} +\d\.\d{4}  chosen\n"
        r"Muon   0.001 +\d\.\d{4} +\d\.\d{4} +\d\.\d{4}  chosen\n",
        out,
    )


def test_triton_kernel():
    pytest.importorskip("triton")
    out = run("triton_kernel.py")
    assert re.search(r"f32\[4,48\] \(fsdp, tensor\) = example.silu_mul", out)
    assert "loss_fn on fsdp=2, tensor=2 (simulated): equal" in out


def test_examples_are_short():
    for path in EXAMPLES.glob("*.py"):
        assert len(path.read_text().splitlines()) < 100, path
