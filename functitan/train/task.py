"""What a run trains: a model's functions, an optimizer and a source of data, as one value.

A recipe makes a Task; the loop, and everything that lowers or checks a train step, takes one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from functitan.compiler.passes import Passes
from functitan.data import Batch, Source
from functitan.errors import ConfigError
from functitan.optim import GradientTransformation

PyTree = Any


@dataclass(frozen=True)
class RunConfig:
    """How long and where a run goes.

    Attributes:
        dir: the run folder. None for ``out/<name>``, numbered when it is taken.
        steps: optimizer steps.
        seed: of initial weights, batches and samples.
        device: "auto", "cpu", "cuda" or "cuda:<index>". CUDA is untested so far.
        backend: "eager" runs a step op by op; "inductor" compiles it first, which pays in longer runs.
        microbatches: the parts of a batch that a step works through one after the other, to hold the activations of
            one only. Loss and gradient are those of the whole batch.
        pending_gradients: mesh axes over which the gradients of microbatches are added up on each rank and reduced
            once, after the last. Without them each microbatch reduces its gradient, and a rank holds only the sum of
            what it stores.
        log_every: steps between rows of metrics; the first and the last step always have one. Reading a
            metric waits for the device.
        validate_every: steps between validations; 0 for one at the end only.
        sample_tokens: the length of the sample text at the end; 0 for none.
        temperature: of the sample text.
    """

    dir: str | None = None
    steps: int = 1000
    seed: int = 0
    device: str = "auto"
    backend: Literal["eager", "inductor"] = "eager"
    microbatches: int = 1
    pending_gradients: tuple[str, ...] = ()
    log_every: int = 10
    validate_every: int = 0
    sample_tokens: int = 256
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if min(self.steps, self.log_every, self.microbatches) < 1 or min(self.validate_every, self.sample_tokens) < 0:
            raise ConfigError(
                f"run.steps={self.steps}, run.log_every={self.log_every} and run.microbatches={self.microbatches} must be "
                f"at least 1, run.validate_every={self.validate_every} and run.sample_tokens={self.sample_tokens} "
                "at least 0."
            )
        if self.pending_gradients and self.microbatches == 1:
            raise ConfigError(
                f"run.pending_gradients={','.join(self.pending_gradients)} is about the sum over microbatches, and "
                "run.microbatches is 1. Set run.microbatches, or leave it out."
            )


@dataclass(frozen=True)
class Task:
    """Everything that a run is made of.

    Attributes:
        name: the recipe's name.
        declared: a pytree of ``Param``.
        loss: ``(params, batch) -> (sum, count)``, both 0-d.
        loss_for_step: ``(params, batch) -> (sum, count, extra)``, for a rule that reads extra values: the loss that a
            step differentiates, and by name what the rule reads. None where it reads none.
        optimizer: the step rule.
        optimizer_metrics: from the optimizer's state to named 0-d tensors, such as the learning rate.
        source: the data.
        generate: ``(params, prompt_BS, key, tokens) -> ids_BS``, or None for a model that does not generate.
        run: length, place and reporting.
        mesh: axis sizes; empty for one device.
        rules: logical axis -> mesh axes.
        simulate: run all ranks of the mesh in this process.
        passes: which passes run on the lowered step.
        settings: all settings in a form that JSON can hold.
    """

    name: str
    declared: PyTree
    loss: Callable[[PyTree, Batch], tuple[torch.Tensor, torch.Tensor]]
    optimizer: GradientTransformation
    source: Source
    run: RunConfig
    loss_for_step: Callable[[PyTree, Batch], tuple[torch.Tensor, torch.Tensor, dict[str, PyTree]]] | None = None
    optimizer_metrics: Callable[[PyTree], dict[str, torch.Tensor]] = lambda state: {}
    generate: Callable[[PyTree, torch.Tensor, torch.Tensor, int], torch.Tensor] | None = None
    mesh: Mapping[str, int] = field(default_factory=dict)
    rules: Any = None
    simulate: bool = False
    passes: Passes = field(default_factory=Passes)
    settings: Mapping[str, Any] = field(default_factory=dict)

    def loss_and_extra(self, params: PyTree, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, dict[str, PyTree]]:
        """The sum and count of a step's loss, and by name what the step rule reads beside its gradient."""
        if self.loss_for_step is None:
            return *self.loss(params, batch), {}
        return self.loss_for_step(params, batch)


def resolve_device(name: str) -> torch.device:
    """The device that a recipe's ``run.device`` means here; "auto" is CUDA where there is one.

    Raises:
        ConfigError: not a device, or one that this machine lacks.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdecimal()):
        raise ConfigError(f'run.device="{name}" is not a device; write auto, cpu, cuda or cuda:<index>.')
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f'run.device="{name}" was asked for; this machine has {torch.cuda.device_count()} CUDA devices '
            "that torch can use. Write run.device=cpu."
        )
    return torch.device(name)
