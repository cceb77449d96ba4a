"""The command ``functitan``: one file per group of commands, all light to import."""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Annotated

import typer

from functitan.cli.check import check
from functitan.cli.lower import lower
from functitan.cli.recipes import recipes
from functitan.cli.rules import rules
from functitan.cli.show import show
from functitan.cli.train import train
from functitan.errors import FunctitanError

app = typer.Typer(
    name="functitan",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Pure functions on global tensors, sharded by annotations, for PyTorch.",
)
for command in (train, lower, check, show, recipes, rules):
    app.command()(command)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"functitan {version('functitan')}")
        raise typer.Exit


@app.callback()
def common(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Pure functions on global tensors, sharded by annotations, for PyTorch."""


def main() -> None:
    """Run the command line; an error that functitan raised is its message and exit code 2."""
    try:
        app()
    except FunctitanError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
