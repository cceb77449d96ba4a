"""NorMuon: Muon whose neurons move alike (Li et al. 2025, arXiv:2510.05491).

Orthogonalisation gives a matrix whose rows and columns may still differ much in size. With O = NS(u) as in
:mod:`functitan.optim.muon`, and per neuron (an output: a column here, a row in torch's orientation) i::

    v_i <- b2 v_i + (1 - b2) mean_j O_ij^2
    O'  <- O_i / (sqrt(v_i) + eps), times the number that makes ||O'||_F = ||O||_F
    W   <- W - lr weight_decay W - lr c(A, B) O'

Both means are of whole matrices, whatever a mesh splits: a mean over a split dim is one small reduction, of a number
per neuron.

Legend: M rows (in), C columns (out), N blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from functitan import tree
from functitan.annotations import constrain_like
from functitan.optim.blocks import Blocks
from functitan.optim.hyperparams import Hyper, current, first, share_problems
from functitan.optim.muon import MomentumForm, form_problems, with_momentum
from functitan.optim.newton_schulz import Coefficients
from functitan.optim.orthogonalize import Layout, Orthogonalize, Scale
from functitan.optim.transform import GradientTransformation, PyTree


@tree.dataclass
class NorMuonState:
    """The state of :func:`normuon`.

    Attributes:
        step, lr, weight_decay, momentum, mu: as in :class:`functitan.optim.MuonState`.
        b2: 0-d float64.
        nu: per neuron the second moment of what is orthogonalised, float32 at least: (..., 1, C) for matrices, with a
            row per block that splits the inputs, (..., out, 1, 1) for a convolution of two kernel dims.
    """

    step: torch.Tensor
    lr: torch.Tensor
    weight_decay: torch.Tensor
    momentum: torch.Tensor
    b2: torch.Tensor
    mu: Any
    nu: Any


def normuon(
    lr: Hyper,
    *,
    momentum: Hyper = 0.95,
    b2: Hyper = 0.95,
    nesterov: bool = True,
    momentum_form: MomentumForm = "ema",
    weight_decay: Hyper = 0.1,
    schedule: str | Coefficients = "quintic",
    scale: Scale = "match_rms",
    eps: float = 1e-8,
    ns_eps: float = 1e-7,
    ns_dtype: torch.dtype = torch.bfloat16,
    blocks: Mapping[str, Blocks] | None = None,
    convs: Mapping[str, int] | None = None,
    layout: Layout | None = None,
    axes: Sequence[str] = (),
    wire_dtype: torch.dtype | None = None,
    bucket_bytes: int = 64 << 20,
    gram: Sequence[str] = (),
) -> GradientTransformation:
    """:func:`functitan.optim.muon` with a second moment per neuron.

    Args:
        lr, momentum, nesterov, momentum_form, weight_decay, schedule, scale, ns_dtype, blocks, convs, layout, axes,
            wire_dtype, bucket_bytes, gram: as for :func:`functitan.optim.muon`.
        b2: the decay rate of the second moment.
        eps: added to its root.
        ns_eps: the ``eps`` of the orthogonalisation.

    Returns:
        A transformation with the state :class:`NorMuonState`; updates have the momentum's dtype.

    Raises:
        ArgumentError, ShardingError: as for :func:`functitan.optim.muon`.

    >>> rule = normuon(0.1, scale="original", weight_decay=0.0, ns_dtype=torch.float32)
    >>> params = {"w": torch.eye(2)}
    >>> rule.update(params, rule.init(params), params)[0]
    {'w': tensor([[-0.1108, -0.0000],
            [-0.0000, -0.1108]])}
    """
    more = [*form_problems(momentum_form), *share_problems(momentum=momentum, b2=b2)]
    orthogonalize = Orthogonalize.of(
        "normuon", schedule=schedule, scale=scale, eps=ns_eps, ns_dtype=ns_dtype, blocks=blocks, convs=convs, layout=layout,
        axes=axes, wire_dtype=wire_dtype, bucket_bytes=bucket_bytes, gram=gram, more=more,
    )  # fmt: skip

    def init(params: PyTree) -> NorMuonState:
        orthogonalize.check_leaves(params)
        leaves = tree.leaves(params)
        device = leaves[0].device if leaves else None
        number = lambda value: first(value, params, torch.float64)  # noqa: E731
        step = torch.zeros((), dtype=torch.int64, device=device)
        mu = tree.map(lambda p: torch.zeros_like(p, dtype=_wide(p)), params)
        nu = tree.map_with_path(lambda path, p: _Neurons.of(orthogonalize, path).zeros(p), params)
        return NorMuonState(step, number(lr), number(weight_decay), number(momentum), number(b2), mu, nu)

    def update(grads: PyTree, state: NorMuonState, params: PyTree) -> tuple[PyTree, NorMuonState]:
        tree.check_same_structure(grads, params, ("grads", "params"))
        orthogonalize.check_leaves(params)
        rate, decay, beta, b2_now = (
            current(value, kept, state.step)
            for value, kept in (
                (lr, state.lr), (weight_decay, state.weight_decay), (momentum, state.momentum), (b2, state.b2),
            )
        )  # fmt: skip
        mu, u = with_momentum(state.mu, grads, beta, momentum_form, nesterov)
        direction = tree.map(lambda o, m: o.to(m.dtype), orthogonalize(u), mu)
        squares = tree.map_with_path(lambda path, o: _Neurons.of(orthogonalize, path).mean(o.square()), direction)

        def moment(v: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
            return constrain_like(torch.lerp(v, s, (1 - b2_now).to(v.dtype)), v)

        nu = tree.map(moment, state.nu, squares)

        def leaf_update(path: str, o: torch.Tensor, v: torch.Tensor, s: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
            neurons = _Neurons.of(orthogonalize, path)
            factor = 1 / (v.sqrt() + eps)
            # ||O||^2 over ||O'||^2 of each matrix; a zero matrix stays zero.
            before, after = neurons.total(s, o), neurons.total(s * factor.square(), o)
            kept = (before / after.clamp(min=torch.finfo(after.dtype).tiny)).sqrt()
            size = (rate * orthogonalize.factor(path, p)).to(o.dtype)
            shrink = (rate * decay).to(o.dtype) * p.to(o.dtype)
            return -size * (o * neurons.spread(factor * kept, o)) - shrink

        updates = tree.map_with_path(leaf_update, direction, nu, squares, params)
        new = NorMuonState(state.step + 1, rate, decay, beta, b2_now, mu, nu)
        return updates, new

    return GradientTransformation(init, update, {"mu": momentum, "nu": b2})


def _wide(p: torch.Tensor) -> torch.dtype:
    return torch.promote_types(p.dtype, torch.float32)


@dataclass(frozen=True)
class _Neurons:
    """The neurons of a leaf, and which of them make a matrix; all of it in terms of the leaf's global shape."""

    kernel: int
    blocks: Blocks | None

    @staticmethod
    def of(found: Orthogonalize, path: str) -> _Neurons:
        return _Neurons(found.kernel_dims(path), found.block_of(path))

    @property
    def inputs(self) -> tuple[int, ...]:
        """The dims that a neuron reads."""
        return tuple(range(-1 - self.kernel, 0)) if self.kernel else (-2,)

    @property
    def by_rows(self) -> bool:
        """Whether an output has a neuron per block of its inputs."""
        return self.blocks is not None and self.blocks.dim == -2

    def zeros(self, p: torch.Tensor) -> torch.Tensor:
        """The first moment, split over the mesh as the outputs of its leaf are."""
        shape = [1 if d - p.ndim in self.inputs else n for d, n in enumerate(p.shape)]
        made = constrain_like(p.new_zeros(shape, dtype=_wide(p)), p)
        return made.repeat_interleave(self._count(p), -2) if self.by_rows else made

    def mean(self, x: torch.Tensor) -> torch.Tensor:
        """Over the inputs of each neuron."""
        if not self.by_rows:
            return x.mean(self.inputs, keepdim=True)
        member_NM = self._members(x)
        return (member_NM / member_NM.sum(-1, keepdim=True)) @ x

    def total(self, s: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        """Over the neurons of each matrix, for each of them."""
        if self.blocks is None or self.by_rows:
            return s.sum(-2 - self.kernel if self.kernel else -1, keepdim=True)
        member_NC = self._members(p).to(s.dtype)
        return (s @ member_NC.mT) @ member_NC

    def spread(self, s: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """A number per neuron for each of its inputs."""
        return self._members(x).mT @ s if self.by_rows else s

    def _count(self, p: torch.Tensor) -> int:
        assert self.blocks is not None
        return len(self.blocks.parts(p.shape))

    def _members(self, x: torch.Tensor) -> torch.Tensor:
        """(blocks, size of the blocked dim): 1 where the entry is of the block."""
        assert self.blocks is not None
        parts = self.blocks.parts(x.shape)
        owner = torch.cat([torch.full((n,), i, device=x.device) for i, n in enumerate(parts)])
        return (owner == torch.arange(len(parts), device=x.device)[:, None]).to(x.dtype)
