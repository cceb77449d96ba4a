"""Optimizer state in fewer bits: moments in bfloat16, or in 8 bits with a scale per block.

A rule computes in float32; between steps its moments are stored rounded. Blocks run along the rows (the last dim) of
the *global* tensor and random bits are drawn by global index, so the stored bits, and all that follows from them, are
the same on every mesh, and a saved state loads on any other.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import torch

from functitan import random, tree
from functitan.annotations import constrain_like
from functitan.errors import ArgumentError, listed, raise_batch, suggest
from functitan.ops.low_bit import block_dequantize, block_quantize, stochastic_round
from functitan.optim.transform import GradientTransformation, PyTree

StateDtype = Literal["bfloat16", "int8", "float8"]
_MOMENTS = ("mu", "nu")
#: Fields whose numbers are not negative: a sign would be a bit wasted.
_UNSIGNED = ("nu",)
#: Above it a step changes a bfloat16 average by less than rounding to the nearest notices, or nearly so.
_SLOW = 0.99


@tree.dataclass
class Quantized:
    """A tensor in 8 bits; see :func:`with_low_bit_state`.

    Attributes:
        codes: uint8 or float8_e4m3fn, in the tensor's shape (..., C).
        scales: float32, (..., ceil(C / block)).
        block: how many neighbours of a row share a scale; part of the structure.
        format: "int8", "uint8" or "float8"; part of the structure.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    block: int = dataclasses.field(metadata={"static": True})
    format: str = dataclasses.field(metadata={"static": True})


def quantize(x: torch.Tensor, format: str, block: int = 256, *, what: str = "") -> Quantized:
    """Code a float32 tensor in 8 bits with a scale per block of ``block`` neighbours of a row.

    Args:
        x: (..., C).
        format: "int8", the 256 numbers of the dynamic data type of 8-bit optimizers (Dettmers et al. 2022,
            arXiv:2110.02861); "uint8", the same for numbers that are not negative; "float8", e4m3.
        block: a scale is the largest absolute value in its block, for "float8" by 448.
        what: how errors name the value.

    Raises:
        ShardingError: when compiled for a mesh whose split of the rows cuts a block, unless the block is the row.

    >>> found = quantize(torch.tensor([0.0, -2.0, 1.0]), "int8")
    >>> found.scales, dequantize(found)
    (tensor([2.]), tensor([ 0.0000, -1.9859,  1.0016]))
    """
    codes, scales = block_quantize(x, block, format, what)
    return Quantized(codes, scales, block, format)


def dequantize(x: Quantized) -> torch.Tensor:
    """The float32 tensor that the codes stand for."""
    return block_dequantize(x.codes, x.scales, x.block, x.format)


def with_low_bit_state(
    rule: GradientTransformation,
    dtype: StateDtype,
    *,
    stochastic: bool = False,
    block: int = 256,
    fields: Sequence[str] | None = None,
    where: Callable[[str], bool] | None = None,
    min_size: int = 4096,
    seed: int = 0,
) -> GradientTransformation:
    """Store a rule's moments in bfloat16, or in 8 bits; the rule itself computes in float32.

    Bytes per parameter, with blocks of 256: AdamW 8 in float32, 4 in bfloat16, 2.03 in 8 bits; Muon and Lion half of
    that.

    Put it next to the rule, inside of masters, averages, guards and :func:`functitan.optim.partition`, which keep
    numbers of their own.

    Args:
        rule: a rule whose state is a dataclass with moments, such as adamw or muon.
        dtype: "bfloat16"; "int8", codes of the dynamic data type (without a sign for ``nu``); "float8", e4m3. See
            :func:`quantize`.
        stochastic: round bfloat16 up or down at random so that the mean is right. Rounded to the nearest, an average
            whose rate is near 1 stands still: at b2 = 0.999 a second moment never decays. The bits are drawn from the
            seed, the leaf's path, the step and the global index of the element.
        block: numbers that share a scale, for 8 bits.
        fields: fields of the rule's state; by default those of ``mu`` and ``nu`` that it has.
        where: whether the moments of the parameter of this path are stored so; by default all are.
        min_size: leaves with fewer elements, over the whole mesh, stay as they are; so do moments of another shape than
            their parameter's, such as one per neuron.
        seed: of the random bits.

    Returns:
        A transformation whose state is the rule's, with tensors in bfloat16, or :class:`Quantized`, in the place of
        the moments. Non-finite moments stay so in bfloat16, and make their block NaN in 8 bits.

    Raises:
        ArgumentError: settings that do not exist or fit; bfloat16 without stochastic rounding for an average with a
            rate above 0.99; from ``init``, a state without such fields.
        ShardingError: when compiled for a mesh that cuts blocks; see :func:`quantize`.

    >>> from functitan.optim import adamw
    >>> rule = with_low_bit_state(adamw(1e-3), "int8")
    >>> state = rule.init({"w": torch.zeros(64, 256)})
    >>> state.nu["w"].codes.dtype, state.nu["w"].scales.shape, sum(x.nbytes for x in tree.leaves((state.mu, state.nu)))
    (torch.uint8, torch.Size([64, 1]), 33280)
    """
    _check(rule, dtype, stochastic, block, fields)

    def chosen(state: PyTree) -> tuple[str, ...]:
        return tuple(f for f in (fields or _MOMENTS) if getattr(state, f, None) is not None)

    def stored(state: PyTree, params: PyTree) -> PyTree:
        shapes = {path: p.shape for path, p in tree.flatten_with_paths(params)[0]}

        def leaf(field: str, path: str, x: torch.Tensor) -> Any:
            small = x.ndim == 0 or x.numel() < min_size
            if small or x.shape != shapes.get(path) or not (where is None or where(path)):
                return x
            if dtype != "bfloat16":
                unsigned = dtype == "int8" and field in _UNSIGNED
                return quantize(x.to(torch.float32), "uint8" if unsigned else dtype, block, what=f"{field} of {path}")
            if not stochastic:
                return x.to(torch.bfloat16)
            key = random.fold_in(random.fold_in(random.key(seed, device=x.device), f"{field}/{path}"), state.step)
            return stochastic_round(x.to(torch.float32), random.bits(key, tuple(x.shape)))

        changes = {
            f: tree.map_with_path(lambda path, x, f=f: leaf(f, path, x), getattr(state, f)) for f in chosen(state)
        }
        return state.replace(**changes)

    def computed(state: PyTree) -> PyTree:
        return state.replace(**{f: tree.map(_wide, getattr(state, f), is_leaf=_is_quantized) for f in chosen(state)})

    def init(params: PyTree) -> PyTree:
        state = rule.init(params)
        _check_state(state, fields, chosen)
        # Zeros lie nowhere by themselves; what is stored of them lies as the parameter does.
        placed = {f: _placed(getattr(state, f), params) for f in chosen(state)}
        return stored(state.replace(**placed), params)

    def update(grads: PyTree, state: PyTree, params: PyTree, **extra: PyTree) -> tuple[PyTree, PyTree]:
        updates, new = rule.update(grads, computed(state), params, **extra)
        return updates, stored(new, params)

    return GradientTransformation(init, update, rule.decay_rates, rule.extra)


