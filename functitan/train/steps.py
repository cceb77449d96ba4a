"""The functions of a run: initial state, train step, evaluation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from functitan import random, tree
from functitan.accumulation import accumulate_grads
from functitan.autodiff import value_and_grad
from functitan.data import Batch
from functitan.nn.init import init_params
from functitan.optim import apply_updates
from functitan.runtime.compiled import Compiled
from functitan.train.task import Task

PyTree = Any
Metrics = dict[str, torch.Tensor]


@tree.dataclass
class TrainState:
    """What a step changes: the parameters and the optimizer's state."""

    params: PyTree
    opt: PyTree


@dataclass(frozen=True)
class Steps:
    """The functions that the loop calls; whether they are compiled, and for which mesh, is their own affair.

    Attributes:
        init: ``() -> state``.
        train: ``(state, batch) -> (state, metrics)``; the given state must not be used again.
        evaluate: ``(params, batch) -> (sum, count)``.
        eval_params: ``state -> params`` to evaluate, save and generate with: an average where the optimizer keeps one
            for that, see :func:`functitan.optim.eval_params`.
        whole: parameters as a pytree of whole plain tensors, for files and for generation.
        device: where batches are put.
        compiled: those of the functions that are compiled.
    """

    init: Callable[[], TrainState]
    train: Callable[[TrainState, Batch], tuple[TrainState, Metrics]]
    evaluate: Callable[[PyTree, Batch], tuple[torch.Tensor, torch.Tensor]]
    eval_params: Callable[[TrainState], PyTree]
    whole: Callable[[PyTree], PyTree]
    device: torch.device
    compiled: tuple[Compiled, ...] = ()


def make_init(task: Task, device: torch.device) -> Callable[[], TrainState]:
    """Initial state on one device, from the run's seed."""

    def init() -> TrainState:
        params = init_params(random.key(task.run.seed, device=device), task.declared)
        return TrainState(params, task.optimizer.init(params))

    return init


def make_train_step(task: Task) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """The train step as a pure function of global tensors: what runs on one device, and what is compiled for
    a mesh.

    The loss is the sum over the whole batch by the count of the whole batch, divided once, whatever the number of
    microbatches.
    """

    def loss_fn(params: PyTree, batch: Batch) -> tuple[torch.Tensor, tuple[torch.Tensor, dict[str, PyTree]]]:
        total, count, extra = task.loss_and_extra(params, batch)
        # A batch without a single label has loss 0, not 0 / 0.
        return total / count.clamp(min=1), (count, extra)

    def loss_and_grads(params: PyTree, batch: Batch) -> Any:
        n = task.run.microbatches
        if n == 1:
            return value_and_grad(loss_fn, has_aux=True)(params, batch)
        # Extra values are maxima over the batch, as those of attention logits are.
        sums = accumulate_grads(task.loss_and_extra, n, pending=task.run.pending_gradients)
        (total, count, extra), grads = sums(params, batch)
        divisor = count.clamp(min=1)
        return (total / divisor, (count, extra)), tree.map(lambda g: g / divisor, grads)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        (loss, (count, extra)), grads = loss_and_grads(state.params, batch)
        updates, opt = task.optimizer.update(grads, state.opt, state.params, **extra)
        metrics = {"loss": loss, "labels": count, **task.optimizer_metrics(opt)}
        return TrainState(apply_updates(state.params, updates), opt), metrics

    return train_step
