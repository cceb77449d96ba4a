"""Overrides: ``optim.lr=1e-3`` sets one field of a recipe from text.

All overrides are read before any is applied, and one error names everything that is wrong with them. Fields
of one dataclass change together, so that values which only fit each other can be set in any order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, get_type_hints

from functitan.errors import ConfigError, listed, raise_batch, suggest
from functitan.recipes.base import Family, Recipe
from functitan.recipes.parse import NoSuchChoice, kind_text, parse_value
from functitan.sharding import Rules


def override(recipe: Recipe, settings: Iterable[str], mesh: Mapping[str, int] | None = None) -> Recipe:
    """The recipe with fields set from ``path=value`` texts; a later one wins over an earlier one.

    Paths: a field of any part (``optim.lr``, ``model.layers``), ``mesh.<axis>`` for an axis that the rules
    name, ``rules.<logical axis>`` and ``rules.storage.<logical axis>`` with an axis, several joined by
    commas, or none.

    Args:
        recipe: stays as it is.
        settings: the texts.
        mesh: takes the place of the recipe's mesh, together with the settings, which may change an axis of it.

    Raises:
        ConfigError: names all unknown fields, with suggestions, and all values that do not fit.
    """
    problems = [_unknown_axis(recipe, axis) for axis in mesh or () if axis not in rule_axes(recipe.rules)]
    found: dict[str, Any] = {}
    for text in settings:
        path, equals, value = text.partition("=")
        if not equals:
            problems.append(f'"{text}" sets nothing; write path=value, such as optim.lr=1e-3.')
            continue
        try:
            found[path.strip()] = _read(recipe, path.strip(), value.strip())
        except ConfigError as error:
            problems.append(str(error))
    raise_batch(ConfigError, problems, "the settings")
    changes = {tuple(path.split(".")): value for path, value in found.items()}
    if mesh is not None:
        axes = {names[1]: changes.pop(names) for names in list(changes) if names[0] == "mesh"}
        changes[("mesh",)] = {**mesh, **axes}
    return _apply(recipe, changes)


def parse_mesh(text: str) -> dict[str, int]:
    """``fsdp=2,tensor=4`` as axis sizes; an empty text is one device.

    Raises:
        ConfigError: a part that is not an axis and a size.

    >>> parse_mesh("fsdp=2,tensor=4")
    {'fsdp': 2, 'tensor': 4}
    """
    sizes: dict[str, int] = {}
    for part in (p.strip() for p in text.split(",")):
        if not part:
            continue
        axis, _, size = (p.strip() for p in part.partition("="))
        if not axis.isidentifier() or not size.isdecimal() or int(size) < 1 or axis in sizes:
            raise ConfigError(
                f'the mesh "{text}" is not a list of different axes with sizes: "{part}". Write --mesh fsdp=2,tensor=4.'
            )
        sizes[axis] = int(size)
    return sizes


def with_mesh(recipe: Recipe, sizes: Mapping[str, int]) -> Recipe:
    """The recipe on another mesh.

    Raises:
        ConfigError: an axis that no rule of the recipe names: it would only repeat the work.
    """
    return override(recipe, (), sizes)


def rule_axes(rules: Rules) -> list[str]:
    """The mesh axes that rules name, in order of appearance."""
    rows = [*rules.names.values(), *rules.storage.values()]
    return list(dict.fromkeys(axis for axes in rows for axis in axes))


def fields_of(recipe: Recipe) -> dict[str, str]:
    """Every path that can be set, with its type: for help and suggestions."""
    rows: dict[str, str] = {}

    def visit(value: Any, prefix: str) -> None:
        for name, kind in _kinds(value).items():
            part = getattr(value, name)
            if dataclasses.is_dataclass(part):
                visit(part, f"{prefix}{name}.")
            elif name not in ("rules", "mesh"):
                rows[prefix + name] = kind_text(kind)

    visit(recipe, "")
    rows |= {f"mesh.{axis}": "int" for axis in rule_axes(recipe.rules)}
    rows |= {f"rules.{name}": "axes or none" for name in recipe.rules.names}
    rows |= {f"rules.storage.{name}": "axes or none" for name in recipe.rules.names}
    return rows


def _read(recipe: Recipe, path: str, text: str) -> Any:
    """The value for a path, of the right type; every mistake is a ConfigError."""
    names = path.split(".")
    if names[0] == "mesh" and len(names) == 2:
        if names[1] not in rule_axes(recipe.rules):
            raise ConfigError(_unknown_axis(recipe, names[1]))
        return _parsed(path, text, int)
    if names[0] == "rules" and len(names) > 1:
        if names[-1] not in recipe.rules.names or names[1:-1] not in ([], ["storage"]):
            raise _unknown(recipe, path)
        axes = _parsed(path, text, tuple[str, ...] | None)
        return axes if axes is None or len(axes) != 1 else axes[0]
    value: Any = recipe
    for i, name in enumerate(names):
        kinds = _kinds(value) if dataclasses.is_dataclass(value) else {}
        if name not in kinds:
            raise _unknown(recipe, path)
        last = i == len(names) - 1
        part = getattr(value, name)
        if last and (not dataclasses.is_dataclass(part) or text.lower() == "none") and name not in ("rules", "mesh"):
            return _parsed(path, text, kinds[name])
        value = part
    inside = [known for known in fields_of(recipe) if known.startswith(path + ".")]
    raise ConfigError(f"{path} is a group of settings; set one of {listed(inside)}.")


def _parsed(path: str, text: str, kind: Any) -> Any:
    try:
        return parse_value(text, kind)
    except NoSuchChoice as error:
        raise ConfigError(f"{path}: {error}") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}; it takes {kind_text(kind)}.") from None


def _kinds(value: Any) -> dict[str, Any]:
    """The fields that can be set, with their types."""
    hints = get_type_hints(type(value))
    return {f.name: hints[f.name] for f in dataclasses.fields(value) if hints[f.name] is not Family}


def _unknown(recipe: Recipe, path: str) -> ConfigError:
    known = fields_of(recipe)
    group = path.rpartition(".")[0]
    near = [k for k in known if k.rpartition(".")[0] == group] or sorted({k.split(".")[0] for k in known})
    return ConfigError(
        f'there is no setting "{path}" in recipe {recipe.name}; there are {listed(near)}.{suggest(path, known)}'
    )


def _unknown_axis(recipe: Recipe, axis: str) -> str:
    known = rule_axes(recipe.rules)
    return (
        f'mesh axis "{axis}" is named by no rule of recipe {recipe.name}; the rules name {listed(known)}.'
        f"{suggest(axis, known)}"
    )


def _apply(value: Any, changes: Mapping[tuple[str, ...], Any]) -> Any:
    """``value`` with all changes; parts are rebuilt once, inner ones first."""
    if isinstance(value, Rules):
        storage = {names[1]: v for names, v in changes.items() if names[0] == "storage" and len(names) == 2}
        return value.replace(storage, **{names[0]: v for names, v in changes.items() if len(names) == 1})
    if isinstance(value, Mapping):
        return {**value, **{names[0]: v for names, v in changes.items()}}
    own = {names[0]: v for names, v in changes.items() if len(names) == 1}
    deeper = dict.fromkeys(names[0] for names in changes if len(names) > 1)
    for name in deeper:
        inner = {names[1:]: v for names, v in changes.items() if names[0] == name and len(names) > 1}
        own[name] = _apply(getattr(value, name), inner)
    return dataclasses.replace(value, **own)
