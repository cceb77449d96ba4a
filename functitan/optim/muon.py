"""Muon: momentum, orthogonalised, for matrices (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon;
Liu et al. 2025, arXiv:2502.16982).

For a matrix W with gradient g, momentum m, and u what is orthogonalised::

    m <- beta m + (1 - beta) g
    u <- beta m + (1 - beta) g  (Nesterov), or m
    W <- W - lr weight_decay W - lr c(A, B) NS(u)

Weights here are (in, out), ``x @ w``: of the last two dims, A = d_out is the columns and B = d_in the rows. torch's are
(out, in), so torch's A is the rows. Dims before the last two are a batch of matrices: layers, experts.

Legend: L layers, M rows (in), C columns (out).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

import torch
from spmd_types.types import PartitionSpec

from functitan import tree
from functitan.annotations import constrain, constrain_like
from functitan.errors import ArgumentError, listed, raise_batch, suggest
from functitan.optim.blocks import Blocks, orthogonalize_blocks, scale_of
from functitan.optim.newton_schulz import Coefficients, coefficients, newton_schulz
from functitan.optim.transform import GradientTransformation, PyTree, Schedule

Scale = Literal["original", "match_rms", "unclamped"]
#: c(A, B) by name, for A outputs and B inputs.
SCALES: dict[str, Callable[[int, int], float]] = {
    # Jordan's and torch's default: the spectral norm follows sqrt(A / B), not below 1.
    "original": lambda A, B: math.sqrt(max(1.0, A / B)),
    # arXiv:2502.16982: the root mean square of AdamW's updates, so that its rates carry over.
    "match_rms": lambda A, B: 0.2 * math.sqrt(max(A, B)),
    # Bernstein 2025, https://jeremybernste.in/writing/deriving-muon: unit RMS-to-RMS norm.
    "unclamped": lambda A, B: math.sqrt(A / B),
}


@tree.dataclass
class MuonState:
    """The state of :func:`muon`.

    Attributes:
        step: 0-d int64, the updates made.
        lr, weight_decay, momentum: 0-d float64, so that ``1 - momentum`` and ``1 - lr * weight_decay`` are rounded
            once, as Python's numbers are. Setting one changes the next update without a recompilation (``lr`` not
            under a schedule, where it is the rate of the last update).
        mu: the momentum in the structure of the parameters, at least float32.
    """

    step: torch.Tensor
    lr: torch.Tensor
    weight_decay: torch.Tensor
    momentum: torch.Tensor
    mu: Any


@dataclass(frozen=True)
class _Compute:
    """A compute layout: whole matrices, the first dim spread over mesh axes (none: every rank has them all)."""

    axes: tuple[str, ...]

    def to(self, path: str, u_LMC: torch.Tensor) -> torch.Tensor:
        if not self.axes:
            return constrain(u_LMC, PartitionSpec(*[None] * u_LMC.ndim), what=f"leaf {path}, gathered by muon")
        what = (
            f'leaf {path} for muon(layout="stacked"), its {u_LMC.shape[0]} matrices spread over the ranks of '
            f'{" x ".join(self.axes)} (or write layout="gathered": each rank then works on all of them)'
        )
        return constrain(u_LMC, PartitionSpec(self.axes, *[None] * (u_LMC.ndim - 1)), what=what)


def muon(
    lr: float | Schedule,
    *,
    momentum: float = 0.95,
    nesterov: bool = True,
    weight_decay: float = 0.1,
    schedule: str | Coefficients = "quintic",
    scale: Scale = "original",
    eps: float = 1e-7,
    ns_dtype: torch.dtype = torch.bfloat16,
    blocks: Mapping[str, Blocks] | None = None,
    layout: Literal["stacked", "gathered"] | None = None,
    axes: Sequence[str] = (),
    wire_dtype: torch.dtype | None = None,
    as_torch: bool = False,
) -> GradientTransformation:
    """Orthogonalised momentum for leaves of matrices; other leaves get another rule by
    :func:`functitan.optim.partition`.

    The default is ``torch.optim.Muon``: EMA momentum, Nesterov, five quintic steps in bfloat16, decay with the base
    rate, not the scaled one.

    **Where a matrix is orthogonalised.** With ``layout="stacked"`` a leaf (L, M, C) goes from where it is stored to
    whole matrices, with its layers spread over ``axes``, by an all-to-all per axis that split a matrix, and the result
    goes back the same way: no rank repeats another's work. L must divide by the ranks. Name all axes that split the
    matrices; one that is left out is gathered. What is stored so already moves nowhere. With ``layout="gathered"``
    every rank gathers and works on every matrix. With ``layout=None`` matrices are worked on where they are: right for
    experts, whose matrices are whole; one that is split is an error. No layout changes a bit of the result.

    Args:
        lr: the learning rate, or a schedule of the 0-d int64 step, which counts from 0.
        momentum: beta.
        nesterov: as above.
        weight_decay: the decay, times the learning rate, per step.
        schedule: the coefficients; see :mod:`functitan.optim.newton_schulz`.
        scale: c(A, B): "original" ``sqrt(max(1, A/B))``, "match_rms" ``0.2 sqrt(max(A, B))``, "unclamped"
            ``sqrt(A/B)``; for blocks of a block's own shape.
        eps: the least norm of what is orthogonalised.
        ns_dtype: of the iteration. On CPUs bfloat16 products are slow; float32 is not.
        blocks: by glob for the path, the blocks that a leaf is made of; each is a matrix of its own.
        layout, axes: as above; mesh axes, major to minor.
        wire_dtype: what is moved is cast to it before, both ways; by default ``ns_dtype``, which loses nothing.
        as_torch: round as torch's in-place writes do, eager or compiled: parameters after ``apply_updates`` and the
            momentum then equal ``torch.optim.Muon``'s bit for bit on CPU. Updates are float64 then.

    Returns:
        A transformation with the state :class:`MuonState`; updates have the momentum's dtype.

    Raises:
        ArgumentError: settings that do not exist or fit; from ``init`` and ``update``, leaves that are no stacks of
            matrices, or do not consist of the blocks that are declared. All in one message.
        ShardingError: when compiled for a mesh, a leaf whose layers do not divide by the ranks, or with
            ``layout=None`` one whose matrices are split.

    >>> rule = muon(0.1, weight_decay=0.0, ns_dtype=torch.float32)
    >>> params = {"w": torch.eye(2)}
    >>> rule.update(params, rule.init(params), params)[0]
    {'w': tensor([[-0.1108, -0.0000],
            [-0.0000, -0.1108]])}
    """
    _check_settings(scale, layout, axes)
    steps = coefficients(schedule)
    wire = ns_dtype if wire_dtype is None else wire_dtype
    compute = None if layout is None else _Compute(tuple(axes))
    declared = dict(blocks or {})
    factor = SCALES[scale]

    def block_of(path: str) -> Blocks | None:
        return next((b for pattern, b in declared.items() if fnmatchcase(path, pattern)), None)

    def init(params: PyTree) -> MuonState:
        _check_leaves(params, declared, block_of, stacked=bool(axes))
        leaves = tree.leaves(params)
        device = leaves[0].device if leaves else None
        number = lambda value: torch.full((), value, dtype=torch.float64, device=device)  # noqa: E731
        step = torch.zeros((), dtype=torch.int64, device=device)
        rate = lr(step).to(torch.float64) if callable(lr) else number(lr)
        mu = tree.map(lambda p: torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)), params)
        return MuonState(step, rate, number(weight_decay), number(momentum), mu)

    def orthogonalized(path: str, u: torch.Tensor) -> torch.Tensor:
        whole = u if compute is None else compute.to(path, u.to(wire))
        # torch's orientation, (out, in), so that a square matrix is worked on as torch does.
        by = lambda x: newton_schulz(x.mT, steps, dtype=ns_dtype, eps=eps).mT  # noqa: E731
        out = orthogonalize_blocks(whole, block_of(path), by)
        return out if compute is None else constrain_like(out.to(wire), u)

    def update(grads: PyTree, state: MuonState, params: PyTree) -> tuple[PyTree, MuonState]:
        tree.check_same_structure(grads, params, ("grads", "params"))
        _check_leaves(params, declared, block_of, stacked=bool(axes))
        rate = lr(state.step).to(torch.float64) if callable(lr) else state.lr
        blend = _fused_lerp if as_torch else torch.lerp
        mu = tree.map(lambda m, g: blend(m, g.to(m.dtype), (1 - state.momentum).to(m.dtype)), state.mu, grads)

        def leaf_update(path: str, g: torch.Tensor, m: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
            u = blend(g.to(m.dtype), m, state.momentum.to(m.dtype)) if nesterov else m
            direction = orthogonalized(path, u)
            size = rate * scale_of(p, block_of(path), factor)
            if as_torch:
                # p * (1 - lr wd) is rounded to p's dtype, then one fused multiply-add: both exact in float64.
                decayed = p * (1 - rate * state.weight_decay).to(p.dtype)
                moved = decayed.double() - size.to(torch.float32).double() * direction.double()
                return moved - p.double()
            shrink = (rate * state.weight_decay).to(m.dtype) * p.to(m.dtype)
            return -size.to(m.dtype) * direction.to(m.dtype) - shrink

        updates = tree.map_with_path(leaf_update, grads, mu, params)
        return updates, MuonState(state.step + 1, rate, state.weight_decay, state.momentum, mu)

    return GradientTransformation(init, update)


def _fused_lerp(a: torch.Tensor, b: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``torch.lerp`` as its CPU kernel rounds it: the difference, then one fused multiply-add.

    A product of two float32 values is exact in float64, so no compiler can contract it to other bits.
    """
    difference = (b - a).double()
    near = a.double() + weight.double() * difference
    far = b.double() - (1 - weight).double() * difference
    return torch.where(weight < 0.5, near, far).to(a.dtype)


