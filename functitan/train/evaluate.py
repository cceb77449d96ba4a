"""Validation loss and sample text."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from functitan import random
from functitan.data import Batch
from functitan.errors import ConfigError
from functitan.train.steps import Steps
from functitan.train.task import Task


def mean_loss(
    evaluate: Callable[[Any, Batch], tuple[torch.Tensor, torch.Tensor]], params: Any, batches: Iterable[Batch]
) -> float:
    """The total loss by the total count of labels over all batches.

    A mean of the batches' means would weigh a nearly empty batch as much as a full one.

    Raises:
        ConfigError: no label counted.
    """
    total, count = 0.0, 0
    for batch in batches:
        batch_total, batch_count = evaluate(params, batch)
        total, count = total + batch_total.item(), count + int(batch_count.item())
    if not count:
        raise ConfigError("validation found no label that counts; give it held-out text of at least one sequence.")
    return total / count


def validate(task: Task, steps: Steps, params: Any) -> float:
    """The loss on held-out text, in nats per byte."""
    batches = (to_device(batch, steps.device) for batch in task.source.validation())
    return mean_loss(steps.evaluate, params, batches) / task.source.bytes_per_token


def sample_text(task: Task, steps: Steps, params: Any) -> str:
    """A text that the model writes, "" when the run asks for none or the model does not generate."""
    if task.generate is None or not task.run.sample_tokens:
        return ""
    key = random.fold_in(random.key(task.run.seed, device=steps.device), "sample")
    prompt = task.source.prompt().to(steps.device)
    with torch.no_grad():
        ids = task.generate(steps.whole(params), prompt.unsqueeze(0), key, task.run.sample_tokens)
    return task.source.decode(ids[0, len(prompt) :].tolist())


def to_device(batch: Batch, device: torch.device) -> Batch:
    """A batch on a device."""
    return {name: value.to(device) for name, value in batch.items()}
