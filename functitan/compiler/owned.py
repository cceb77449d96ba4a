"""The parts of an owned orthogonalisation in a lowered graph.

Which matrices a rank works on depends on the rank, and so do the sizes of what it receives. The graph is the same on all
ranks all the same: it holds these parts as targets of nodes, which take the rank's coordinates. The fake value of such a
node has the size of the largest rank. Exchanges are what backends bind to collectives; the rest runs as it is.

Legend: S ranks that split a matrix, T elements of a rank's parts, N matrices, M rows, C columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from functitan.ops.orthogonalize import Parts, Spread, orthogonalize_op
from functitan.sharding.ownership import Bucket, Plan


@dataclass(frozen=True, eq=False)
class Part:
    """A bucket of a plan, and one thing that is done with it.

    Attributes:
        plan: the whole plan.
        bucket: the bucket's number.
    """

    plan: Plan
    bucket: int

    @property
    def what(self) -> Bucket:
        return self.plan.buckets[self.bucket]

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes whose coordinates the part takes."""
        return (*self.what.copies, *self.what.split)

    def number(self, coordinates: Sequence[Any]) -> int:
        """The rank in its group."""
        sizes, found = dict(self.plan.sizes), 0
        for axis, index in zip(self.axes, coordinates, strict=True):
            found = found * sizes[axis] + int(index)
        return found

    def mine(self, number: int) -> list[list[int]]:
        """The matrices of every run that a rank owns, counted within the run."""
        owners = iter(self.what.owners)
        return [[k for k in range(run.stop - run.start) if next(owners) == number] for run in self.what.runs]

    def piece(self, run: int) -> tuple[int, int]:
        """Rows and columns of a rank's part of a matrix."""
        leaf, sizes = self.plan.leaves[self.what.runs[run].leaf], dict(self.plan.sizes)
        ways = [math.prod(sizes[a] for a in axes) for axes in (leaf.rows, leaf.cols)]
        return leaf.shape[0] // ways[0], leaf.shape[1] // ways[1]

    @property
    def pieces(self) -> int:
        """In how many parts a matrix is."""
        return math.prod(dict(self.plan.sizes)[a] for a in self.what.split)

    def peers(self, number: int) -> slice:
        """The ranks that hold the other parts of this rank's copy."""
        first = number // self.pieces * self.pieces
        return slice(first, first + self.pieces)

    def order(self, owners: range) -> list[tuple[int, int]]:
        """Run and matrix, by owner: the order on the wire."""
        by_owner: dict[int, list[tuple[int, int]]] = {}
        chosen = iter(self.what.owners)
        for i, run in enumerate(self.what.runs):
            for k in range(run.stop - run.start):
                by_owner.setdefault(next(chosen), []).append((i, k))
        return [row for g in owners for row in by_owner.get(g, [])]


class Pack(Part):
    """(runs [N, m, c], coordinates) -> what the rank sends, flat, by owner."""

    __name__ = "pack"

    def __call__(self, xs: Sequence[torch.Tensor], *coordinates: Any) -> torch.Tensor:
        to = self.peers(self.number(coordinates))
        parts = [xs[i][k].reshape(-1) for i, k in self.order(range(to.start, to.stop))]
        return torch.cat(parts) if parts else xs[0].new_empty(0)

    def size(self) -> int:
        """The most elements that a rank sends."""
        elements, s = self.what.elements, self.pieces
        return max(sum(elements[d : d + s]) for d in range(0, len(elements), s))


@dataclass(frozen=True, eq=False)
class Exchange(Part):
    """(send, coordinates) -> received, by an all-to-all of uneven parts: a target for which each backend puts its own.

    Attributes:
        way: "in": parts to owners; "out": results back, to every copy.
    """

    way: Literal["in", "out"] = "in"
    __name__ = "exchange"

    def __call__(self, send: torch.Tensor, *coordinates: Any) -> torch.Tensor:
        raise RuntimeError("an exchange has no backend")

    @property
    def group(self) -> tuple[str, ...]:
        """The axes of the ranks that exchange."""
        return self.what.split if self.way == "in" else self.axes

    def splits(self, number: int) -> tuple[list[int], list[int]]:
        """How many elements a rank gets from, and sends to, each rank of the group."""
        own, elements = self.what.elements[number], list(self.what.elements)
        if self.way == "in":
            return [own] * self.pieces, elements[self.peers(number)]
        return elements, [own] * len(elements)

    def size(self) -> int:
        """The most elements that a rank gets."""
        return max(self.what.elements) * self.pieces if self.way == "in" else sum(self.what.elements)

    def nbytes(self, itemsize: int) -> int:
        """Bytes that a rank sends to others, the mean over ranks."""
        ranks = len(self.what.elements)
        copies = self.pieces if self.way == "in" else ranks
        return math.ceil(sum(self.what.elements) * (copies - 1) * itemsize / ranks)


