"""A train step on shapes alone: what lowers and reports a task for any mesh, without memory for values."""

from __future__ import annotations

from typing import Any

from functitan import tree
from functitan.compiler.program import Program
from functitan.runtime.compiled import Compiled, compile
from functitan.shapes import eval_shape
from functitan.sharding.array import Array, abstract_array
from functitan.sharding.logical import Rules, layout_of
from functitan.sharding.mesh import Mesh, abstract_mesh
from functitan.train.init import abstract_init
from functitan.train.steps import TrainState, make_train_step
from functitan.train.task import Task

PyTree = Any


def abstract_state(task: Task, mesh: Mesh) -> TrainState:
    """Parameters and optimizer state of a task as Arrays without values.

    The state's layouts are what the lowering gives to the optimizer's ``init`` on sharded parameters.
    """
    params = abstract_init(task.declared, mesh, task.rules)
    program = compile(task.optimizer.init, mesh=mesh, rules=task.rules).lower(params)
    leaves = [
        abstract_array(typ.shape, typ.dtype, layout, mesh)
        for typ, layout in zip(program.out_types, program.out_layouts, strict=True)
    ]
    return TrainState(params, tree.unflatten(program.out_tree, leaves))


def abstract_batch(task: Task, mesh: Mesh) -> dict[str, Array]:
    """A batch of a task as Arrays without values, its rows split as the rule for "batch" says."""
    rows = task.rules.names.get("batch", ())
    return {
        name: abstract_array(
            x.shape,
            x.dtype,
            layout_of(x.shape, [rows or None, *[None] * (x.ndim - 1)], mesh, f"batch/{name}"),
            mesh,
        )
        for name, x in eval_shape(task.source.batch, 0).items()
    }


def compile_step(task: Task, mesh: Mesh) -> Compiled:
    """The train step ``(state, batch) -> (state, metrics)`` for a mesh; the given state is given up."""
    return compile(
        make_train_step(task),
        mesh=mesh,
        rules=task.rules,
        donate_argnums=0,
        backend=task.run.backend,
        passes=task.passes,
    )


def lower_step(task: Task, *, hardware: str | None = None) -> Program:
    """The Program of a task's train step on its own mesh, which need not exist.

    Args:
        task: what to lower.
        hardware: a chip for costs.
    """
    mesh = abstract_mesh(mesh_axes(task.mesh, task.rules), hardware=hardware)
    program = compile_step(task, mesh).lower(abstract_state(task, mesh), abstract_batch(task, mesh))
    declared = {name for param in tree.leaves(task.declared) for name in param.axes}
    # The layouts of parameters ask for rules too, before the step is lowered.
    program.unused_rules = [name for name in program.unused_rules if name not in declared]
    return program


def mesh_axes(sizes: Any, rules: Rules) -> dict[str, int]:
    """The axes of a mesh, with size 1 for those that rules name and the mesh lacks.

    >>> mesh_axes({"tensor": 2}, Rules(batch=("data", "fsdp"), mlp="tensor"))
    {'tensor': 2, 'data': 1, 'fsdp': 1}
    """
    named = [axis for axes in (*rules.names.values(), *rules.storage.values()) for axis in axes]
    return dict(sizes) | {axis: 1 for axis in named if axis not in sizes}
