"""The recipe with Muon: who steps what, what its optimizer sends, and that it trains alike on a mesh."""

import dataclasses
import io
import json
import pathlib
import re
import sys

import pytest

from functitan.cli.main import main
from functitan.data import load_corpus
from functitan.errors import ConfigError, ShardingError
from functitan.recipes import load_recipe, override
from functitan.train import Progress, build_steps, train
from functitan.train.abstract import lower_step

TINY = [
    "model.dim=16",
    "model.layers=2",
    "model.heads=2",
    "model.kv_heads=2",
    "model.mlp_dim=32",
    "model.vocab=260",
    "data.batch=4",
    "data.seq=8",
    "data.validation_batches=1",
    "run.steps=3",
    "run.sample_tokens=2",
    "optim.warmup=1",
]
MATRICES = ("wq", "wk", "wv", "wo", "gate", "up", "down")


@pytest.fixture
def recipe(tmp_path):
    return override(load_recipe("llama3-debug-muon"), [*TINY, f"run.dir={tmp_path / 'run'}"])


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    for i in range(40):
        (folder / f"file{i}.py").write_text(f"def f{i}(x):\n    return x + {i}\n" * 5)
    return load_corpus(folder)


def test_it_is_the_debug_recipe_with_another_rule_for_matrices():
    mine, other = load_recipe("llama3-debug-muon"), load_recipe("llama3-debug")
    assert mine.replace(name=other.name, optim=other.optim) == other
    assert mine.optim.schedule(1.0, 500) and mine.optim.lr == other.optim.lr


def test_show_prints_the_rule_of_each_leaf(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["functitan", "show", "llama3-debug-muon", "--optim"])
    with pytest.raises(SystemExit) as stop:
        main()
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    rules = {row[0]: row[2] for row in rows if len(row) == 3}
    assert stop.value.code == 0
    assert {path for path, rule in rules.items() if rule == "muon"} == {f"layers/{m}" for m in MATRICES}
    others = {"tok_embeddings", "head", "norm", "layers/attn_norm", "layers/mlp_norm"}
    assert {path for path, rule in rules.items() if rule == "adamw"} == others


def test_it_learns(recipe, corpus):
    chosen = override(recipe, ["run.steps=20", "optim.lr=0.02", "optim.muon_lr=0.02"])
    done = train(chosen.task(corpus), progress=Progress(20, io.StringIO()))
    assert done.last_loss < done.first_loss - 1


def test_three_steps_on_one_device_and_on_a_mesh(recipe, corpus, tmp_path):
    losses = []
    for i, mesh in enumerate([[], ["mesh.fsdp=2", "simulate=true"], ["mesh.fsdp=4", "simulate=true"]]):
        chosen = override(recipe, [f"run.dir={tmp_path / str(i)}", *mesh])
        done = train(chosen.task(corpus), progress=Progress(3, io.StringIO()))
        losses.append(done.last_loss)
    # Two ranks stack the two layers; four own matrices.
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)


def test_the_optimizer_moves_each_matrix_there_and_back_and_gathers_none(recipe):
    program = lower_step(override(recipe, ["mesh.fsdp=2"]).textless_task())
    moved = program.collectives().of(kind="all_to_all", axes=("fsdp",))
    assert moved.runs == 2 * len(MATRICES)
    own = [c for c in program.collectives() if c.line.startswith(("orthogonalize.py", "newton_schulz.py"))]
    assert {c.kind for c in own} == {"all_to_all"}


def test_layers_that_do_not_divide_are_owned_by_ranks(recipe):
    odd = override(recipe, ["mesh.fsdp=4"])
    with pytest.raises(ShardingError, match=r"leaf layers/down(.|\n)*its 2 matrices(.|\n)*fsdp=4"):
        lower_step(override(odd, ["optim.layout=stacked"]).textless_task())
    program = lower_step(odd.textless_task())
    (plan,) = program.plans()
    assert sum(plan.matrices()) == 2 * len(MATRICES)
    assert lower_step(override(odd, ["optim.layout=gathered"]).textless_task()).collectives()