@dataclass(frozen=True, eq=False)
class Orthogonalize(Part):
    """(parts [S * T], coefficients, eps, dtype, coordinates) -> results in parts, to be sent: one call per leaf.

    Attributes:
        blocks: of the plan's leaves.
    """

    blocks: tuple[Parts, ...] = ()
    __name__ = "orthogonalize_owned"

    def __call__(
        self,
        received: torch.Tensor,
        coefficients: Sequence[float],
        eps: float,
        dtype: torch.dtype,
        *coordinates: Any,
    ) -> torch.Tensor:
        found, first = [], 0
        received_ST = received.view(self.pieces, -1)
        for i, mine in enumerate(self.mine(self.number(coordinates))):
            if not mine:
                continue
            m, c = self.piece(i)
            last = first + len(mine) * m * c
            whole_NMC = self._joined(received_ST[:, first:last], i, len(mine))
            leaf = self.what.runs[i].leaf
            here = Spread((self.plan.leaves[leaf].path,), (self.blocks[leaf],)).text()
            (out_NMC,) = orthogonalize_op([whole_NMC], coefficients, eps, dtype, here)
            found.append(self._parted(out_NMC, i))
            first = last
        out_ST = torch.cat(found, dim=1) if found else received_ST
        copies = len(self.what.elements) // self.pieces
        return out_ST.reshape(-1).repeat(copies)

    def _dims(self, run: int) -> tuple[list[int], list[int], list[int]]:
        """The sizes of the splitting axes in the group's order, and the places of those of rows and of columns."""
        leaf, sizes = self.plan.leaves[self.what.runs[run].leaf], dict(self.plan.sizes)
        place = {a: i for i, a in enumerate(self.what.split)}
        return [sizes[a] for a in self.what.split], [place[a] for a in leaf.rows], [place[a] for a in leaf.cols]

    def _joined(self, parts_ST: torch.Tensor, run: int, count: int) -> torch.Tensor:
        """Whole matrices [N, M, C] from the parts of all ranks."""
        split, rows, cols = self._dims(run)
        m, c = self.piece(run)
        n = len(split)
        wide = parts_ST.reshape(*split, count, m, c).permute(n, *rows, n + 1, *cols, n + 2)
        return wide.reshape(count, *self.plan.leaves[self.what.runs[run].leaf].shape)

    def _parted(self, whole_NMC: torch.Tensor, run: int) -> torch.Tensor:
        """The inverse: [S, N * m * c]."""
        split, rows, cols = self._dims(run)
        m, c = self.piece(run)
        wide = whole_NMC.reshape(-1, *(split[a] for a in rows), m, *(split[a] for a in cols), c)
        where = {a: i for i, a in enumerate([*rows, -1, *cols])}
        order = [1 + where[a] for a in range(len(split))]
        return wide.permute(*order, 0, 1 + where[-1], wide.ndim - 1).reshape(self.pieces, -1)

    def size(self) -> int:
        """The most elements that a rank sends back."""
        return max(self.what.elements) * len(self.what.elements)

    @property
    def flops(self) -> int:
        """Operations of the rank that has most to do in the whole plan."""
        at: dict[str, int] = {}
        rest = self.plan.heaviest
        for axis, n in reversed(self.plan.sizes):
            rest, at[axis] = divmod(rest, n)
        return self.what.flops[self.plan.rank(at, self.axes)]


class Unpack(Part):
    """What the rank got back, flat, by owner -> runs [N, m, c]."""

    __name__ = "unpack"

    def __call__(self, received: torch.Tensor) -> list[torch.Tensor]:
        order = self.order(range(len(self.what.elements)))
        shapes = [self.piece(i) for i, _ in order]
        parts = dict(zip(order, received.split([m * c for m, c in shapes]), strict=True))
        return [
            torch.stack([parts[i, k].view(self.piece(i)) for k in range(run.stop - run.start)])
            for i, run in enumerate(self.what.runs)
        ]
