"""From the flags that commands share to a recipe."""

from __future__ import annotations

from collections.abc import Sequence

from functitan.recipes import Recipe, load_recipe, override, parse_mesh


def chosen_recipe(
    name: str,
    *,
    mesh: str | None = None,
    simulate: bool | None = None,
    steps: int | None = None,
    device: str | None = None,
    backend: str | None = None,
    set_: Sequence[str] | None = None,
) -> Recipe:
    """The recipe that a command line asks for; None leaves the recipe's value.

    Raises:
        ConfigError: no such recipe, or settings that do not fit it.
    """
    flags = {"simulate": simulate, "run.steps": steps, "run.device": device, "run.backend": backend}
    settings = [*(set_ or ()), *(f"{path}={value}" for path, value in flags.items() if value is not None)]
    return override(load_recipe(name), settings, None if mesh is None else parse_mesh(mesh))
