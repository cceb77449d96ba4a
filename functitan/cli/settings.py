"""From the flags that commands share to a recipe."""

from __future__ import annotations

from collections.abc import Sequence

from functitan.recipes import Recipe, load_recipe, override, parse_mesh, with_mesh


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
    recipe = load_recipe(name)
    if mesh is not None:
        # Before the settings: --set mesh.tensor=4 changes one axis of the mesh that was asked for.
        recipe = with_mesh(recipe, parse_mesh(mesh))
    return override(recipe, settings)
