"""Whether a matrix is orthogonalised where it lies, split along its long side: the Gram form of Newton-Schulz.

Of k steps on a matrix of short side s and long side l, over T ranks, each rank does ``2 k s^2 (2 l / T + s)`` operations
and sends ``2 (T - 1) / T k s^2`` elements for the k Gram matrices. A matrix with one owner costs that rank
``2 k s^2 (2 l + s)`` operations, ``1 / T`` of it on the mean, and a rank sends ``2 (T - 1) / T^2 s l`` elements, both ways
together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from functitan.columns import human_bytes, human_count
from functitan.compiler import markers
from functitan.ops.orthogonalize import Spread, split_newton_schulz
from functitan.sharding.layout import Layout
from functitan.sharding.op_rules.base import Call

#: What a byte that is sent counts as, in operations, when both are weighed: an H100's bfloat16 rate over its NVLink's.
OPERATIONS_PER_BYTE = 2_000


@dataclass(frozen=True)
class Cost:
    """What a rank has to do for a leaf in a step, the mean over ranks; a rank with one whole matrix may have more."""

    flops: float
    nbytes: float

    @property
    def weight(self) -> float:
        """Both as operations."""
        return self.flops + OPERATIONS_PER_BYTE * self.nbytes


def gram_cost(shape: tuple[int, int], count: float, ranks: int, steps: int, itemsize: int) -> Cost:
    """Of ``count`` matrices that ``ranks`` ranks hold split along their long side.

    >>> gram_cost((64, 1024), 1, 4, 5, 2)
    Cost(flops=23592960, nbytes=61440.0)
    """
    short, long = sorted(shape)
    flops = 2 * steps * short**2 * (2 * long // ranks + short)
    return Cost(count * flops, count * 2 * (ranks - 1) / ranks * steps * short**2 * itemsize)


def owned_cost(shape: tuple[int, int], count: float, ranks: int, steps: int, itemsize: int) -> Cost:
    """Of ``count`` matrices that one of ``ranks`` ranks each owns: the most loaded rank's operations, the mean bytes.

    >>> owned_cost((64, 1024), 1, 4, 5, 2)
    Cost(flops=86507520, nbytes=49152.0)
    """
    short, long = sorted(shape)
    most = math.ceil(count / ranks)
    flops = most * 2 * steps * short**2 * (2 * long + short)
    return Cost(flops, count * 2 * (ranks - 1) / ranks**2 * short * long * itemsize)


def gram_layout(layout: Layout, axes: Sequence[str], gram: Sequence[str], sizes: dict[str, int]) -> tuple[Layout, str]:
    """The layout in which a leaf is worked on in the Gram form, or why there is none.

    The axes of ``gram`` stay on the long side; the others of ``axes`` split the leading dim instead of a matrix.
    """
    shape = layout.shape(sizes)
    rows, cols = shape[-2:]
    long, short = (-2, -1) if rows > cols else (-1, -2)
    on = {side: [d for d in layout.dims[side] if d in gram] for side in (long, short)}
    if on[short]:
        return (
            layout,
            f"{'+'.join(map(str, on[short]))} splits the short side, whose Gram matrix is not a sum over ranks",
        )
    if not on[long]:
        return layout, f"no axis of {'+'.join(gram)} splits its long side"
    rest = [a for a in axes if a in layout.axes and a not in on[long]]
    moved = [a for a in rest if any(a in layout.dims[side] for side in (long, short))]
    if not moved:
        return Layout(layout.dims), ""
    ways = math.prod(sizes[a] for a in moved)
    local = layout.local_shape[0] if len(shape) > 2 else 1
    if local % ways:
        return layout, f"{ways} ranks of {'+'.join(moved)} do not divide its {local} layers"
    lead = [d for d in layout.dims[0] if isinstance(d, str)]
    side = math.prod(sizes[str(a)] for a in on[long])
    dims = list(Layout(layout.dims).dims)
    dims[0] = (*lead, *moved, *([local // ways] if local > ways else []))
    dims[long] = (*(str(a) for a in on[long]), shape[long] // side)
    dims[short] = (shape[short],)
    return Layout(tuple(dims)), ""


def in_gram_form(
    spread: Spread, layouts: Sequence[Layout], call: Call, axes: Sequence[str], sizes: dict[str, int]
) -> tuple[dict[int, Layout], list[str]]:
    """The leaves that cost less in the Gram form, with the layouts that they take there, and why for each leaf."""
    found: dict[int, Layout] = {}
    told: list[str] = []
    gram = tuple(a for a in spread.gram if a in sizes)
    for i, own in enumerate(layouts if gram else ()):
        said = f"leaf {spread.paths[i]} for the Gram form over {'+'.join(gram)}"
        wanted, why = gram_layout(own, axes, gram, sizes)
        if spread.blocks[i] is not None:
            why = "its blocks are matrices of their own"
        if why:
            told.append(f"{said}: no, since {why}")
            continue
        here, other = _costs(own, wanted, axes, gram, sizes, len(call.args[1]) // 3, call.operands[i].dtype.itemsize)
        words = [f"{human_count(c.flops)} operations and {human_bytes(c.nbytes)} a rank" for c in (here, other)]
        less = here.weight < other.weight
        told.append(f"{said}: {'yes' if less else 'no'}, {words[0]} against {words[1]} with one owner each")
        if less:
            found[i] = wanted
    return found, told


def _costs(
    own: Layout,
    wanted: Layout,
    axes: Sequence[str],
    gram: Sequence[str],
    sizes: dict[str, int],
    steps: int,
    itemsize: int,
) -> tuple[Cost, Cost]:
    """In the Gram form, with what brings a leaf to its layout and back, and with owners."""
    shape = own.shape(sizes)
    matrix = (shape[-2], shape[-1])
    side = math.prod(sizes[a] for a in gram if a in wanted.dims[-2] + wanted.dims[-1])
    count = math.prod(wanted.local_shape[:-2])
    here = gram_cost(matrix, count, side, steps, max(itemsize, 4))  # Gram matrices are summed in float32
    moved = math.prod(sizes[a] for a in axes if a in own.dims[-2] + own.dims[-1]) // side
    there = 2 * (moved - 1) / moved * math.prod(own.local_shape) * itemsize
    group = moved * side
    other = owned_cost(matrix, math.prod(own.local_shape[:-2]), group, steps, itemsize)
    return Cost(here.flops, here.nbytes + there), other


def split_over(
    split: dict[int, Layout], spread: Spread, xs: Any, coefficients: Any, eps: float, dtype: Any, _: str
) -> list[Any]:
    """The leaves in the Gram form, written with annotations."""
    found = []
    for i, layout in split.items():
        x, what = xs[i], f"leaf {spread.paths[i]} in the Gram form"
        placed = markers.ops.constrain(x, markers.encode_spec(layout.spec, None, x.ndim, what))
        out = split_newton_schulz(placed, coefficients, eps, dtype)
        found.append(markers.ops.constrain_like(out, x))
    return found
