"""Short runs, what they write, and how they fail."""

import dataclasses
import io
import json
import math

import pytest
import torch

from functitan import random, tree
from functitan.checkpoint import load_params
from functitan.data import load_corpus
from functitan.errors import ConfigError, FunctitanError, NonfiniteError
from functitan.recipes import load_recipe, override
from functitan.sharding.array import Array
from functitan.train import Progress, build_steps, make_train_step, mean_loss, resolve_device, train
from functitan.train.metrics import Meter

TINY = [
    "model.dim=32",
    "model.layers=2",
    "model.heads=4",
    "model.kv_heads=2",
    "model.mlp_dim=48",
    "model.vocab=260",
    "data.batch=4",
    "data.seq=16",
    "data.validation_batches=2",
    "run.steps=4",
    "run.sample_tokens=5",
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    for i in range(60):
        (folder / f"file{i}.py").write_text(f"def f{i}(x):\n    return x + {i}\n" * 5)
    return load_corpus(folder)


@pytest.fixture
def recipe(tmp_path):
    return override(load_recipe("llama3-debug"), [*TINY, f"run.dir={tmp_path / 'run'}"])


def run(recipe, corpus, **settings):
    out = io.StringIO()
    return train(recipe.task(corpus), progress=Progress(recipe.run.steps, out), **settings), out.getvalue()


def test_a_run_writes_its_folder_and_table(recipe, corpus, tmp_path):
    summary, printed = run(recipe, corpus)
    folder = tmp_path / "run"
    names = {f.name for f in folder.iterdir()}
    assert {"config.json", "metrics.jsonl", "params.safetensors"} <= names
    assert any(n.startswith("events.out.tfevents") for n in names) and len(names) == 4
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in rows] == [1, 2, 3, 4, 4]
    assert rows[0]["loss"] == summary.first_loss and rows[-1]["validation_loss"] == summary.validation
    assert {"loss", "lr", "grad_norm", "skipped", "labels"} <= rows[0].keys()
    config = json.loads((folder / "config.json").read_text())
    assert config["model"]["dim"] == 32 and config["optim"]["lr"] == recipe.optim.lr
    declared = recipe.family.declare(recipe.model)
    shapes = lambda t: {path: tuple(leaf.shape) for path, leaf in tree.flatten_with_paths(t)[0]}  # noqa: E731
    assert shapes(load_params(folder / "params.safetensors", declared)) == shapes(declared)
    for text in (
        "first loss",
        "last loss",
        "nats per byte",
        "tokens/s",
        "peak memory",
        "A sample:",
        "step 4/4",
    ):
        assert text in printed
    # Logits begin with variance 1: uniform guessing costs log V, and the spread half a nat more.
    assert summary.first_loss == pytest.approx(math.log(260) + 0.5, rel=0.1)


def test_a_run_is_a_function_of_its_recipe(recipe, corpus, tmp_path):
    first, _ = run(recipe, corpus)
    again, _ = run(override(recipe, [f"run.dir={tmp_path / 'again'}"]), corpus)
    assert (first.last_loss, first.validation, first.sample) == (
        again.last_loss,
        again.validation,
        again.sample,
    )
    seeded, _ = run(override(recipe, [f"run.dir={tmp_path / 'seeded'}", "run.seed=1"]), corpus)
    assert seeded.last_loss != first.last_loss


def test_a_taken_folder_is_refused_and_default_folders_are_numbered(recipe, corpus, tmp_path, monkeypatch):
    run(recipe, corpus)
    with pytest.raises(ConfigError, match="holds a run already"):
        run(recipe, corpus)
    monkeypatch.chdir(tmp_path)
    unnamed = override(recipe, ["run.dir=none", "run.steps=1"])
    assert [run(unnamed, corpus)[0].folder for _ in range(2)] == ["out/llama3-debug", "out/llama3-debug-2"]


