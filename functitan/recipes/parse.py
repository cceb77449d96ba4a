"""Text to a value of an annotated type."""

from __future__ import annotations

import types
from typing import Any, Literal, Union, get_args, get_origin

import torch

from functitan.errors import ConfigError, listed, suggest

_DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64", "int64", "int32")}
_TRUE, _FALSE, _NONE = ("true", "yes", "on", "1"), ("false", "no", "off", "0"), ("none", "null")


class NoSuchChoice(ConfigError):
    """A text is none of a few that can be chosen; the message names them all."""


def parse_value(text: str, kind: Any) -> Any:
    """``text`` as a value of the type ``kind``.

    Args:
        text: as written on a command line.
        kind: int, float, bool, str, torch.dtype, a Literal, a tuple type, or one of these or None.

    Raises:
        ConfigError: the text is not one; the message says what is.

    >>> parse_value("1e3", int), parse_value("none", float | None), parse_value("2,4", tuple[int, ...])
    (1000, None, (2, 4))
    """
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        options = get_args(kind)
        if type(None) in options and text.lower() in _NONE:
            return None
        kinds = [k for k in options if k is not type(None)]
        if len(kinds) == 1 and get_origin(kinds[0]) is Literal:
            return _choice(text, kinds[0], ["none"])
        return _first_that_parses(text, kinds, type(None) in options)
    if origin is Literal:
        return _choice(text, kind, [])
    if origin is tuple:
        element = get_args(kind)[0]
        return tuple(parse_value(part.strip(), element) for part in text.split(",") if part.strip())
    if kind is bool:
        if text.lower() in _TRUE + _FALSE:
            return text.lower() in _TRUE
        raise ConfigError(f'"{text}" is not true or false')
    if kind is int:
        return _integer(text)
    if kind is float:
        try:
            return float(text)
        except ValueError:
            raise ConfigError(f'"{text}" is not a number') from None
    if kind is torch.dtype:
        return _named(text.removeprefix("torch."), _DTYPES, "a dtype, one of")
    if kind is str:
        return text
    raise ConfigError(f"a value of type {kind_text(kind)} cannot be set from text; write a recipe in a file")


def kind_text(kind: Any) -> str:
    """A type as messages show it.

    >>> kind_text(int | None)
    'int | None'
    """
    return kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        pass
    try:
        number = float(text)
    except ValueError:
        raise ConfigError(f'"{text}" is not a whole number') from None
    if not number.is_integer():
        raise ConfigError(f'"{text}" is not a whole number')
    return int(number)


def _first_that_parses(text: str, kinds: list[Any], optional: bool) -> Any:
    failures = []
    for kind in kinds:
        try:
            return parse_value(text, kind)
        except ConfigError as error:
            failures.append(str(error))
    raise ConfigError("; ".join(failures) + (", nor none" if optional else ""))


def _choice(text: str, kind: Any, more: list[str]) -> Any:
    known = {str(option): option for option in get_args(kind)}
    if text not in known:
        names = [*known, *more]
        raise NoSuchChoice(f'"{text}" is not one of {listed(names)}.{suggest(text, names)}')
    return known[text]


def _named(text: str, known: dict[str, Any], what: str) -> Any:
    if text not in known:
        raise ConfigError(f'"{text}" is not {what} {listed(known)}.{suggest(text, known)}'.rstrip("."))
    return known[text]
