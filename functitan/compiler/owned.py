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
from functitan.sharding.ownership import Bucket, Plan, number

#: A rank's group, and its number there.
Place = tuple[int, int]


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
        return (*self.what.apart, *self.what.axes)

    def place(self, coordinates: Sequence[Any]) -> Place:
        """The rank's group, and its number there."""
        at = dict(zip(self.axes, map(int, coordinates), strict=True))
        sizes = dict(self.plan.sizes)
        return number(at, self.what.apart, sizes), number(at, self.what.axes, sizes)

    def mine(self, place: Place) -> list[list[int]]:
        """The matrices of every run that a rank owns, counted within the run."""
        group, own = place
        owners = iter(self.what.owners[group])
        return [[k for k in range(run.stop - run.start) if next(owners) == own] for run in self.what.runs]

    def piece(self, run: int) -> tuple[int, int]:
        """Rows and columns of a rank's part of a matrix."""
        leaf, sizes = self.plan.leaves[self.what.runs[run].leaf], dict(self.plan.sizes)
        ways = [math.prod(sizes[a] for a in axes) for axes in (leaf.rows, leaf.cols)]
        return leaf.shape[0] // ways[0], leaf.shape[1] // ways[1]

    @property
    def most(self) -> int:
        """The most elements that a rank's part of what another owns has."""
        return max(max(row) for row in self.what.elements)

    @property
    def pieces(self) -> int:
        """In how many parts a matrix is."""
        return math.prod(dict(self.plan.sizes)[a] for a in self.what.split)

    def peers(self, own: int) -> slice:
        """The ranks of the group that hold the other parts of a rank's copy."""
        first = own // self.pieces * self.pieces
        return slice(first, first + self.pieces)

    def order(self, group: int, owners: range) -> list[tuple[int, int]]:
        """Run and matrix, by owner: the order on the wire."""
        by_owner: dict[int, list[tuple[int, int]]] = {}
        chosen = iter(self.what.owners[group])
        for i, run in enumerate(self.what.runs):
            for k in range(run.stop - run.start):
                by_owner.setdefault(next(chosen), []).append((i, k))
        return [row for g in owners for row in by_owner.get(g, [])]


class Pack(Part):
    """(runs [N, m, c], coordinates) -> what the rank sends, flat, by owner."""

    __name__ = "pack"

    def __call__(self, xs: Sequence[torch.Tensor], *coordinates: Any) -> torch.Tensor:
        group, own = self.place(coordinates)
        to = self.peers(own)
        parts = [xs[i][k].reshape(-1) for i, k in self.order(group, range(to.start, to.stop))]
        return torch.cat(parts) if parts else xs[0].new_empty(0)

    def size(self) -> int:
        """The most elements that a rank sends."""
        s = self.pieces
        return max(sum(row[d : d + s]) for row in self.what.elements for d in range(0, len(row), s))


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
        return self.what.split if self.way == "in" else self.what.axes

    def splits(self, place: Place) -> tuple[list[int], list[int]]:
        """How many elements a rank gets from, and sends to, each rank of the group."""
        group, own = place
        elements = list(self.what.elements[group])
        if self.way == "in":
            return [elements[own]] * self.pieces, elements[self.peers(own)]
        return elements, [elements[own]] * len(elements)

    def size(self) -> int:
        """The most elements that a rank gets."""
        return self.most * self.pieces if self.way == "in" else self.what.sent

    def nbytes(self, itemsize: int) -> int:
        """Bytes that a rank sends to others, the mean over ranks."""
        ranks = self.what.ranks
        copies = self.pieces if self.way == "in" else ranks
        return math.ceil(self.what.sent * (copies - 1) * itemsize / ranks)


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
        for i, mine in enumerate(self.mine(self.place(coordinates))):
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
        copies = self.what.ranks // self.pieces
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
        return self.most * self.what.ranks

    @property
    def flops(self) -> int:
        """Operations of the rank that has most to do in the whole plan."""
        group, own = self.plan.places(self.what)[self.plan.heaviest]
        return self.what.flops[group][own]


class Unpack(Part):
    """(what the rank got back, flat, by owner, coordinates) -> runs [N, m, c]."""

    __name__ = "unpack"

    def __call__(self, received: torch.Tensor, *coordinates: Any) -> list[torch.Tensor]:
        group, _ = self.place(coordinates)
        order = self.order(group, range(self.what.ranks))
        shapes = [self.piece(i) for i, _ in order]
        parts = dict(zip(order, received.split([m * c for m, c in shapes]), strict=True))
        return [
            torch.stack([parts[i, k].view(self.piece(i)) for k in range(run.stop - run.start)])
            for i, run in enumerate(self.what.runs)
        ]