def test_a_mesh_or_device_that_is_not_there_is_refused_before_a_folder_is_made(recipe, corpus, tmp_path):
    with pytest.raises(ConfigError, match="is not a device"):
        run(override(recipe, ["run.device=gpu"]), corpus)
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="this machine has 0 CUDA devices"):
            run(override(recipe, ["run.device=cuda"]), corpus)
    assert not (tmp_path / "run").exists()
    assert resolve_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ([], "the run has no mesh: each would train the same model by itself. .* --mesh fsdp=2"),
        (["mesh.fsdp=2", "simulate=true"], "simulates its mesh in one process: .* leave simulate out"),
    ],
    ids=["no mesh", "simulated"],
)
def test_processes_that_would_each_train_by_themselves_are_refused(recipe, corpus, monkeypatch, settings, said):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=f"^2 processes run, and .*{said}"):
        build_steps(override(recipe, settings).task(corpus))


def test_validation_is_total_by_count_not_a_mean_of_means():
    """Report B02: pairs 2/1 and 90/9 are 9.2, not 6.0."""
    pairs = iter([(2.0, 1), (90.0, 9)])
    evaluate = lambda params, batch: tuple(map(torch.tensor, next(pairs)))  # noqa: E731
    assert mean_loss(evaluate, None, [{}, {}]) == pytest.approx(9.2)
    with pytest.raises(ConfigError, match="no label that counts"):
        mean_loss(evaluate, None, [])


def test_one_step_equals_torch(recipe, corpus):
    """Loss and update of the step against a plain autograd loop with torch's own optimizer."""
    task = override(recipe, ["optim.warmup=0", "optim.decay_ratio=0", "optim.max_norm=none"]).task(corpus)
    steps = build_steps(task)
    state = steps.init()
    leaves = [p.clone().requires_grad_() for p in tree.leaves(state.params)]
    optimizer = torch.optim.AdamW(leaves, lr=recipe.optim.lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for step in range(2):
        batch = task.source.batch(step)
        total, count = task.loss(tree.unflatten(tree.structure(state.params), leaves), batch)
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
        state, metrics = make_train_step(task)(state, batch)
        assert metrics["loss"].item() == pytest.approx((total / count).item(), rel=1e-5)
    for mine, theirs in zip(tree.leaves(state.params), leaves, strict=True):
        assert ((mine - theirs).abs() <= 1e-3 * recipe.optim.lr + 1e-5 * theirs.abs()).float().mean() > 0.99


def test_a_batch_without_labels_has_loss_zero_and_no_nan(recipe, corpus):
    task = recipe.task(corpus)
    state = build_steps(task).init()
    batch = task.source.batch(0)
    batch["labels"] = torch.full_like(batch["labels"], -100)
    new, metrics = make_train_step(task)(state, batch)
    assert metrics["loss"].item() == 0
    assert all(bool(leaf.isfinite().all()) for leaf in tree.leaves(new.params))


def test_the_meter_leaves_out_the_first_step_and_pauses():
    now = [0.0]
    meter = Meter(10, 100, clock=lambda: now[0])
    for pause, length in ((0, 50.0), (0, 2.0), (30.0, 2.0)):
        now[0] += pause
        meter.resume()
        now[0] += length
        meter.step_done()
    assert meter.tokens_per_second == 50.0 and meter.seconds_left == 14.0


def test_initial_weights_depend_on_the_seed_and_the_path_only(recipe, corpus):
    first = build_steps(recipe.task(corpus)).init().params
    wider = override(recipe, ["model.tied=true"])
    tied = build_steps(wider.task(corpus)).init().params
    assert "head" not in tied
    assert torch.equal(first["tok_embeddings"], tied["tok_embeddings"])
    assert not torch.equal(first["layers"]["wk"], first["layers"]["wv"])
    assert random.key(recipe.run.seed).shape == (2,)


def test_run_settings_are_checked(recipe):
    with pytest.raises(FunctitanError, match=r"run\.steps=0"):
        override(recipe, ["run.steps=0"])
    with pytest.raises(FunctitanError, match=r"run\.microbatches=0"):
        override(recipe, ["run.microbatches=0"])
    with pytest.raises(FunctitanError, match=r"pending_gradients=data .*run\.microbatches is 1"):
        override(recipe, ["run.pending_gradients=data"])


@pytest.mark.parametrize("mesh", [[], ["mesh.fsdp=2", "simulate=true"]], ids=["one device", "mesh"])
@pytest.mark.parametrize("setting", ["optim.rule=schedule_free", "optim.ema=0.5"])
def test_averages_are_what_is_validated_and_saved(recipe, corpus, tmp_path, mesh, setting):
    """Of the schedule-free rule, x; of an average of parameters, the average: here by the state after the run."""
    task = override(recipe, [setting, "optim.lr=0.01", "run.sample_tokens=0", "optim.warmup=2", *mesh]).task(corpus)
    steps = build_steps(task)
    states = []

    def seen(state, batch):
        states.append(steps.train(state, batch))
        return states[-1]

    summary = train(task, steps=dataclasses.replace(steps, train=seen), progress=Progress(4, io.StringIO()))
    state = tree.map(lambda x: x.full() if isinstance(x, Array) else x, states[-1][0])
    own = state.opt.inner
    average = lambda z, y: z + (y - z) / 0.9  # noqa: E731
    expected = own.average if "ema" in setting else tree.map(average, own.z, state.params)
    saved = load_params(tmp_path / "run" / "params.safetensors", task.declared)
    for (path, a), b, y in zip(
        tree.flatten_with_paths(saved)[0], tree.leaves(expected), tree.leaves(state.params), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7, msg=path)
        assert (a - y).abs().max() > 1e-4, path
    total = [task.loss(expected, batch) for batch in task.source.validation()]
    nats = sum(t.item() for t, _ in total) / sum(int(c.item()) for _, c in total) / task.source.bytes_per_token
    assert summary.validation == pytest.approx(nats, rel=1e-5)


def test_a_run_that_is_told_to_raise_ends_with_the_parameters_before_the_bad_step(recipe, corpus, tmp_path):
    """Step 2 has a gradient of NaN, and metrics are read at steps 1 and 4."""
    task = override(recipe, ["optim.nonfinite=raise", "run.log_every=4", "run.sample_tokens=0"]).task(corpus)
    steps = build_steps(task)

    def poisoned(params, batch):
        total, count = task.loss(params, batch)
        return total * math.nan, count

    bad = make_train_step(dataclasses.replace(task, loss=poisoned))
    states = []

    def step(state, batch):
        states.append(state)
        return (bad if len(states) == 2 else steps.train)(state, batch)

    with pytest.raises(NonfiniteError, match="the step 3 steps ago has the global norm nan"):
        train(task, steps=dataclasses.replace(steps, train=step), progress=Progress(4, io.StringIO()))
    saved = load_params(tmp_path / "run" / "params.safetensors", task.declared)
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(saved), tree.leaves(states[1].params), strict=True))
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["skipped"]) for row in rows] == [(1, 0), (4, 3)]


