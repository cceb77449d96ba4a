"""A run from the first step to the saved parameters."""

from __future__ import annotations

import io
import platform
from importlib.metadata import version

import torch

from functitan.errors import NonfiniteError
from functitan.nn.padding import unpadded
from functitan.optim import raise_nonfinite
from functitan.sharding import processes
from functitan.train.build import build_steps
from functitan.train.evaluate import sample_text, to_device, validate
from functitan.train.folder import NoFolder, RunFolder
from functitan.train.metrics import Meter, Progress, Summary, peak_bytes, progress_text, summary_text
from functitan.train.steps import Metrics, Steps
from functitan.train.task import Task


def train(task: Task, steps: Steps | None = None, progress: Progress | None = None) -> Summary:
    """Train a task and write its run folder.

    Args:
        task: what to train.
        steps: the functions to run; by default those that :func:`build_steps` makes for the task's mesh.
        progress: where to report; by default standard output.

    Returns:
        What was found; it has been printed as a table.

    Raises:
        FunctitanError: a mesh, device or folder that cannot be used. The folder is made last, so that a run
            that cannot begin leaves nothing.
        NonfiniteError: a gradient that is not finite, where the optimizer is told to raise; at the next row of metrics,
            after the parameters before that step were saved.
    """
    run = task.run
    steps = build_steps(task) if steps is None else steps
    # One process of a job speaks and writes; all run the same steps and hold the same metrics.
    lead = processes.rank() == 0
    if progress is None:
        progress = Progress(run.steps) if lead else Progress(run.steps, io.StringIO())
    state = steps.init()
    rows: list[dict[str, float]] = []
    with RunFolder.create(run.dir, task.name) if lead else NoFolder() as folder:
        folder.config({**task.settings, "versions": _versions()})
        meter = Meter(run.steps, task.source.batch(0)["tokens"].numel())
        for step in range(run.steps):
            state, metrics = steps.train(state, to_device(task.source.batch(step), steps.device))
            done = step + 1
            if step == 0 or done % run.log_every == 0 or done == run.steps:
                rows.append(_numbers(metrics))
                meter.step_done()
                speed = meter.tokens_per_second
                folder.row(done, rows[-1] | ({"tokens_per_second": speed} if speed is not None else {}))
                progress.update(done, progress_text(done, run.steps, rows[-1], speed, meter.seconds_left))
                if step == 0:
                    _say_compiled(steps, progress)
                try:
                    raise_nonfinite(state.opt)
                except NonfiniteError:
                    # The parameters before the bad step, for whoever looks for its cause.
                    folder.params(unpadded(task.declared, steps.whole(steps.eval_params(state))))
                    raise
            else:
                meter.step_done()
            if run.validate_every and done % run.validate_every == 0 and done < run.steps:
                found = validate(task, steps, steps.eval_params(state))
                folder.row(done, {"validation_loss": found})
                progress.line(f"validation loss {found:.4f} nats per byte")
                meter.resume()
        params = steps.eval_params(state)
        validation = validate(task, steps, params)
        folder.row(run.steps, {"validation_loss": validation})
        sample = sample_text(task, steps, params)
        if sample:
            folder.text(run.steps, "sample", sample)
        folder.params(unpadded(task.declared, steps.whole(params)))
        summary = Summary(
            steps=run.steps,
            first_loss=rows[0]["loss"],
            last_loss=rows[-1]["loss"],
            validation=validation,
            tokens_per_second=meter.tokens_per_second,
            peak_bytes=peak_bytes(steps.device),
            skipped=int(rows[-1].get("skipped", 0)),
            folder=str(folder.path),
            sample=sample,
        )
    progress.line("\n" + summary_text(summary))
    if sample:
        progress.line(f"\nA sample:\n{sample}")
    return summary


def _say_compiled(steps: Steps, progress: Progress) -> None:
    """How long the first step's programs took to compile, and what came from the cache; later ones are logged."""
    for function in steps.compiled:
        for made in function.compilations:
            progress.line(str(made))


def _numbers(metrics: Metrics) -> dict[str, float]:
    return {name: float(value.item()) for name, value in metrics.items()}


def _versions() -> dict[str, str]:
    return {
        "functitan": version("functitan"),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
