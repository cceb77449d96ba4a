"""The command ``functitan rules``: the ops that the compiler can shard."""

from __future__ import annotations

import textwrap
from typing import Annotated

import typer


def rules(
    search: Annotated[str, typer.Argument(help="Only ops with this in their name.")] = "",
) -> None:
    """List the ops that have a sharding rule, by family."""
    from functitan.sharding.op_rules import covered

    total = 0
    for family, ops in covered().items():
        found = [op for op in ops if search in op]
        if not found:
            continue
        total += len(found)
        typer.echo(f"{family} ({len(found)})")
        # Overloads of one op stand behind its name once.
        names = dict.fromkeys(op.removesuffix(".default") for op in found)
        typer.echo(textwrap.fill(", ".join(names), 100, initial_indent="  ", subsequent_indent="  ") + "\n")
    typer.echo(f"{total} ops, and every op that torch marks as pointwise.")
    typer.echo('One of your own: ft.sharding.register_rule(torch.ops.mylib.op, "..._,_->..._").')
