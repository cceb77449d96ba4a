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
    import os

    try:
        app()
    except FunctitanError as error:
        _fail(str(error), 2)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception:
        if "FUNCTITAN_LAUNCHED" not in os.environ:
            raise
        import traceback

        _fail(traceback.format_exc(), 1)


def _fail(message: str, code: int) -> None:
    """Show an error, or leave it for the launcher of several processes, which shows the first."""
    import os

    if "FUNCTITAN_LAUNCHED" in os.environ:
        from functitan.runtime.launch import report_failure

        if report_failure(message):
            # At once: leaving by way of the process group would wait for processes that wait for this one.
            os._exit(code)
    print(f"error: {message}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
