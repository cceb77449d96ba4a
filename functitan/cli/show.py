"""The command ``functitan show``: a recipe's parameters and how they are laid out."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from functitan.recipes.base import Recipe


def show(
    recipe: Annotated[str, typer.Argument(help="A recipe's name, or path/to/file.py:function for one of your own.")],
    mesh: Annotated[
        str | None,
        typer.Option("--mesh", help="Mesh axes and sizes, such as fsdp=2,tensor=2; by default the recipe's."),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="PATH=VALUE", help="Set any field, such as rules.mlp=none."),
    ] = None,
    optim: Annotated[bool, typer.Option("--optim", help="Show which optimizer rule steps each parameter.")] = False,
) -> None:
    """List a recipe's parameters and how they lie over the mesh."""
    from functitan import tree
    from functitan.cli.settings import chosen_recipe
    from functitan.columns import columns, human_bytes, human_count, terminal_width
    from functitan.compiler.collectives import short_dtype
    from functitan.sharding.mesh import abstract_mesh
    from functitan.train.abstract import mesh_axes
    from functitan.train.init import abstract_init

    chosen = chosen_recipe(recipe, mesh=mesh, set_=set_)
    declared = chosen.family.declare(chosen.model)
    if optim:
        _show_optim(chosen, declared)
        return
    grid = abstract_mesh(mesh_axes(chosen.mesh, chosen.rules))
    rows: list[tuple[object, ...]] = [("parameter", "shape", "dtype", "logical axes", "spec", "per rank")]
    arrays = tree.leaves(abstract_init(declared, grid, chosen.rules))
    for (path, param), array in zip(tree.flatten_with_paths(declared)[0], arrays, strict=True):
        rows.append(
            (
                path,
                "x".join(map(str, param.shape)) or "scalar",
                short_dtype(str(param.dtype).removeprefix("torch.")),
                ", ".join(a or "-" for a in param.axes),
                str(array.layout),
                human_bytes(array.nbytes_local),
            )
        )
    count = sum(math.prod(p.shape) for p in tree.leaves(declared))
    held = human_bytes(sum(a.nbytes_local for a in arrays))
    where = ", ".join(f"{a}={n}" for a, n in chosen.mesh.items()) or "one device"
    typer.echo(f"{chosen.name} on {where}\n\n{columns(rows, right=(5,), width=terminal_width())}\n")
    typer.echo(f"{human_count(count)} parameters ({count:,}), {held} per rank")


def _show_optim(recipe: Recipe, declared: Any) -> None:
    """Which rule steps each leaf, and how much each rule steps."""
    from functitan import tree
    from functitan.columns import human_count
    from functitan.optim import label_tree, state_bytes, table
    from functitan.shapes import ShapeDtypeStruct, eval_shape

    counts: dict[str, int] = {}
    labels = recipe.optim.labels()
    for p, label in zip(tree.leaves(declared), tree.leaves(label_tree(declared, labels)), strict=True):
        counts[label] = counts.get(label, 0) + math.prod(p.shape)
    typer.echo(f"{recipe.name}\n\n{table(declared, labels)}\n")
    typer.echo(", ".join(f"{label}: {human_count(n)} parameters ({n:,})" for label, n in counts.items()))
    shapes = tree.map(lambda p: ShapeDtypeStruct(p.shape, p.dtype), declared)
    held = state_bytes(eval_shape(recipe.optim.build(recipe.run.steps).init, shapes))
    typer.echo(f"state: {held / sum(counts.values()):.2f} bytes per parameter")
