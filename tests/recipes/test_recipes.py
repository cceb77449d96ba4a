"""Recipes, overrides and the registry."""

import json
import math

import pytest
import torch

from functitan.errors import ConfigError
from functitan.nn.models import llama3
from functitan.recipes import RECIPES, load_recipe, override, parse_mesh, settings, with_mesh
from functitan.recipes.overrides import fields_of
from functitan.recipes.parse import parse_value
from functitan.remat_policies import dots_saveable, save_only_these_names


@pytest.fixture
def debug():
    return load_recipe("llama3-debug")


@pytest.mark.parametrize("name", list(RECIPES))
def test_every_recipe_loads_is_named_and_can_be_written(name):
    recipe = load_recipe(name)
    assert recipe.name == name
    json.dumps(settings(recipe))
    assert all(override(recipe, [f"mesh.{axis}={size}"]) == recipe for axis, size in recipe.mesh.items())


@pytest.mark.parametrize("name", [n for n in RECIPES if not n.startswith("llama3-debug")])
def test_real_recipes_state_their_sequence_and_a_batch_that_the_mesh_divides(name):
    recipe = load_recipe(name)
    shards = math.prod(recipe.mesh.get(a, 1) for a in recipe.rules.names["batch"])
    assert recipe.data.seq == 8192 and recipe.data.batch % shards == 0
    assert recipe.model.compute_dtype == torch.bfloat16
    tensor = recipe.mesh.get("tensor", 1)
    assert recipe.model.heads % tensor == recipe.model.kv_heads % tensor == recipe.model.mlp_dim % tensor == 0


def test_settings_are_parsed_by_type(debug):
    changed = override(
        debug,
        [
            "optim.lr=1e-2",
            "optim.decay_ratio=none",
            "optim.decay=cosine",
            "run.steps=1e2",
            "run.dir=out/x",
            "mesh.tensor=2",
            "model.compute_dtype=bfloat16",
            "model.rope_scaling.factor=4",
            "model.tied=yes",
            "rules.seq=none",
            "rules.batch=data,fsdp,tensor",
            "rules.storage.mlp=fsdp",
            "remat=dots_saveable",
            "optim.lr=5e-3",
        ],
    )
    assert (changed.optim.lr, changed.optim.decay_ratio, changed.optim.decay) == (5e-3, None, "cosine")
    assert (changed.run.steps, changed.run.dir, dict(changed.mesh)) == (100, "out/x", {"tensor": 2})
    assert changed.model.compute_dtype == torch.bfloat16 and changed.model.tied
    assert changed.model.rope_scaling.factor == 4.0
    assert changed.rules.names["seq"] == () and changed.rules.names["batch"] == ("data", "fsdp", "tensor")
    assert changed.rules.storage["mlp"] == ("fsdp",) and changed.rules.storage["embed"] == ("fsdp",)
    assert changed.remat_policy() is dots_saveable
    named = override(debug, ["remat=save_only_these_names", "save_names=q,attention_out"])
    assert named.remat_policy() == save_only_these_names("attention_out", "q")
    assert override(debug, ["model.rope_scaling=none"]).model.rope_scaling is None
    assert debug == load_recipe("llama3-debug")


def test_fields_that_only_fit_together_change_together(debug):
    changed = override(debug, ["model.heads=12", "model.dim=384", "model.kv_heads=4"])
    assert changed.model.head_dim == 32


def test_all_wrong_settings_in_one_message(debug):
    with pytest.raises(ConfigError) as error:
        override(debug, ["optim.lrr=3", "mesh.tensr=2", "run.steps=1.5", "optim.decay=cosin", "rules.sq=none", "x"])
    text = str(error.value)
    assert "6 problems in the settings" in text
    for expected in (
        'no setting "optim.lrr"',
        'Did you mean "optim.lr"?',
        'mesh axis "tensr"',
        'Did you mean "tensor"?',
        'run.steps: "1.5" is not a whole number',
        'Did you mean "cosine"?',
        'Did you mean "rules.seq"?',
        "write path=value",
    ):
        assert expected in text
    with pytest.raises(ConfigError, match=r"optim is a group of settings; set one of optim\.lr"):
        override(debug, ["optim=3"])


