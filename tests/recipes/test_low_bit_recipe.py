"""Recipes whose optimizer state is stored in fewer bits."""

import io
import sys

import pytest

from functitan.cli.main import main
from functitan.data import load_corpus
from functitan.errors import ArgumentError
from functitan.recipes import load_recipe, override
from functitan.train import Progress, train
from functitan.train.abstract import lower_step
from tests.recipes.test_muon_recipe import TINY


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    for i in range(40):
        (folder / f"file{i}.py").write_text(f"def f{i}(x):\n    return x + {i}\n" * 5)
    return load_corpus(folder)


@pytest.mark.parametrize("dtype,expected", [("float32", "8.00"), ("bfloat16", "4.00"), ("int8", "2.03")])
def test_show_says_the_bytes_of_state_per_parameter(dtype, expected, monkeypatch, capsys):
    words = ["functitan", "show", "llama3-8b", "--optim", "--set", f"optim.state_dtype={dtype}"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit):
        main()
    assert f"state: {expected} bytes per parameter" in capsys.readouterr().out


def test_a_program_holds_a_quarter_of_the_state():
    recipe = override(load_recipe("llama3-debug"), ["mesh.fsdp=2", "optim.state_dtype=int8"])
    memory = lower_step(recipe.textless_task()).memory()
    assert memory["optimizer"] / memory["parameters"] == pytest.approx(2.03125 / 4, rel=0.01)


def test_three_steps_on_one_device_and_on_a_mesh(corpus, tmp_path):
    losses = []
    for i, mesh in enumerate([[], ["mesh.fsdp=2", "simulate=true"]]):
        chosen = [*TINY, "optim.state_dtype=int8", *mesh, f"run.dir={tmp_path / str(i)}"]
        task = override(load_recipe("llama3-debug"), chosen).task(corpus)
        losses.append(train(task, progress=Progress(3, io.StringIO())).last_loss)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_second_moment_that_would_stand_still_is_refused():
    recipe = override(load_recipe("llama3-debug"), ["optim.state_dtype=bfloat16", "optim.b2=0.999"])
    with pytest.raises(ArgumentError, match=r"Write stochastic=True"):
        recipe.optim.build(10)
