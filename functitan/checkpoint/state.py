"""A whole state, parameters and optimizer's, as one safetensors file: any tree of tensors and Arrays, on any mesh.

Every leaf is kept as it is, dtype and bits. What is stored depends on no mesh, so a file written on four ranks loads on
three.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch

from functitan import tree
from functitan.checkpoint.averages import absent_averages, started_averages, started_text
from functitan.checkpoint.load import read_tensors
from functitan.checkpoint.save import save_params
from functitan.errors import ConfigError, listed, raise_batch, suggest
from functitan.sharding import processes
from functitan.sharding.array import Array, put


def save_state(path: str | Path, state: Any) -> None:
    """Write a state; the file appears when it is complete.

    Arrays are gathered whole into this process first. On a process mesh all ranks must call it; the first one writes.

    Args:
        path: the file; its folder is made.
        state: a pytree of tensors and Arrays. Keys are tree paths such as ``opt/mu/layers/wq``.

    Raises:
        TreeError: a leaf that is no tensor.
        ShardingError: an Array that was donated, or that has no values.
    """
    whole = tree.map(lambda x: x.full() if isinstance(x, Array) else x, state)
    if processes.rank() == 0:
        save_params(path, whole)


def load_state(path: str | Path, like: Any, *, start_ema: str | None = None) -> Any:
    """Read a state into the structure and layouts of another, such as what ``init`` made for this mesh.

    Args:
        path: a file that :func:`save_state` wrote.
        like: a pytree of tensors and Arrays that hold values, which are not read.
        start_ema: where the parameters are in the state, such as "params". An average of
            :func:`functitan.optim.with_ema` that the file lacks, because it was written without one, then begins as
            these, and a warning says so. By default it is missing like any other leaf.

    Returns:
        The structure of ``like``: Arrays in the layouts of its Arrays, tensors on the devices of its tensors.

    Raises:
        ConfigError: no such file, not a safetensors file, or leaves, shapes or dtypes that differ: nothing is cast, and
            no leaf keeps what it had. All in one message.

    >>> import tempfile
    >>> from functitan import optim
    >>> state = optim.adamw(0.1).init({"w": torch.ones(2)})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_state(f"{folder}/state.safetensors", state)
    ...     load_state(f"{folder}/state.safetensors", state).mu
    {'w': tensor([0., 0.])}
    """
    found = read_tensors(Path(path))
    rows, treedef = tree.flatten_with_paths(like)
    absent = absent_averages(like, found)
    started = {} if start_ema is None else started_averages([name for name, _ in rows], absent, start_ema)
    values, wanted, problems = [], set(), []
    for name, leaf in rows:
        source, begins = started.get(name, (name, False))
        wanted.add(source)
        x = found.get(source)
        if begins and source == name:
            values.append(leaf)
            continue
        shown = name if source == name else f"{name}, from {source},"
        if x is None:
            problems.append(f"{shown} is missing; the file has {len(found)} leaves.{suggest(source, found)}")
        elif x.shape != leaf.shape or (x.dtype != leaf.dtype and not begins):
            problems.append(f"{shown} is {_shown(x)} in the file, and {_shown(leaf)} was asked for.")
        else:
            # A copy where an average begins: donated leaves must not share storage.
            values.append(_as(x.to(leaf.dtype, copy=True) if begins else x, leaf))
    problems += [f"{name} is in the file, and was not asked for." for name in found if name not in wanted]
    if problems and absent and start_ema is None:
        problems.append(
            f"the file was written without the average of with_ema at {listed(p or 'the root' for p in absent)}. Write "
            'start_ema="params", the place of the parameters in the state, to begin it as these.'
        )
    raise_batch(ConfigError, problems, f"{path}")
    if started:
        warnings.warn(started_text(path, started), stacklevel=2)
    return tree.unflatten(treedef, values)


def _shown(x: Any) -> str:
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"


def _as(x: torch.Tensor, like: Any) -> Any:
    if not isinstance(like, Array):
        return x.to(like.device)
    return put(x.to(like.shards[0].device), like.layout, like.mesh)