def test_every_field_in_the_list_can_be_set(debug):
    samples = {"int": "8", "float": "0.5", "bool": "true"}
    for path, kind in fields_of(debug).items():
        text = samples.get(kind)
        if text is not None and not path.startswith("model."):
            override(debug, [f"{path}={text}"])


def test_values(debug):
    assert parse_value("TRUE", bool) is True and parse_value("off", bool) is False
    assert parse_value("a,b", tuple[str, ...]) == ("a", "b")
    for text, kind in (("maybe", bool), ("1.5", int), ("x", float), ("float31", torch.dtype)):
        with pytest.raises(ConfigError, match=text):
            parse_value(text, kind)


def test_mesh_text(debug):
    assert parse_mesh("") == {} and parse_mesh("data=2, fsdp=4") == {"data": 2, "fsdp": 4}
    for text in ("data", "data=x", "data=0", "data=2,data=2"):
        with pytest.raises(ConfigError, match="--mesh fsdp=2,tensor=4"):
            parse_mesh(text)
    with pytest.raises(ConfigError, match='Did you mean "fsdp"'):
        with_mesh(debug, {"fsp": 2})


def test_a_batch_that_the_mesh_cannot_split(debug):
    with pytest.raises(ConfigError, match=r"data\.batch=8 is not divisible by the 3 parts"):
        with_mesh(debug, {"fsdp": 3})


def test_a_mesh_and_settings_that_only_fit_each_other(debug):
    found = override(debug, ["data.batch=6", "mesh.tensor=2"], {"fsdp": 3})
    assert (found.data.batch, found.mesh) == (6, {"fsdp": 3, "tensor": 2})
    with pytest.raises(ConfigError) as e:
        override(debug, ["data.batsh=6"], {"fsp": 3})
    assert '"fsp" is named by no rule' in str(e.value) and "data.batsh" in str(e.value)


def test_a_batch_that_microbatches_cannot_split(debug):
    with pytest.raises(ConfigError, match=r"data\.batch=8 is not divisible by run\.microbatches=3\. .*multiple of 3"):
        override(debug, ["run.microbatches=3"])
    with pytest.raises(ConfigError, match=r"run\.microbatches=4 times the 4 parts .*multiple of 16"):
        override(with_mesh(debug, {"fsdp": 4}), ["run.microbatches=4"])


def test_recipe_not_found():
    with pytest.raises(ConfigError, match=r'no recipe "llama3-debg"(.|\n)*Did you mean "llama3-debug"'):
        load_recipe("llama3-debg")


MINE = """
from dataclasses import dataclass, replace
from functitan.recipes import load_recipe
from functitan.recipes.base import DataConfig

@dataclass(frozen=True)
class Own:
    x: int = 1

def small():
    return load_recipe("llama3-debug").replace(name="mine", data=DataConfig(batch=2, seq=8))

def wrong():
    return 3
"""


def test_a_recipe_in_a_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    assert load_recipe(f"{file}:small").name == "mine"
    with pytest.raises(ConfigError, match='Did you mean "small"'):
        load_recipe(f"{file}:smal")
    with pytest.raises(ConfigError, match=r"needs the name of a function(.|\n)*small, wrong"):
        load_recipe(str(file))
    with pytest.raises(ConfigError, match="gave a int"):
        load_recipe(f"{file}:wrong")
    with pytest.raises(ConfigError, match="there is no file"):
        load_recipe(f"{tmp_path}/other.py:small")


@pytest.mark.parametrize("text,where", [("x = 1\ny = z\n", ":2: NameError"), ("def f(:\n", ":1: ")])
def test_a_broken_file_names_its_line(tmp_path, text, where):
    (tmp_path / "bad.py").write_text(text)
    with pytest.raises(ConfigError, match=f"bad.py{where}"):
        load_recipe(f"{tmp_path}/bad.py:f")


def test_the_model_behind_the_recipe(debug):
    assert debug.family.declare(debug.model) == llama3.declare(llama3.FLAVORS["debugmodel"])
