"""Save parameters as one safetensors file, keyed by their paths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from functitan import tree
from functitan.checkpoint.files import write_whole
from functitan.errors import TreeError


def save_params(path: str | Path, params: Any, metadata: dict[str, str] | None = None) -> None:
    """Write a tree of whole tensors; the file appears when it is complete.

    Args:
        path: the file, usually ``*.safetensors``; its folder is made.
        params: a pytree of plain tensors. Keys are tree paths such as ``layers/wq``.
        metadata: text to keep in the header.

    Raises:
        TreeError: a leaf is not a plain tensor.
    """
    rows, _ = tree.flatten_with_paths(params)
    for name, leaf in rows:
        if not isinstance(leaf, torch.Tensor):
            raise TreeError(
                f"save_params writes whole tensors; {name or 'the tree'} is a {type(leaf).__name__}. "
                "Gather sharded arrays first, with .full()."
            )
    # One storage may back several leaves, and the format stores each name once: every leaf gets memory of its
    # own.
    tensors = {name: leaf.detach().cpu().clone(memory_format=torch.contiguous_format) for name, leaf in rows}
    write_whole(Path(path), lambda temporary: save_file(tensors, temporary, metadata))