def _check_settings(scale: str, layout: str | None, axes: Sequence[str]) -> None:
    problems = []
    if scale not in SCALES:
        problems.append(f'scale="{scale}": there are {listed(get_args(Scale))}.{suggest(scale, SCALES)}')
    if layout not in (None, "stacked", "gathered"):
        problems.append(f'layout="{layout}": there are "stacked", "gathered", and None for where the matrices are.')
    if isinstance(axes, str):
        problems.append(f'axes="{axes}": write a tuple of mesh axes, ("{axes}",).')
    elif layout == "stacked" and not axes:
        problems.append('layout="stacked" needs the mesh axes that layers are spread over, such as axes=("fsdp",).')
    elif layout != "stacked" and axes:
        problems.append(f'axes={tuple(axes)} are read by layout="stacked", and layout is {layout}. Set both.')
    raise_batch(ArgumentError, problems, "the settings of muon")


def _check_leaves(
    params: PyTree, declared: Mapping[str, Blocks], block_of: Callable[[str], Blocks | None], *, stacked: bool
) -> None:
    problems = []
    rows, _ = tree.flatten_with_paths(params)
    for path, p in rows:
        found = f"leaf {path} has shape {tuple(p.shape)}"
        if p.ndim < 2:
            problems.append(f"{found}; muon takes matrices (..., in, out). Give it another rule in partition.")
        elif stacked and p.ndim < 3:
            problems.append(
                f'{found}; layout="stacked" spreads the matrices of a leaf (layers, in, out). Stack equal shapes on a '
                'leading dim, or give the leaf a muon rule with layout="gathered".'
            )
        elif (own := block_of(path)) is not None and (text := own.misfit(p.shape)):
            problems.append(f"{found}; {text}")
    for pattern in declared:
        if not any(fnmatchcase(path, pattern) for path, _ in rows):
            paths = [path for path, _ in rows]
            problems.append(
                f'blocks for "{pattern}" match no leaf; there are {listed(paths)}.{suggest(pattern, paths)}'
            )
    raise_batch(ArgumentError, problems, "the leaves of muon")
