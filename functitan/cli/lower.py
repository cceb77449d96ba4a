"""The command ``functitan lower``: what a recipe holds, sends and costs on any mesh, without running it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

# Everything heavy is imported inside the command, so that --help answers at once.
if TYPE_CHECKING:
    from functitan.compiler.program import Program
    from functitan.recipes import Recipe


def lower(
    recipe: Annotated[str, typer.Argument(help="A recipe's name, or path/to/file.py:function for one of your own.")],
    mesh: Annotated[
        str | None,
        typer.Option("--mesh", help="Mesh axes and sizes, such as data=2,fsdp=4,tensor=2; by default the recipe's."),
    ] = None,
    hardware: Annotated[
        str | None,
        typer.Option(
            "--hardware", help="Whether it fits and how long a step takes on h100, h200, b200, gb200, mi300x."
        ),
    ] = None,
    collectives: Annotated[
        bool, typer.Option("--collectives", help="Every collective: count, bytes, what it moves, and why.")
    ] = False,
    text: Annotated[
        bool,
        typer.Option("--text", help="The lowered code of the model's layers (with --body another part)."),
    ] = False,
    body: Annotated[
        str | None, typer.Option("--body", help='What --text shows: a body\'s name, "step", or "all".')
    ] = None,
    passes: Annotated[bool, typer.Option("--passes", help="What each pass changed in the lowered code.")] = False,
    optim: Annotated[
        bool,
        typer.Option("--optim", help="Which ranks work on which matrices of the optimizer, and what moves for it."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Everything as JSON.")] = False,
    versus: Annotated[
        str | None, typer.Option("--vs", metavar="MESH", help="A second mesh, side by side with the first.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="PATH=VALUE", help="Set any field, such as rules.seq=none."),
    ] = None,
) -> None:
    """Report what a recipe holds, sends and costs on a mesh.

    Its train step is lowered, not run, so the mesh need not exist. With --hardware: whether it fits, and how
    long a step takes at peak rates.
    """
    from functitan.cli.settings import chosen_recipe
    from functitan.compiler.hardware import chip
    from functitan.compiler.passes import passes_text
    from functitan.compiler.work_report import work_text

    if hardware is not None:
        hardware = chip(hardware).name  # refused before anything is lowered
    chosen = chosen_recipe(recipe, mesh=mesh, set_=set_)
    if versus is not None:
        other = chosen_recipe(recipe, mesh=versus, set_=set_)
        typer.echo(_side_by_side(chosen, other, hardware, as_json))
        return
    program = _lowered(chosen, hardware)
    if as_json:
        typer.echo(program.to_json())
        return
    parts = []
    if collectives:
        parts.append(str(program.collectives()))
    if passes:
        parts.append(passes_text(program.passes))
    if optim:
        parts.append(work_text(program))
    if text or body is not None:
        parts.append(_code(program, body))
    typer.echo("\n\n".join(parts) if parts else _screen(chosen, program))


def _lowered(recipe: Recipe, hardware: str | None) -> Program:
    from functitan.train.abstract import lower_step

    return lower_step(recipe.textless_task(), hardware=hardware)


def _screen(recipe: Recipe, program: Program) -> str:
    return f"{_title(recipe)}\n{program}"


def _title(recipe: Recipe) -> str:
    import math

    from functitan import tree
    from functitan.columns import human_count

    count = sum(math.prod(p.shape) for p in tree.leaves(recipe.family.declare(recipe.model)))
    remat = "" if recipe.remat is None else f", {recipe.remat}"
    tokens = f"{recipe.data.batch} x {recipe.data.seq} tokens a step"
    return f"{recipe.name}: {human_count(count)} parameters, {tokens}{remat}"


def _code(program: Program, body: str | None) -> str:
    """The asked part of the code; by default the bodies (the layers), or the step when there are none."""
    from functitan.compiler.text import body_names

    if body == "all":
        return program.text()
    names = [body] if body is not None else list(body_names(program).values()) or ["step"]
    return "\n\n".join(program.text(name) for name in names)


def _side_by_side(first: Recipe, second: Recipe, hardware: str | None, as_json: bool) -> str:
    import json

    from functitan.compiler.report import comparison, report

    names = []
    reports = []
    for recipe in (first, second):
        program = _lowered(recipe, hardware)
        names.append(",".join(f"{a}={n}" for a, n in recipe.mesh.items()) or "one device")
        reports.append(report(program, program.memory(), None if hardware is None else program.cost()))
    if as_json:
        return json.dumps(reports, indent=2)
    return f"{_title(first)}\n\n{comparison((names[0], names[1]), (reports[0], reports[1]))}"
