"""The steps of a task: plain PyTorch on one device, or compiled for a mesh."""

from __future__ import annotations

from typing import Any

import torch

from functitan import random, tree
from functitan.data import Batch
from functitan.errors import ConfigError
from functitan.optim.evaluation import eval_params, has_eval_params
from functitan.runtime.compiled import compile
from functitan.sharding import processes
from functitan.sharding.array import Array, on_mesh
from functitan.sharding.mesh import make_mesh
from functitan.train.abstract import compile_step, mesh_axes
from functitan.train.init import init
from functitan.train.steps import Steps, TrainState, make_init, make_train_step
from functitan.train.task import Task, resolve_device

PyTree = Any


def build_steps(task: Task) -> Steps:
    """The functions that train a task on its mesh; an empty mesh is one device, op by op plain PyTorch.

    Raises:
        ShardingError: a mesh that needs more processes than run, or that does not fit the model.
        ConfigError: a device that this machine lacks; several processes that would each train by themselves.
    """
    running = processes.world()
    if running > 1 and (task.simulate or not task.mesh):
        why = "the run simulates its mesh in one process" if task.simulate else "the run has no mesh"
        instead = "leave simulate out" if task.simulate else f"lay one over them, such as --mesh fsdp={running}"
        raise ConfigError(
            f"{running} processes run, and {why}: each would train the same model by itself. Start one process, or "
            f"{instead}."
        )
    return _on_mesh(task) if task.mesh or task.run.backend != "eager" else _on_one_device(task)


def _on_one_device(task: Task) -> Steps:
    device = resolve_device(task.run.device)

    def evaluate(params: PyTree, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            return task.loss(params, batch)

    def averaged(state: TrainState) -> PyTree:
        return eval_params(state.opt, state.params)

    return Steps(make_init(task, device), make_train_step(task), evaluate, averaged, lambda params: params, device)


def _on_mesh(task: Task) -> Steps:
    device = resolve_device(task.run.device)
    mesh = make_mesh(mesh_axes(task.mesh, task.rules), simulate=task.simulate)
    train = compile_step(task, mesh)
    evaluate = compile(task.loss, mesh=mesh, rules=task.rules, backend=task.run.backend, passes=task.passes)
    optimizer_init = compile(task.optimizer.init, mesh=mesh, rules=task.rules)

    average = compile(eval_params, mesh=mesh, rules=task.rules)

    def averaged(state: TrainState) -> PyTree:
        return average(state.opt, state.params) if has_eval_params(state.opt) else state.params

    def first_state() -> TrainState:
        params = init(random.key(task.run.seed, device=device), task.declared, mesh, task.rules)
        # Whole leaves too as Arrays: what is donated is one.
        return tree.map(lambda x: on_mesh(x, mesh), TrainState(params, optimizer_init(params)))

    return Steps(first_state, train, evaluate, averaged, whole, device, (train, evaluate))


def whole(params: PyTree) -> PyTree:
    """Parameters as whole plain tensors, gathered into this process."""
    return tree.map(lambda p: p.full() if isinstance(p, Array) else p, params)
