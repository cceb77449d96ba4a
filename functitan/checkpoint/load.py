"""Load parameters from a safetensors file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from functitan import tree
from functitan.annotations import Param
from functitan.errors import ConfigError, raise_batch, suggest
from functitan.nn.padding import pad


def load_params(path: str | Path, like: Any) -> Any:
    """Read the tensors that a tree of declarations or tensors names.

    Args:
        path: a file that :func:`functitan.checkpoint.save_params` wrote.
        like: a pytree whose leaves have a ``shape`` and a ``dtype``: ``Param`` declarations, whose padding is
            added, or tensors.

    Returns:
        Plain CPU tensors in the structure of ``like``, in its dtypes.

    Raises:
        ConfigError: no such file, not a safetensors file, or names or shapes that differ; all in one message.
    """
    tensors = read_tensors(Path(path))
    rows, treedef = tree.flatten_with_paths(like)
    problems = []
    for name, leaf in rows:
        if name not in tensors:
            problems.append(f"{name} is missing; the file has {len(tensors)} tensors.{suggest(name, tensors)}")
        elif tuple(tensors[name].shape) != _real_shape(leaf):
            problems.append(
                f"{name} has shape {tuple(tensors[name].shape)} in the file, and {_real_shape(leaf)} was asked for."
            )
    wanted = {name for name, _ in rows}
    problems += [f"{name} is in the file, and was not asked for." for name in tensors if name not in wanted]
    raise_batch(ConfigError, problems, f"{path}")
    found = [(leaf, tensors[name].to(leaf.dtype)) for name, leaf in rows]
    return tree.unflatten(treedef, [pad(leaf, x) if isinstance(leaf, Param) else x for leaf, x in found])


def _real_shape(leaf: Any) -> tuple[int, ...]:
    return leaf.real_shape if isinstance(leaf, Param) else tuple(leaf.shape)


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a safetensors file, by name.

    Raises:
        ConfigError: no such file, or not a safetensors file.
    """
    if not path.is_file():
        raise ConfigError(f"there is no file {path}; a run writes params.safetensors into its folder when it ends.")
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} cannot be read as a safetensors file: {error}") from error
