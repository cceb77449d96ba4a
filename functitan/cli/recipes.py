"""The command ``functitan recipes``."""

from __future__ import annotations

import typer


def recipes() -> None:
    """List the recipes."""
    from functitan.recipes.registry import RECIPES

    width = max(map(len, RECIPES))
    for name, entry in RECIPES.items():
        typer.echo(f"{name:<{width}}   {entry.about}")
    typer.echo("\nOne of your own: functitan train ./file.py:function, a function that returns a Recipe.")
