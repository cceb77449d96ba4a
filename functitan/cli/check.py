"""The command ``functitan check``: one device against a mesh, in float64."""

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
#: The exit code of a launched process that found a difference: the report is printed, there is no error to show.
_DIFFERS = 3


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
    backend: Annotated[
        str | None,
        typer.Option(
            "--backend", help="With --nproc: eager, op by op, or inductor, compiled. By default the recipe's."
        ),
    ] = None,
    nproc: Annotated[
        int | None,
        typer.Option(
            "--nproc",
            metavar="N",
            help="Compare with N processes on this machine, one per rank, instead of a simulated mesh. "
            "For a recipe without a mesh: data=N.",
        ),
    ] = None,
) -> None:
    """Compare a train step on one device with the same step on a mesh, in float64.

    Loss, every gradient, and every updated value from given gradients must agree to 1e-10, and every layout with a second
    opinion. Otherwise the first value that differs is named, and the exit code is 1.

    The mesh is simulated, unless --nproc starts its processes or torchrun has.
    """
    from functitan.cli.settings import chosen_recipe
    from functitan.sharding import processes

    chosen = chosen_recipe(recipe, mesh=mesh, set_=set_, backend=backend)
    _refuse_large(chosen)
    ranks = nproc or processes.world()
    if not dict(chosen.mesh):
        chosen = chosen.replace(mesh={"data": ranks})
    _refuse_mesh(chosen, nproc)
    if nproc is not None and _launched(nproc):
        return
    report = _report(chosen)
    if processes.rank() == 0:
        typer.echo(report)
    processes.wait_for_all()  # the first process that leaves with an error ends the others
    if not report:
        raise typer.Exit(1 if nproc is None else _DIFFERS)


def _refuse_mesh(recipe: Recipe, nproc: int | None) -> None:
    """Before processes start: what they would all refuse."""
    import math

    from functitan.errors import ConfigError
    from functitan.sharding import processes

    text = ",".join(f"{a}={n}" for a, n in recipe.mesh.items())
    size = math.prod(recipe.mesh.values())
    if nproc and nproc != size:  # 0 is refused where processes start
        raise ConfigError(
            f"--nproc {nproc} is one process per rank, and the mesh {text} has {size}; write --nproc {size}."
        )
    if recipe.run.backend == "inductor" and nproc is None and processes.world() == 1:
        raise ConfigError(
            "--backend inductor compiles what one process runs, and a simulated mesh is interpreted. Write "
            f"--nproc {size} as well, or --backend eager."
        )


def _launched(nproc: int) -> bool:
    """Start this command line as so many processes; False in one of them."""
    from functitan.cli.launched import started
    from functitan.runtime.launch import LaunchError

    try:
        return started(nproc)
    except LaunchError as error:
        if error.code != _DIFFERS:
            raise
        raise typer.Exit(1) from None


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
    from functitan.sharding import processes
    from functitan.sharding.mesh import make_mesh
    from functitan.train.abstract import mesh_axes
    from functitan.train.build import build_steps
    from functitan.train.steps import make_train_step

    simulate = processes.world() == 1
    task = recipe.replace(simulate=simulate).task()
    grid = make_mesh(mesh_axes(task.mesh, task.rules), simulate=simulate)
    state = build_steps(task).init()
    backend = "eager" if simulate else task.run.backend
    args = (state, task.source.batch(0))
    return compare(make_train_step(task), args, grid, task.rules, passes=task.passes, backend=backend)