@pytest.mark.parametrize("mesh", [{}, {"data": 2}], ids=["one device", "data=2"])
def test_microbatches_change_nothing_but_memory(recipe, corpus, mesh):
    """Metrics and parameters after a step, rows with unequal numbers of labels; pending on a mesh."""
    at_once = override(recipe, ["optim.warmup=0"]).replace(mesh=mesh, simulate=True)
    split = override(at_once, ["run.microbatches=2", "run.pending_gradients=data"])
    found = []
    for chosen in (at_once, split):
        task = chosen.task(corpus)
        steps = build_steps(task)
        batch = task.source.batch(0)
        batch["labels"] = torch.where(torch.arange(16) < torch.tensor([[1], [16], [7], [0]]), batch["labels"], -100)
        state, metrics = steps.train(steps.init(), batch)
        found.append((steps.whole(state.params), {k: float(v) for k, v in metrics.items()}))
    (params, metrics), (other_params, other) = found
    assert metrics["labels"] == other["labels"] == 24
    assert other["loss"] == pytest.approx(metrics["loss"], rel=1e-5)
    assert other["grad_norm"] == pytest.approx(metrics["grad_norm"], rel=1e-4)
    # AdamW's first step is the gradient's sign, so the last bits of a gradient near zero may turn it.
    for a, b in zip(tree.leaves(params), tree.leaves(other_params), strict=True):
        assert ((a - b).abs() <= 1e-3 * recipe.optim.lr).float().mean() > 0.99
