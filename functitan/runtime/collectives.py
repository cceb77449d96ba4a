"""Collectives over the ranks of a simulated mesh: all operands are at hand, in rank order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from functitan.compiler.emit import group
from functitan.compiler.owned import Exchange
from functitan.errors import FunctitanError
from functitan.sharding.mesh import Mesh

c10d = torch.ops._c10d_functional


class CollectiveMismatch(FunctitanError):
    """Ranks of one group do not agree on a collective."""


class Groups:
    """The rank groups of a mesh by name: ``"tensor"``, or ``"data+fsdp"`` over several axes, major to minor."""

    def __init__(self, mesh: Mesh) -> None:
        self._coordinates = list(mesh.coordinates())
        self._sizes = mesh.shape
        self._known: dict[str, list[list[int]]] = {}

    def of(self, name: str) -> list[list[int]]:
        """The ranks of every group of that name, in group order."""
        if name not in self._known:
            axes = name.split("+")
            missing = [a for a in axes if a not in self._sizes]
            if missing:
                raise CollectiveMismatch(
                    f'a collective names the group "{name}"; the mesh has no axis "{missing[0]}" (it has '
                    f"{', '.join(self._sizes)})."
                )
            rows: dict[tuple[int, ...], list[tuple[tuple[int, ...], int]]] = {}
            for rank, c in enumerate(self._coordinates):
                rest = tuple(v for a, v in c.items() if a not in axes)
                rows.setdefault(rest, []).append((tuple(c[a] for a in axes), rank))
            self._known[name] = [[rank for _, rank in sorted(row)] for row in rows.values()]
        return self._known[name]


def check_match(target: Any, ranks: Sequence[int], operands: Sequence[torch.Tensor]) -> None:
    """Refuse operands of one collective that differ in shape or dtype.

    Raises:
        CollectiveMismatch: naming the first rank that differs and how.
    """
    first = operands[0]
    for rank, x in zip(ranks, operands, strict=True):
        if x.shape != first.shape or x.dtype != first.dtype:
            raise CollectiveMismatch(
                f"{target}: rank {ranks[0]} gives {first.dtype} {tuple(first.shape)} and rank {rank} gives {x.dtype} "
                f"{tuple(x.shape)}; all ranks of a group give one shape and dtype."
            )


def _reduce(operands: Sequence[torch.Tensor], how: str) -> torch.Tensor:
    out = operands[0].clone()
    for x in operands[1:]:
        if how in ("sum", "avg"):
            out = out + x
        elif how == "max":
            out = torch.maximum(out, x)
        elif how == "min":
            out = torch.minimum(out, x)
        elif how == "product":
            out = out * x
        else:
            raise CollectiveMismatch(f'reduction "{how}" is not one of sum, avg, max, min, product.')
    return out / len(operands) if how == "avg" else out


def run(target: Any, operands: list[torch.Tensor], args: tuple[Any, ...], groups: Groups) -> list[torch.Tensor]:
    """One collective on all ranks.

    Args:
        target: the functional collective.
        operands: the operand of every rank.
        args: its other arguments, equal on all ranks; the last is the group's name.
        groups: the mesh's groups.
    """
    out: list[torch.Tensor] = list(operands)
    for ranks in groups.of(str(args[-1])):
        mine = [operands[r] for r in ranks]
        check_match(target, ranks, mine)
        for r, x in zip(ranks, join(target, mine, args), strict=True):
            out[r] = x
    return out


def join(target: Any, operands: list[torch.Tensor], args: tuple[Any, ...]) -> list[torch.Tensor]:
    """One collective on the operands of one group, in group order; every rank gets a tensor of its own."""
    n = len(operands)
    if target is c10d.all_reduce.default:
        total = _reduce(operands, args[0])
        return [total, *(total.clone() for _ in range(n - 1))]
    if target is c10d.all_gather_into_tensor.default:
        full = torch.cat([x.contiguous() for x in operands])
        return [full, *(full.clone() for _ in range(n - 1))]
    if target is c10d.reduce_scatter_tensor.default:
        return [t.clone() for t in _reduce(operands, args[0]).chunk(n)]
    if target is c10d.all_to_all_single.default:
        # Every rank's receive sizes equal the senders' send sizes.
        pieces = [x.split(list(args[1])) for x in operands]
        return [torch.cat([pieces[src][me] for src in range(n)]) for me in range(n)]
    raise CollectiveMismatch(f"{target} is not a collective that the simulator knows.")


def exchange(
    target: Exchange, operands: list[torch.Tensor], coordinates: Sequence[Sequence[Any]], groups: Groups
) -> list[torch.Tensor]:
    """An all-to-all of uneven parts on all ranks.

    Args:
        target: what is exchanged.
        operands: what every rank sends.
        coordinates: per axis that the target takes, the index of every rank.
        groups: the mesh's groups.

    Raises:
        CollectiveMismatch: a rank sends another number of elements than its peers expect.
    """
    out: list[torch.Tensor] = list(operands)
    for ranks in groups.of(group(target.group)):
        splits = [target.splits(target.place([c[r] for c in coordinates])) for r in ranks]
        for r, (_, sends) in zip(ranks, splits, strict=True):
            if sum(sends) != operands[r].numel():
                raise CollectiveMismatch(f"rank {r} has {operands[r].numel()} elements to send, its plan says {sends}.")
        pieces = [operands[r].split(sends) for r, (_, sends) in zip(ranks, splits, strict=True)]
        for me, (r, (gets, _)) in enumerate(zip(ranks, splits, strict=True)):
            parts = [row[me] for row in pieces]
            if [p.numel() for p in parts] != gets:
                raise CollectiveMismatch(
                    f"rank {r} is sent {[p.numel() for p in parts]} elements, its plan says {gets}."
                )
            out[r] = torch.cat(parts)
    return out


COLLECTIVES = frozenset(
    {
        c10d.all_reduce.default,
        c10d.all_gather_into_tensor.default,
        c10d.reduce_scatter_tensor.default,
        c10d.all_to_all_single.default,
    }
)
