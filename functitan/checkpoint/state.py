"""A whole state, parameters and optimizer's, as one safetensors file: any tree of tensors and Arrays, on any mesh.

Every leaf is kept as it is, dtype and bits. What is stored depends on no mesh, so a file written on four ranks loads on
three.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from functitan import tree
from functitan.checkpoint.load import read_tensors
from functitan.checkpoint.save import save_params
from functitan.errors import ConfigError, raise_batch, suggest
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


def load_state(path: str | Path, like: Any) -> Any:
    """Read a state into the structure and layouts of another, such as what ``init`` made for this mesh.

    Args:
        path: a file that :func:`save_state` wrote.
        like: a pytree of tensors and Arrays that hold values, which are not read.

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
    problems = []
    for name, leaf in rows:
        x = found.get(name)
        if x is None:
            problems.append(f"{name} is missing; the file has {len(found)} leaves.{suggest(name, found)}")
        elif x.shape != leaf.shape or x.dtype != leaf.dtype:
            problems.append(f"{name} is {_shown(x)} in the file, and {_shown(leaf)} was asked for.")
    wanted = {name for name, _ in rows}
    problems += [f"{name} is in the file, and was not asked for." for name in found if name not in wanted]
    raise_batch(ConfigError, problems, f"{path}")
    return tree.unflatten(treedef, [_as(found[name], leaf) for name, leaf in rows])


def _shown(x: Any) -> str:
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"


def _as(x: torch.Tensor, like: Any) -> Any:
    if not isinstance(like, Array):
        return x.to(like.device)
    return put(x.to(like.shards[0].device), like.layout, like.mesh)
