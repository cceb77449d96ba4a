"""Orthogonalising the matrices of a tree, where their layout says: what the rules for matrices share.

Weights here are (in, out), ``x @ w``: of the last two dims, A = d_out is the columns and B = d_in the rows. torch's are
(out, in), so torch's A is the rows. Dims before the last two are a batch of matrices: layers, experts. A convolution's
weight stays as torch has it, (out, in, *kernel), and is one matrix with A = out and B = in * kernel.

Legend: L layers, M rows (in), C columns (out).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

import torch
from spmd_types.types import PartitionSpec

from functitan import tree
from functitan.annotations import constrain, constrain_like
from functitan.errors import ArgumentError, listed, raise_batch, suggest
from functitan.ops.orthogonalize import Spread, orthogonalize_op
from functitan.optim.blocks import Blocks, orthogonalize_blocks, scale_of
from functitan.optim.newton_schulz import Coefficients, coefficients, newton_schulz

PyTree = Any
Scale = Literal["original", "match_rms", "unclamped"]
Layout = Literal["stacked", "owned", "gathered"]
#: c(A, B) by name, for A outputs and B inputs.
SCALES: dict[str, Callable[[int, int], float]] = {
    # Jordan's and torch's default: the spectral norm follows sqrt(A / B), not below 1.
    "original": lambda A, B: math.sqrt(max(1.0, A / B)),
    # arXiv:2502.16982: the root mean square of AdamW's updates, so that its rates carry over.
    "match_rms": lambda A, B: 0.2 * math.sqrt(max(A, B)),
    # Bernstein 2025, https://jeremybernste.in/writing/deriving-muon: unit RMS-to-RMS norm.
    "unclamped": lambda A, B: math.sqrt(A / B),
}


@dataclass(frozen=True)
class Orthogonalize:
    """What :func:`functitan.optim.muon` says of its matrices; its arguments of the same names explain them.

    Attributes:
        rule: the rule's name, for errors.
    """

    rule: str
    schedule: Coefficients
    scale: Scale
    eps: float
    ns_dtype: torch.dtype
    blocks: Mapping[str, Blocks]
    convs: Mapping[str, int]
    layout: Layout | None
    axes: tuple[str, ...]
    wire_dtype: torch.dtype
    bucket_bytes: int
    gram: tuple[str, ...]

    def __post_init__(self) -> None:
        if isinstance(self.eps, torch.Tensor):
            raise ArgumentError(
                f"{self.rule}: the eps of the orthogonalisation is a number of the op, and it was given as a tensor. "
                'With inject_hyperparams, name it in static=("eps",).'
            )

    @staticmethod
    def of(
        rule: str,
        *,
        schedule: str | Coefficients,
        scale: Scale,
        eps: float,
        ns_dtype: torch.dtype,
        blocks: Mapping[str, Blocks] | None,
        convs: Mapping[str, int] | None,
        layout: Layout | None,
        axes: Sequence[str],
        wire_dtype: torch.dtype | None,
        bucket_bytes: int,
        gram: Sequence[str],
        more: Iterable[str],
    ) -> Orthogonalize:
        """From a rule's arguments, with what None stands for.

        Raises:
            ArgumentError: all settings that do not exist or fit, ``more`` included, in one message.
        """
        _check(rule, scale, layout, axes, convs or {}, gram, more)
        return Orthogonalize(
            rule=rule,
            schedule=coefficients(schedule),
            scale=scale,
            eps=eps,
            ns_dtype=ns_dtype,
            blocks=dict(blocks or {}),
            convs=dict(convs or {}),
            layout=layout,
            axes=tuple(axes),
            wire_dtype=ns_dtype if wire_dtype is None else wire_dtype,
            bucket_bytes=bucket_bytes,
            gram=tuple(gram),
        )

    def __call__(self, momentum: PyTree) -> PyTree:
        """The orthogonalised matrices of each leaf, laid out as the leaf is, in the dtype that was moved."""
        if self.axes and self.layout != "stacked" and tree.leaves(momentum):
            return self._spread(momentum)
        return tree.map_with_path(self._leaf, momentum)

    def factor(self, path: str, p: torch.Tensor) -> torch.Tensor | float:
        """c(A, B) of a leaf, from the shape of each matrix on its own."""
        c = SCALES[self.scale]
        if kernel := self.kernel_dims(path):
            outs, *ins = p.shape[-2 - kernel :]
            return c(outs, math.prod(ins))
        return scale_of(p, self.block_of(path), c)

    def block_of(self, path: str) -> Blocks | None:
        """The blocks that a leaf is declared to consist of."""
        return _first(self.blocks, path)

    def kernel_dims(self, path: str) -> int:
        """The kernel dims of a leaf that is declared to hold convolutions, 0 for one of matrices."""
        return _first(self.convs, path) or 0

    def check_leaves(self, params: PyTree) -> None:
        """Raise one ArgumentError for all leaves that do not hold the matrices they should."""
        problems = []
        rows, _ = tree.flatten_with_paths(params)
        for path, p in rows:
            found = f"leaf {path} has shape {tuple(p.shape)}"
            own, kernel = self.block_of(path), self.kernel_dims(path)
            kind = f"({', '.join(['out', 'in', *('k' * kernel)])})" if kernel else "(in, out)"
            if p.ndim < 2 + kernel:
                problems.append(
                    f"{found}; {self.rule} takes matrices (..., {kind[1:]}. Give it another rule in partition."
                )
            elif self.layout == "stacked" and p.ndim < 3 + kernel:
                problems.append(
                    f'{found}; layout="stacked" spreads the matrices of a leaf (layers, {kind[1:]}. Stack equal shapes '
                    f'on a leading dim, or write layout="owned", which takes any number of matrices.'
                )
            elif own is not None and kernel:
                problems.append(f"{found}; it is declared in both blocks and convs. A convolution is one matrix.")
            elif own is not None and (text := own.misfit(p.shape)):
                problems.append(f"{found}; {text}")
        paths = [path for path, _ in rows]
        for name, declared in (("blocks", self.blocks), ("convs", self.convs)):
            problems += _unmatched(name, declared, paths)
        raise_batch(ArgumentError, problems, f"the leaves of {self.rule}")

    def _leaf(self, path: str, u: torch.Tensor) -> torch.Tensor:
        if self.layout is None:
            return self._whole(path, u)
        moved = self._to_compute(path, u.to(self.wire_dtype))
        return constrain_like(self._whole(path, moved).to(self.wire_dtype), u)

    def _spread(self, momentum: PyTree) -> PyTree:
        """All leaves as one op, for whose matrices the lowering finds owners."""
        rows, structure = tree.flatten_with_paths(momentum)
        moved, blocks = [], []
        for path, u in rows:
            kernel, own = self.kernel_dims(path), self.block_of(path)
            u = u.to(self.wire_dtype)
            moved.append(u.flatten(-1 - kernel).mT if kernel else u)
            blocks.append(None if own is None else (own.dim, own.parts(u.shape)))
        spread = Spread(
            tuple(path for path, _ in rows),
            tuple(blocks),
            self.axes,
            self.layout or "auto",
            self.bucket_bytes,
            self.gram,
        )
        found = orthogonalize_op(moved, self.schedule.flat(), self.eps, self.ns_dtype, spread.text())
        whole = [
            out.mT.reshape(u.shape) if self.kernel_dims(path) else out
            for (path, u), out in zip(rows, found, strict=True)
        ]
        return tree.unflatten(structure, whole)

    def _to_compute(self, path: str, u_LMC: torch.Tensor) -> torch.Tensor:
        """To whole matrices: the first dim spread over mesh axes, or nothing spread and every rank has them all."""
        whole = [None] * (u_LMC.ndim - 1)
        if not self.axes:
            return constrain(u_LMC, PartitionSpec(None, *whole), what=f"leaf {path}, gathered by {self.rule}")
        what = (
            f'leaf {path} for {self.rule}(layout="stacked"), its {u_LMC.shape[0]} matrices spread over the ranks of '
            f'{" x ".join(self.axes)} (or write layout="gathered": each rank then works on all of them)'
        )
        return constrain(u_LMC, PartitionSpec(self.axes, *whole), what=what)

    def _whole(self, path: str, u: torch.Tensor) -> torch.Tensor:
        # In torch's orientation, (out, in), so that a square matrix is worked on as torch does.
        def by(x_CM: torch.Tensor) -> torch.Tensor:
            return newton_schulz(x_CM, self.schedule, dtype=self.ns_dtype, eps=self.eps)

        if kernel := self.kernel_dims(path):
            return by(u.flatten(-1 - kernel)).reshape(u.shape)
        return orthogonalize_blocks(u, self.block_of(path), lambda x_MC: by(x_MC.mT).mT)


def _check(
    rule: str,
    scale: str,
    layout: str | None,
    axes: Sequence[str],
    convs: Mapping[str, int],
    gram: Sequence[str],
    more: Iterable[str],
) -> None:
    problems = list(more)
    if scale not in SCALES:
        problems.append(f'scale="{scale}": there are {listed(get_args(Scale))}.{suggest(scale, SCALES)}')
    if layout not in (None, *get_args(Layout)):
        names = listed(f'"{name}"' for name in get_args(Layout))
        problems.append(f'layout="{layout}": there are {names}, and None for where the matrices are.')
    if isinstance(axes, str):
        problems.append(f'axes="{axes}": write a tuple of mesh axes, ("{axes}",).')
    elif layout in ("stacked", "owned") and not axes:
        problems.append(f'layout="{layout}" needs the mesh axes that matrices are spread over, such as axes=("fsdp",).')
    elif layout == "gathered" and axes:
        problems.append(
            f'axes={tuple(axes)} with layout="gathered", where every rank has every matrix. Leave axes out.'
        )
    if gram and (layout in ("stacked", "gathered") or not set(gram) <= set(axes)):
        problems.append(
            f"gram={tuple(gram)} with layout={layout!r} and axes={tuple(axes)}: name axes of axes, and take "
            'layout="owned" or None.'
        )
    for pattern, kernel in convs.items():
        if kernel < 1:
            problems.append(f'convs["{pattern}"]={kernel}: write how many kernel dims it has, 2 for a Conv2d.')
    raise_batch(ArgumentError, problems, f"the settings of {rule}")


def _first(declared: Mapping[str, Any], path: str) -> Any:
    return next((value for pattern, value in declared.items() if fnmatchcase(path, pattern)), None)


def _unmatched(name: str, declared: Mapping[str, Any], paths: Sequence[str]) -> list[str]:
    return [
        f'{name} for "{pattern}" match no leaf; there are {listed(paths)}.{suggest(pattern, paths)}'
        for pattern in declared
        if not any(fnmatchcase(path, pattern) for path in paths)
    ]
