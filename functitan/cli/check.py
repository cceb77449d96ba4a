"""The command ``functitan check``: one device against a simulated mesh, in float64."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

# Everything heavy is imported inside the command, so that --help answers at once.
if TYPE_CHECKING:
    from functitan.recipes import Recipe

#: Bytes that a check may hold: the state of every rank and of one device, in float64.
_MEMORY = 16 * 2**30
#: Copies of the parameters in a check: parameters, two moments, gradients, updates, on both sides.
_COPIES = 12


def check(
    recipe: Annotated[str, typer.Argument(help="A recipe's name, or path/to/file.py:function for one of your own.")],
    mesh: Annotated[
        str | None,
        typer.Option("--mesh", help="Mesh axes and sizes, such as fsdp=2,tensor=2; by default the recipe's."),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="PATH=VALUE", help="Set any field, such as rules.seq=none."),
    ] = None,
) -> None:
    """Compare a train step on one device with the same step on a simulated mesh, in float64.

    Loss, every gradient, and every updated value from given gradients must agree to 1e-10, and every layout with a second
    opinion. Otherwise the first value that differs is named, and the exit code is 1.
    """
    from functitan.cli.settings import chosen_recipe

    chosen = chosen_recipe(recipe, mesh=mesh, set_=set_)
    _refuse_large(chosen)
    report = _report(chosen)
    typer.echo(report)
    if not report:
        raise typer.Exit(1)


def _refuse_large(recipe: Recipe) -> None:
    import math

    from functitan import tree
    from functitan.errors import ConfigError

    count = sum(math.prod(p.shape) for p in tree.leaves(recipe.family.declare(recipe.model)))
    need = count * 8 * _COPIES
    if need > _MEMORY:
        raise ConfigError(
            f"a check of {recipe.name} holds about {need / 2**30:,.0f} GiB: {count:,} parameters in float64, {_COPIES} copies. "
            "Check the same rules on smaller sizes, such as --set model.layers=2 --set model.dim=64, or a debug recipe."
        )


def _report(recipe: Recipe) -> object:
    from functitan.runtime.check import check as compare
    from functitan.sharding.mesh import make_mesh
    from functitan.train.abstract import mesh_axes
    from functitan.train.build import build_steps
    from functitan.train.steps import make_train_step

    task = recipe.replace(simulate=True, mesh=dict(recipe.mesh) or {"data": 1}).task()
    grid = make_mesh(mesh_axes(task.mesh, task.rules), simulate=True)
    state = build_steps(task).init()
    return compare(make_train_step(task), (state, task.source.batch(0)), grid, task.rules, passes=task.passes)
