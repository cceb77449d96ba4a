"""Muon: momentum, orthogonalised, for matrices (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon;
Liu et al. 2025, arXiv:2502.16982).

For a matrix W with gradient g, momentum m, and u what is orthogonalised::

    m <- beta m + (1 - beta) g
    u <- beta m + (1 - beta) g  (Nesterov), or m
    W <- W - lr weight_decay W - lr c(A, B) NS(u)

Which dims are a matrix, and where it is orthogonalised, is in :mod:`functitan.optim.orthogonalize`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import torch

from functitan import tree
from functitan.errors import suggest
from functitan.optim.blocks import Blocks
from functitan.optim.hyperparams import Hyper, current, first, share_problems
from functitan.optim.newton_schulz import Coefficients
from functitan.optim.orthogonalize import Layout, Orthogonalize, Scale
from functitan.optim.transform import GradientTransformation, PyTree

MomentumForm = Literal["ema", "sum"]


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


def muon(
    lr: Hyper,
    *,
    momentum: Hyper = 0.95,
    nesterov: bool = True,
    momentum_form: MomentumForm = "ema",
    weight_decay: Hyper = 0.1,
    schedule: str | Coefficients = "quintic",
    scale: Scale = "original",
    eps: float = 1e-7,
    ns_dtype: torch.dtype = torch.bfloat16,
    blocks: Mapping[str, Blocks] | None = None,
    convs: Mapping[str, int] | None = None,
    layout: Layout | None = None,
    axes: Sequence[str] = (),
    wire_dtype: torch.dtype | None = None,
    bucket_bytes: int = 64 << 20,
    gram: Sequence[str] = (),
    as_torch: bool = False,
) -> GradientTransformation:
    """Orthogonalised momentum for leaves of matrices; other leaves get another rule by
    :func:`functitan.optim.partition`.

    The default is ``torch.optim.Muon``: EMA momentum, Nesterov, five quintic steps in bfloat16, decay with the base
    rate, not the scaled one.

    **Where a matrix is orthogonalised.** ``axes`` are the mesh axes of the ranks that share the work, so that none
    repeats another's. Name all that split the matrices; one that is left out is gathered.

    - ``layout="owned"`` gives each matrix to one rank, longest processing time first, so any number of any shapes is
      spread evenly. They go there in stages, by one all-to-all of uneven parts each (and one more for matrices that
      fewer ranks share, such as experts), while the stage before is worked on, and results go back the same way.
    - ``layout="stacked"`` spreads the layers of a leaf (L, M, C), by an all-to-all per axis that split a matrix, and back.
      L must divide by the ranks.
    - ``layout=None`` takes the one of these with the lower maximal load; the report says which and why. Without ``axes``
      matrices are worked on where they are: right for experts, whose matrices are whole; one that is split is an error.
    - ``layout="gathered"``: every rank gathers and works on every matrix.

    What a rank holds whole already moves nowhere, and no layout changes a bit of the result. Along an axis of ``axes``
    where all ranks hold the same, as the replicas of data parallelism do, work is shared too, and results are sent; leave
    the axis out for each replica to do its own.

    Args:
        lr: the learning rate, or a schedule of the 0-d int64 step, which counts from 0.
        momentum: beta, or a schedule.
        nesterov: as above.
        momentum_form: "ema" as above, or "sum", ``m <- beta m + g`` and ``u <- g + beta m``: 1 / (1 - beta) times as
            much, which orthogonalisation does not see as long as beta stays as it is. The state of one form becomes
            the other's by that factor.
        weight_decay: the decay, times the learning rate, per step; or a schedule.
        schedule: the coefficients; see :mod:`functitan.optim.newton_schulz`.
        scale: c(A, B): "original" ``sqrt(max(1, A/B))``, "match_rms" ``0.2 sqrt(max(A, B))``, "unclamped"
            ``sqrt(A/B)``; for blocks of a block's own shape.
        eps: the least norm of what is orthogonalised.
        ns_dtype: of the iteration. On CPUs bfloat16 products are slow; float32 is not.
        blocks: by glob for the path, the blocks that a leaf is made of; each is a matrix of its own.
        convs: by glob for the path, how many kernel dims a leaf of convolutions has: 2 for torch's Conv2d weights
            (..., out, in, height, width). Such a weight is one matrix with A = out and B = in * height * width. A
            depthwise one is none: give it another rule.
        layout, axes: as above; mesh axes, major to minor.
        wire_dtype: what is moved is cast to it before, both ways; by default ``ns_dtype``, which loses nothing.
        bucket_bytes: about what a rank sends at a time in the owned layout, and no less than keeps all ranks at work
            while one is at its largest matrix.
        gram: axes of ``axes`` along which a matrix may stay split on its long side, such as the axis of tensor
            parallelism: only Gram matrices are summed over it then, in float32, one all-reduce a step of the iteration. A
            leaf is worked on so where operations and bytes together are less than with owners; the report gives both.
            The one setting that changes bits with the mesh: by 5e-6 of the result in float32, 3e-2 in bfloat16.
        as_torch: round as torch's in-place writes do, eager or compiled: parameters after ``apply_updates`` and the
            momentum then equal ``torch.optim.Muon``'s bit for bit on CPU. Updates are float64 then.

    Returns:
        A transformation with the state :class:`MuonState`; updates have the momentum's dtype.

    Raises:
        ArgumentError: settings that do not exist or fit; from ``init`` and ``update``, leaves that are no stacks of
            matrices, or do not consist of the blocks that are declared. All in one message.
        ShardingError: when compiled for a mesh, with ``layout="stacked"`` a leaf whose layers do not divide by the
            ranks, or without ``axes`` one whose matrices are split.

    >>> rule = muon(0.1, weight_decay=0.0, ns_dtype=torch.float32)
    >>> params = {"w": torch.eye(2)}
    >>> rule.update(params, rule.init(params), params)[0]
    {'w': tensor([[-0.1108, -0.0000],
            [-0.0000, -0.1108]])}
    """
    more = [*form_problems(momentum_form), *share_problems(momentum=momentum)]
    if as_torch and momentum_form != "ema":
        more.append(
            f'as_torch=True with momentum_form="{momentum_form}": torch.optim.Muon has the form "ema". Write it.'
        )
    orthogonalize = Orthogonalize.of(
        "muon", schedule=schedule, scale=scale, eps=eps, ns_dtype=ns_dtype, blocks=blocks, convs=convs, layout=layout,
        axes=axes, wire_dtype=wire_dtype, bucket_bytes=bucket_bytes, gram=gram, more=more,
    )  # fmt: skip

    def init(params: PyTree) -> MuonState:
        orthogonalize.check_leaves(params)
        leaves = tree.leaves(params)
        device = leaves[0].device if leaves else None
        number = lambda value: first(value, params, torch.float64)  # noqa: E731
        step = torch.zeros((), dtype=torch.int64, device=device)
        mu = tree.map(lambda p: torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)), params)
        return MuonState(step, number(lr), number(weight_decay), number(momentum), mu)

    def update(grads: PyTree, state: MuonState, params: PyTree) -> tuple[PyTree, MuonState]:
        tree.check_same_structure(grads, params, ("grads", "params"))
        orthogonalize.check_leaves(params)
        rate, decay, beta = (
            current(value, kept, state.step)
            for value, kept in ((lr, state.lr), (weight_decay, state.weight_decay), (momentum, state.momentum))
        )
        mu, u = with_momentum(state.mu, grads, beta, momentum_form, nesterov, as_torch)

        def leaf_update(path: str, direction: torch.Tensor, m: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
            size = rate * orthogonalize.factor(path, p)
            if as_torch:
                # p * (1 - lr wd) is rounded to p's dtype, then one fused multiply-add: both exact in float64.
                decayed = p * (1 - rate * decay).to(p.dtype)
                moved = decayed.double() - size.to(torch.float32).double() * direction.double()
                return moved - p.double()
            shrink = (rate * decay).to(m.dtype) * p.to(m.dtype)
            return -size.to(m.dtype) * direction.to(m.dtype) - shrink

        updates = tree.map_with_path(leaf_update, orthogonalize(u), mu, params)
        return updates, MuonState(state.step + 1, rate, decay, beta, mu)

    return GradientTransformation(init, update, {"mu": momentum})


def with_momentum(
    mu: PyTree, grads: PyTree, beta: torch.Tensor, form: MomentumForm, nesterov: bool, as_torch: bool = False
) -> tuple[PyTree, PyTree]:
    """The new momentum, and what is orthogonalised."""
    if form == "sum":
        mu = tree.map(lambda m, g: beta.to(m.dtype) * m + g.to(m.dtype), mu, grads)
        return mu, tree.map(lambda m, g: g.to(m.dtype) + beta.to(m.dtype) * m, mu, grads) if nesterov else mu
    blend = _fused_lerp if as_torch else torch.lerp
    mu = tree.map(lambda m, g: blend(m, g.to(m.dtype), (1 - beta).to(m.dtype)), mu, grads)
    return mu, tree.map(lambda m, g: blend(g.to(m.dtype), m, beta.to(m.dtype)), mu, grads) if nesterov else mu


def _fused_lerp(a: torch.Tensor, b: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``torch.lerp`` as its CPU kernel rounds it: the difference, then one fused multiply-add.

    A product of two float32 values is exact in float64, so no compiler can contract it to other bits.
    """
    difference = (b - a).double()
    near = a.double() + weight.double() * difference
    far = b.double() - (1 - weight).double() * difference
    return torch.where(weight < 0.5, near, far).to(a.dtype)


def form_problems(form: str) -> list[str]:
    """What is wrong with the name of a form of momentum."""
    if form in get_args(MomentumForm):
        return []
    return [f'momentum_form="{form}": there are "ema" and "sum".{suggest(form, get_args(MomentumForm))}']
