"""Training runs: a task, its steps, the loop, and what it reports."""

from functitan.train.build import build_steps, whole
from functitan.train.evaluate import mean_loss, sample_text, validate
from functitan.train.folder import RunFolder
from functitan.train.loop import train
from functitan.train.metrics import Progress, Summary, summary_text
from functitan.train.steps import Steps, TrainState, make_init, make_train_step
from functitan.train.task import RunConfig, Task, resolve_device

__all__ = [
    "Progress",
    "RunConfig",
    "RunFolder",
    "Steps",
    "Summary",
    "Task",
    "TrainState",
    "build_steps",
    "make_init",
    "make_train_step",
    "mean_loss",
    "resolve_device",
    "sample_text",
    "summary_text",
    "train",
    "validate",
    "whole",
]
