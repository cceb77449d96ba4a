"""Recipes by name, and recipes in a user's own file.

The table holds text only, so that listing it imports nothing heavy.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

from functitan.errors import ConfigError, listed, suggest

if TYPE_CHECKING:
    from functitan.recipes.base import Recipe


class Entry(NamedTuple):
    """Where a recipe is, and what it is in one line."""

    function: str
    about: str


_LLAMA3 = "functitan.recipes.llama3:"
RECIPES: dict[str, Entry] = {
    "llama3-debug": Entry(_LLAMA3 + "debug", "6M parameters on real text in minutes, on a laptop's CPU"),
    "llama3-debug-muon": Entry(_LLAMA3 + "debug_muon", "the same, its matrices stepped by Muon"),
    "llama3-1b": Entry(_LLAMA3 + "llama3_1b", "Llama 3.2 1B, tied embeddings"),
    "llama3-3b": Entry(_LLAMA3 + "llama3_3b", "Llama 3.2 3B, tied embeddings"),
    "llama3-8b": Entry(_LLAMA3 + "llama3_8b", "Llama 3.1 8B, FSDP"),
    "llama3-70b": Entry(_LLAMA3 + "llama3_70b", "Llama 3.1 70B, FSDP and tensor parallel"),
    "llama3-405b": Entry(_LLAMA3 + "llama3_405b", "Llama 3.1 405B, data, FSDP and tensor parallel"),
}


def load_recipe(name: str) -> Recipe:
    """A recipe by its name, or from a file as ``path/to/file.py:function``.

    Raises:
        ConfigError: no such recipe, file or function, or one that does not give a Recipe.
    """
    if ".py" in name:
        return _from_file(name)
    if name not in RECIPES:
        raise ConfigError(
            f'there is no recipe "{name}"; there are {listed(RECIPES)}.{suggest(name, RECIPES)} '
            "A recipe of your own is written as ./file.py:function."
        )
    module, _, function = RECIPES[name].function.partition(":")
    return _call(importlib.import_module(module), function, name)


def _from_file(name: str) -> Recipe:
    file, _, function = name.rpartition(":") if not name.endswith(".py") else (name, "", "")
    path = Path(file)
    if not path.is_file():
        raise ConfigError(f'recipe "{name}": there is no file {file}. Write path/to/file.py:function.')
    # Named by the full path: two files of one name are two modules.
    module_name = f"functitan_recipe_{abs(hash(path.resolve()))}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f'recipe "{name}": {file} is not a Python file.')
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up by name while they are made.
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[module_name]
        raise ConfigError(f'recipe "{name}": {_where(error, path)}') from error
    return _call(module, function, name)


def _call(module: ModuleType, function: str, name: str) -> Recipe:
    from functitan.recipes.base import Recipe

    made = getattr(module, function, None) if function else None
    if not callable(made):
        own = [
            key
            for key, value in vars(module).items()
            if callable(value) and not key.startswith("_") and getattr(value, "__module__", "") == module.__name__
        ]
        what = f'has no function "{function}"' if function else "needs the name of a function"
        raise ConfigError(
            f'recipe "{name}" {what}; its file has {listed(own)}.{suggest(function, own)} '
            "Write path/to/file.py:function."
        )
    try:
        recipe = made()
    except TypeError as error:
        raise ConfigError(f'recipe "{name}": calling {function}() failed: {error}') from error
    if not isinstance(recipe, Recipe):
        raise ConfigError(
            f'recipe "{name}": {function}() gave a {type(recipe).__name__}; it must return a functitan.recipes.Recipe.'
        )
    return recipe


def _where(error: Exception, path: Path) -> str:
    """The line of the user's file at which an import failed, and the error."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return f"{path}:{error.lineno}: {error.msg}"
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
    place = f"{path}:{lines[-1]}" if lines else str(path)
    return f"{place}: {type(error).__name__}: {error}"
