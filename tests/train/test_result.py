"""What the recipe for newcomers reaches on real text."""

import io

import pytest

from functitan.recipes import load_recipe, override
from functitan.train import Progress, train


def result(tmp_path, *settings):
    recipe = override(load_recipe("llama3-debug"), [f"run.dir={tmp_path / 'run'}", *settings])
    return train(recipe.task(), progress=Progress(recipe.run.steps, io.StringIO()))


def test_real_text_is_learned_from_the_first_steps(tmp_path):
    summary = result(tmp_path, "run.steps=30", "optim.warmup=10", "data.validation_batches=4", "run.sample_tokens=8")
    # A model that has learned nothing but which bytes are frequent is at 3.3 or so.
    assert summary.validation < 3.2 < summary.first_loss
    assert summary.skipped == 0


@pytest.mark.slow
def test_the_recipe_reaches_two_nats_per_byte(tmp_path):
    assert result(tmp_path).validation < 2.0