def state_bytes(state: PyTree) -> int:
    """The bytes of all tensors of a state, over the whole mesh; abstract ones count too.

    >>> state_bytes({"mu": torch.zeros(3), "step": torch.tensor(0)})
    20
    """
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in tree.leaves(state))


def _is_quantized(x: Any) -> bool:
    return isinstance(x, Quantized)


def _wide(x: Any) -> Any:
    if _is_quantized(x):
        return dequantize(x)
    return x.to(torch.float32) if x.dtype == torch.bfloat16 else x


def _placed(moments: PyTree, params: PyTree) -> PyTree:
    rows = dict(tree.flatten_with_paths(params)[0])

    def place(path: str, x: torch.Tensor) -> torch.Tensor:
        return constrain_like(x, rows[path]) if path in rows and rows[path].shape == x.shape else x

    return tree.map_with_path(place, moments)


def _check(
    rule: GradientTransformation, dtype: str, stochastic: bool, block: int, fields: Sequence[str] | None
) -> None:
    problems = []
    known = get_args(StateDtype)
    if dtype not in known:
        problems.append(f'dtype="{dtype}": there are {listed(known)}.{suggest(str(dtype), known)}')
    if stochastic and dtype != "bfloat16":
        problems.append(f'stochastic=True rounds to bfloat16, and dtype is "{dtype}". Leave it out.')
    if block < 1:
        problems.append(f"block={block}: a block has at least one number.")
    for field, rate in rule.decay_rates.items():
        wanted = field in (_MOMENTS if fields is None else fields)
        if not (wanted and dtype == "bfloat16" and not stochastic):
            continue
        if isinstance(rate, float) and rate > _SLOW:
            problems.append(
                f"{field} is an average with rate {rate}: a step changes it by {1 - rate:.1g} of itself, which rounding to "
                f"the nearest bfloat16 (steps of 1/256 to 1/128) loses, so that it stands still. Write stochastic=True, "
                f"or a rate of at most {_SLOW}."
            )
    raise_batch(ArgumentError, problems, "with_low_bit_state")


def _check_state(state: PyTree, fields: Sequence[str] | None, chosen: Callable[[PyTree], tuple[str, ...]]) -> None:
    named = [f.name for f in dataclasses.fields(state)] if dataclasses.is_dataclass(state) else []
    missing = [f for f in fields or () if f not in named]
    if missing or not chosen(state) or "step" not in named:
        asked = listed(fields) if fields else "mu or nu"
        raise ArgumentError(
            f"with_low_bit_state stores the fields {asked} of a rule's state, and counts by its step; the state "
            f"{type(state).__name__} has {listed(named) or 'no fields'}. Wrap the rule itself, inside of chain, partition, "
            "masters, averages and guards, and name its moments with fields=."
        )
