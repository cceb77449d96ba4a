"""The command line: the same from Python and from a shell, errors without tracebacks, a quick --help."""

import json
import subprocess
import sys
import time

import pytest

from functitan.cli.main import main
from functitan.cli.settings import chosen_recipe
from functitan.cli.train import train
from functitan.recipes import load_recipe

# A run of two tiny steps.
TINY = [
    "model.dim=32",
    "model.layers=1",
    "model.heads=4",
    "model.kv_heads=4",
    "model.mlp_dim=48",
    "data.batch=2",
    "data.seq=16",
    "data.validation_batches=1",
    "run.steps=2",
    "run.sample_tokens=3",
]


def call(monkeypatch, capsys, *words):
    monkeypatch.setattr(sys, "argv", ["functitan", *words])
    with pytest.raises(SystemExit) as stop:
        main()
    out = capsys.readouterr()
    return stop.value.code, out.out, out.err


def test_help_is_quick_and_quiet():
    begun = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "functitan.cli", "--help"], capture_output=True, text=True)
    elapsed = time.perf_counter() - begun
    assert done.returncode == 0 and "train" in done.stdout and done.stderr == ""
    assert elapsed < 2  # half a second on an idle machine; a test must hold on a busy one too


def test_help_imports_nothing_heavy():
    code = (
        "import sys, functitan.cli.main\n"
        "print([m for m in ('torch', 'optree', 'torchao', 'numpy', 'safetensors') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


def test_recipes_are_listed(monkeypatch, capsys):
    code, out, _ = call(monkeypatch, capsys, "recipes")
    assert code == 0 and "llama3-debug" in out and "llama3-405b" in out


@pytest.mark.parametrize(
    "words,message",
    [
        (["train", "llama3-debg"], 'Did you mean "llama3-debug"'),
        (["train", "llama3-debug", "--set", "optim.lrr=1"], 'Did you mean "optim.lr"'),
        (["train", "llama3-debug", "--mesh", "tensr=2"], 'Did you mean "tensor"'),
        (["train", "llama3-debug", "--device", "gpu"], "is not a device"),
    ],
)
def test_errors_are_messages(monkeypatch, capsys, words, message):
    code, _, err = call(monkeypatch, capsys, *words)
    assert code == 2 and err.startswith("error: ") and message in err and "Traceback" not in err


def test_an_unset_flag_leaves_the_recipe_alone(tmp_path):
    """Report B56."""
    file = tmp_path / "mine.py"
    file.write_text(
        "from functitan.recipes import load_recipe, override\n"
        "def own():\n"
        "    changes = ['simulate=true', 'run.steps=7', 'run.device=cpu']\n"
        "    return override(load_recipe('llama3-debug'), changes)\n"
    )
    recipe = chosen_recipe(f"{file}:own")
    assert recipe == load_recipe(f"{file}:own") and recipe.simulate and recipe.run.steps == 7
    changed = chosen_recipe(f"{file}:own", simulate=False, steps=3, mesh="fsdp=2", set_=["mesh.tensor=4"])
    assert (changed.simulate, changed.run.steps, dict(changed.mesh)) == (False, 3, {"fsdp": 2, "tensor": 4})


def test_called_from_python_and_from_the_shell_alike(tmp_path, monkeypatch, capsys):
    """Report B56."""
    train("llama3-debug", set_=[*TINY, f"run.dir={tmp_path / 'a'}"])
    words = [word for setting in [*TINY, f"run.dir={tmp_path / 'b'}"] for word in ("--set", setting)]
    code, out, _ = call(monkeypatch, capsys, "train", "llama3-debug", *words)
    assert code in (0, None) and "validation loss" in out
    rows = [
        [json.loads(line) | {"tokens_per_second": 0} for line in text.splitlines()]
        for text in ((tmp_path / name / "metrics.jsonl").read_text() for name in "ab")
    ]
    assert rows[0] == rows[1]
