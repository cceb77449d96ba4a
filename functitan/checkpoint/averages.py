"""Averages that a file was written without: where each leaf of a state with one is in a file of a state without."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from functitan import tree
from functitan.optim import EmaState


def absent_averages(like: Any, names: Collection[str]) -> list[str]:
    """The places of :class:`functitan.optim.EmaState` in a state, of whose averages a file has no leaf."""
    return [place for place in _places(like, "") if not any(n.startswith(_join(place, "average/")) for n in names)]


def started_averages(paths: Sequence[str], absent: Sequence[str], params: str) -> dict[str, tuple[str, bool]]:
    """By leaf of a state with averages its name in a file without, and whether it begins there.

    What is averaged stands one level higher in such a file; an average begins as the parameters; its decay is the
    leaf's own, which its own name says.

    >>> started_averages(["opt/average/w", "opt/decay", "opt/inner/mu/w", "params/w"], ["opt"], "params")
    {'opt/average/w': ('params/w', True), 'opt/decay': ('opt/decay', True), 'opt/inner/mu/w': ('opt/mu/w', False)}
    """
    found = {}
    for path in paths:
        for place in absent:
            average, inner = _join(place, "average/"), _join(place, "inner/")
            if path.startswith(average):
                found[path] = (_join(params, path.removeprefix(average)), True)
            elif path == _join(place, "decay"):
                found[path] = (path, True)
            elif path.startswith(inner):
                found[path] = (_join(place, path.removeprefix(inner)), False)
    return found


def started_text(path: str | Path, started: Mapping[str, tuple[str, bool]]) -> str:
    """What :func:`functitan.checkpoint.load_state` says of averages that it began."""
    leaves = [name for name, (source, begins) in started.items() if begins and source != name]
    shown = f"{leaves[0]} to {leaves[-1]}" if len(leaves) > 1 else "".join(leaves)
    return (
        f"{path} was written without an average of the parameters: {len(leaves)} of its leaves, {shown}, begin as the "
        "parameters in the file; all other leaves were loaded."
    )


def _places(node: Any, place: str) -> list[str]:
    if isinstance(node, EmaState):
        return [place]
    found = tree.children(node)
    if found is None:
        return []
    return [p for child, key in zip(*found, strict=True) for p in _places(child, _join(place, str(key)))]


def _join(place: str, rest: str) -> str:
    return f"{place}/{rest}" if place else rest
