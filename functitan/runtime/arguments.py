"""The arguments and results of a compiled call: which argument is which, donation, results that own their memory."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from functitan import tree
from functitan.compiler.emit import Constant
from functitan.compiler.program import Program
from functitan.errors import ArgumentError, ShardingError, listed, raise_batch
from functitan.sharding.array import Array

Columns = list[list[torch.Tensor]]


def signature_of(f: Callable[..., Any]) -> inspect.Signature:
    """The parameters of a function; of a builtin that does not tell, any positional ones."""
    try:
        return inspect.signature(f)
    except (TypeError, ValueError):
        return inspect.signature(lambda *args: None)


def positional(
    signature: inspect.Signature, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, ...]:
    """The arguments of a call by position.

    Raises:
        ArgumentError: arguments that the function does not take, or keyword-only ones.
    """
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as e:
        given = f"{len(args)} positional arguments" + (f" and {listed(kwargs)}" if kwargs else "")
        raise ArgumentError(
            f"{name}({', '.join(signature.parameters)}) was called with {given}: {e}. Give each parameter one argument."
        ) from None
    if bound.kwargs:
        raise ArgumentError(
            f"{name} takes {listed(bound.kwargs)} by keyword only; the arguments of a compiled function have "
            "positions. Make "
            "them positional, or close over them."
        )
    return bound.args


def paths(names: Sequence[str], args: Sequence[Any]) -> list[str]:
    """The path of every leaf of the arguments."""
    return [
        "/".join(filter(None, (name, path))) for name, arg in zip(names, args, strict=True) for path in tree.paths(arg)
    ]


def take(name: str, paths: Sequence[str], leaves: Sequence[Any], given: Sequence[bool], ranks: int) -> Columns:
    """Every leaf's parts by rank; Arrays that are given to the call give up theirs.

    Args:
        name: the function's.
        paths, leaves: of its arguments.
        given: which leaves are Arrays of donated arguments. Plain tensors are never donated.
        ranks: how many ranks' parts there are.

    Raises:
        ShardingError: Arrays that were donated before, or donated ones that share memory with another leaf; all by
            path, before anything is given up.
    """
    problems = []
    owners: dict[int, tuple[str, bool]] = {}
    for path, leaf, mine in zip(paths, leaves, given, strict=True):
        if isinstance(leaf, Array) and leaf.donated_to:
            problems.append(
                f"{path} of {name} is an Array that was donated to {leaf.donated_to} and holds no value any more. Pass "
                "what "
                "that call returned, or leave the argument out of donate_argnums."
            )
            continue
        for memory in {_memory(t) for t in (leaf.shards if isinstance(leaf, Array) else [leaf])} - {0}:
            other, other_given = owners.setdefault(memory, (path, mine))
            if other != path and (mine or other_given):
                problems.append(
                    f"{other} and {path} of {name} share memory, and {other if other_given else path} is donated: its "
                    "memory "
                    f"may be written over while the other is read. Give {path} its own copy, x.reshard(x.spec), or "
                    "leave the "
                    "argument out of donate_argnums."
                )
                break
    raise_batch(ShardingError, problems, f"the arguments of {name}")
    columns: Columns = []
    for leaf, mine in zip(leaves, given, strict=True):
        if not isinstance(leaf, Array):
            columns.append([leaf.detach()] * max(ranks, 1))
        else:
            columns.append(leaf.donate(name) if mine else leaf.shards)
    return columns


def constants(program: Program) -> set[int]:
    """The memory of the tensors that a program holds."""
    return {
        _memory(n.target.tensor) for _, g in program.graphs() for n in g.nodes if isinstance(n.target, Constant)
    } - {0}


def drained(columns: Columns) -> Iterator[list[torch.Tensor]]:
    """The columns one by one, each out of the list when it is taken, so that the list keeps nothing alive."""
    columns.reverse()
    while columns:
        yield columns.pop()


def memory(columns: Columns) -> set[int]:
    """The memory of values."""
    return {_memory(t) for column in columns for t in column} - {0}


def owned(results: Sequence[Sequence[torch.Tensor]], held: Collection[int]) -> Columns:
    """Results whose memory is theirs alone: what is, or views, memory in ``held`` or of another result is copied.

    So a result may be donated to the next call, whatever became of the inputs of this one.
    """
    seen = set(held)
    out: Columns = []
    for parts in results:
        own = []
        for t in parts:
            storage = t.untyped_storage()
            place = storage.data_ptr()  # 0 if empty
            if place in seen or not t.is_contiguous() or storage.nbytes() != t.nbytes:
                t = t.clone(memory_format=torch.contiguous_format)
                place = _memory(t)
            if place:
                seen.add(place)
            own.append(t)
        out.append(own)
    return out


def _memory(t: torch.Tensor) -> int:
    """Where a tensor's storage begins; 0 for an empty one."""
    return t.untyped_storage().data_ptr()