def test_lower_prints_who_works_on_what(recipe, monkeypatch, capsys):
    def shown(*words):
        monkeypatch.setattr(sys, "argv", ["functitan", "lower", "llama3-debug-muon", "--optim", *words])
        with pytest.raises(SystemExit):
            main()
        return capsys.readouterr().out

    small = [w for setting in TINY for w in ("--set", setting)]
    owned = shown("--mesh", "fsdp=4", *small)
    assert "owned over fsdp=4: 14 matrices of 7 leaves, plan " in owned
    for words in (
        r"most over mean operations 1\.\d+, lower bound 1\.\d+",
        r"received in +\d",
        r"back +\d",
        r"0 +fsdp +1 +14",
    ):
        assert re.search(words, owned), words
    assert "owned, since 4 ranks do not divide the layers of" in owned
    stacked = shown("--mesh", "fsdp=2", *small)
    assert "every rank alike" in stacked and "stacked, since the layers of every leaf divide by 2 ranks" in stacked
    (total,) = [line.split() for line in stacked.splitlines() if " all " in line and line.split()[1] == "all"]
    assert total[0] == "7" and "0 B" not in stacked  # 14 matrices on two ranks; each moves there and back


def test_buckets_and_the_gram_form_are_settings(recipe):
    small = override(recipe, ["mesh.fsdp=4", "optim.bucket_bytes=100"])
    (plan,) = lower_step(small.textless_task()).plans()
    assert len(plan.stages()) > 1
    split = override(recipe, ["mesh.tensor=2", "optim.gram=tensor"])
    assert "for the Gram form over tensor: " in str(lower_step(split.textless_task()))


def test_the_rules_that_are_off_by_default_train_alike_on_a_mesh(recipe, corpus):
    """NorMuon for matrices, the schedule-free rule for the rest, QK-clip behind both."""
    settings = ["optim.matrix_rule=normuon", "optim.rule=schedule_free", "optim.qk_clip=0.01"]
    found, logits = [], []
    for i, mesh in enumerate((["mesh.fsdp=2", "simulate=true"], [])):
        folder = f"{recipe.run.dir}-{i}"
        chosen = override(recipe, [*settings, *mesh, f"run.dir={folder}"])
        assert [label for _, label in chosen.optim.labels()] == ["normuon"] * 4 + ["schedule_free"]
        found.append(train(chosen.task(corpus), progress=Progress(3, io.StringIO())))
        rows = [json.loads(line) for line in pathlib.Path(folder, "metrics.jsonl").read_text().splitlines()]
        logits.append([row["max_logit"] for row in rows if "max_logit" in row])
    mesh, one = found
    assert mesh.last_loss == pytest.approx(one.last_loss, rel=1e-5)
    assert mesh.validation == pytest.approx(one.validation, rel=1e-5)
    assert len(logits[0]) == 3 and logits[0] == pytest.approx(logits[1], rel=1e-4)
    assert logits[0][0] > 0.01


def test_logits_are_measured_only_where_they_are_clipped(recipe):
    off, on = (override(recipe, ["mesh.fsdp=2", f"optim.qk_clip={tau}"]) for tau in ("none", "100"))
    assert "attention_max_logits" not in lower_step(off.textless_task()).text()
    assert lower_step(on.textless_task()).text().count("functitan.attention_max_logits") == 1


@pytest.mark.parametrize("mesh", [[], ["mesh.fsdp=2", "simulate=true"]], ids=["one device", "mesh"])
def test_microbatches_keep_the_largest_logits_of_the_batch(recipe, corpus, mesh):
    found = []
    for i, n in enumerate((1, 2)):
        settings = ["optim.qk_clip=0.01", f"run.microbatches={n}", "run.steps=1", f"run.dir={recipe.run.dir}-{i}"]
        task = override(recipe, [*settings, *mesh]).task(corpus)
        steps = build_steps(task)
        _, metrics = steps.train(steps.init(), task.source.batch(0))
        found.append({k: float(metrics[k]) for k in ("loss", "max_logit", "grad_norm")})
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_a_family_that_does_not_measure_logits_is_told(recipe):
    other = recipe.replace(family=dataclasses.replace(recipe.family, loss_and_max_logits=None))
    with pytest.raises(ConfigError, match=r"optim.qk_clip=100.0 reads the largest attention logits, and this family"):
        override(other, ["optim.qk_clip=100"]).textless_task()
