"""``vmap``: a function of one example as a function of a batch, with JAX's argument names and our pytrees."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from functitan import tree
from functitan.errors import ArgumentError, TreeError


def vmap(f: Callable[..., Any], in_axes: Any = 0, out_axes: Any = 0) -> Callable[..., Any]:
    """Map a function over a dim of its arguments; the loop is inside the ops (``torch.func.vmap``).

    Random ops take keys, so give each example its own: map over ``random.split(key, n)``. Annotations for the
    compiler (``constrain``, ``region``, ``scan``) have no batched form: call vmap inside them, on plain code.

    Args:
        f: a function of pytrees of tensors, of one example.
        in_axes: for all positional arguments, or a tuple with one entry per argument: the dim to map over,
            None for "the same for every example", or a pytree prefix of these. Keyword arguments are mapped
            over dim 0. Leaves that are not tensors are passed as they are.
        out_axes: where the new dim goes in the outputs: an int, or a pytree prefix of ints.

    Raises:
        ArgumentError: sizes of mapped dims differ (by path), a dim that a leaf does not have, nothing to map.
        TreeError: ``in_axes`` or ``out_axes`` does not fit.

    >>> vmap(lambda x, w: (x * w).sum(), in_axes=(0, None))(torch.ones(3, 2), torch.tensor([1.0, 2.0]))
    tensor([3., 3., 3.])
    """
    name = getattr(f, "__name__", type(f).__name__)

    @functools.wraps(f)
    def call(*args: Any, **kwargs: Any) -> Any:
        axes = tuple(in_axes) if isinstance(in_axes, (tuple, list)) else (in_axes,) * len(args)
        if len(axes) != len(args):
            raise TreeError(
                f"vmap of {name}: in_axes {in_axes!r} has {len(axes)} entries for {len(args)} positional "
                "arguments; give one per argument, None for one that is not mapped."
            )
        leaves, treedef = tree.flatten((args, kwargs))
        flat_axes = [*_broadcast(axes, args, "in_axes", name), *[0] * (len(leaves) - len(tree.leaves(args)))]
        is_tensor = [isinstance(leaf, torch.Tensor) for leaf in leaves]
        dims = [a if t else None for a, t in zip(flat_axes, is_tensor, strict=True)]
        _check_sizes(tree.paths((args, kwargs)), leaves, dims, name)
        found: dict[str, Any] = {}

        def flat(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            rest = iter(tensors)
            given = [next(rest) if t else leaf for t, leaf in zip(is_tensor, leaves, strict=True)]
            got_args, got_kwargs = tree.unflatten(treedef, given)
            outs, found["tree"] = tree.flatten(f(*got_args, **got_kwargs))
            # A constant output is the same for every example.
            return tuple(o if isinstance(o, torch.Tensor) else torch.as_tensor(o) for o in outs)

        tensors = [leaf for leaf, t in zip(leaves, is_tensor, strict=True) if t]
        mapped = tuple(d for d, t in zip(dims, is_tensor, strict=True) if t)
        outs = torch.func.vmap(flat, in_dims=mapped, randomness="error")(*tensors)
        out = tree.unflatten(found["tree"], outs)
        places = _broadcast(out_axes, out, "out_axes", name)
        placed = [o.movedim(0, p) for o, p in zip(outs, places, strict=True) if p is not None]
        if len(placed) < len(outs):
            raise TreeError(f"vmap of {name}: out_axes {out_axes!r} holds None; give the dim of the examples.")
        return tree.unflatten(found["tree"], placed)

    return call


def _broadcast(prefix: Any, full: Any, what: str, name: str) -> list[int | None]:
    """One entry of a prefix tree per leaf of the full tree."""
    if prefix is None or isinstance(prefix, int):
        return [prefix] * len(tree.leaves(full))
    ours, theirs = tree.children(prefix), tree.children(full)
    if ours is None or theirs is None or ours[1] != theirs[1]:
        raise TreeError(
            f"vmap of {name}: {what} has {prefix!r} where the value is a {type(full).__name__} with "
            f"{len(tree.leaves(full))} leaves; write an int or None for all of it, or the same container."
        )
    return [a for p, v in zip(ours[0], theirs[0], strict=True) for a in _broadcast(p, v, what, name)]


def _check_sizes(paths: list[str], leaves: list[Any], dims: list[int | None], name: str) -> None:
    sizes: dict[str, int] = {}
    for path, leaf, dim in zip(paths, leaves, dims, strict=True):
        if dim is None:
            continue
        where = "argument " + path.split("/", 1)[1]
        if not -leaf.ndim <= dim < leaf.ndim:
            raise ArgumentError(
                f"vmap of {name}: {where} has shape {tuple(leaf.shape)} and no dim {dim} to map over. Write "
                "None in in_axes for an argument that is the same for every example."
            )
        sizes[where] = leaf.shape[dim]
    if len(set(sizes.values())) != 1:
        shown = ", ".join(f"{where}: {n}" for where, n in sizes.items()) or "no mapped tensors"
        raise ArgumentError(
            f"vmap of {name}: mapped dims must be of one size; found {shown}. Write None in in_axes for "
            "arguments that are the same for every example."
        )
