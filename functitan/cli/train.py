"""The command ``functitan train``."""

from __future__ import annotations

from typing import Annotated

import typer

# Everything heavy is imported inside the command, so that --help answers at once.


def train(
    recipe: Annotated[str, typer.Argument(help="A recipe's name, or path/to/file.py:function for one of your own.")],
    mesh: Annotated[
        str | None,
        typer.Option("--mesh", help='Mesh axes and sizes, such as fsdp=2,tensor=2; "" for one device.'),
    ] = None,
    simulate: Annotated[
        bool | None,
        typer.Option("--simulate/--no-simulate", help="Run all ranks of the mesh in this process."),
    ] = None,
    steps: Annotated[int | None, typer.Option("--steps", help="The number of optimizer steps.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="PATH=VALUE", help="Set any field, such as optim.lr=1e-3."),
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option("--backend", help="eager: op by op; inductor: compiled first, needs a C++ compiler."),
    ] = None,
    nproc: Annotated[
        int | None,
        typer.Option("--nproc", metavar="N", help="Start N processes on this machine, one per rank of the mesh."),
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", help="cpu, cuda or cuda:<index>; CUDA is untested so far.")
    ] = None,
) -> None:
    """Train a recipe and write a run folder: config, metrics, parameters.

    A flag that is not given leaves the recipe's value as it is. Flags are applied after --set.
    """
    from functitan.cli.launched import started
    from functitan.cli.settings import chosen_recipe

    if nproc is not None and started(nproc):
        return
    from functitan.train import train as run

    run(
        chosen_recipe(
            recipe, mesh=mesh, simulate=simulate, steps=steps, device=device, backend=backend, set_=set_
        ).task()
    )
