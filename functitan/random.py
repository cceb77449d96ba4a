"""Keys and samples, as in ``jax.random``: the same bits on every mesh and in recomputation.

A sample is a pure function of a key and the **global** index of its element: ``arange`` over the whole
tensor, one pointwise op for the bits (``functitan::threefry``), pointwise ops from there. A rank that holds a
shard computes the indices of its own elements, and finds the bits that one device would find.

Keys, ``bits``, ``uniform``, ``bernoulli``, ``normal``, ``truncated_normal``, ``gumbel`` and ``categorical``
follow JAX's algorithms (with ``jax_threefry_partitionable``, its default): for equal seeds, integers and unit
uniforms in float32 and float64 are equal bit for bit, the other numbers to rounding.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence

import torch

from functitan import _torch
from functitan.errors import ArgumentError
from functitan.ops.normal_quantile import normal_quantile
from functitan.ops.threefry import threefry

_WORD = 0xFFFFFFFF
# Bits behind the binary point of a uniform number: as many as JAX takes, so that no rounding can give 1.0.
_FRACTION_BITS = {torch.bfloat16: 7, torch.float16: 10, torch.float32: 23, torch.float64: 52}
# Large samples are computed in pieces when nothing traces: 60 passes over a piece stay in cache, and the
# float64 intermediates of a large parameter are never held whole.
_CHUNK = 1 << 17

Shape = Sequence[int]


def key(seed: int, *, device: torch.device | str | None = None) -> torch.Tensor:
    """A key from a seed: the root of all randomness of a program.

    Args:
        seed: any Python integer; its low 64 bits count.
        device: where the key, and with it every sample, lives.

    Returns:
        int64 of shape (2,), two 32-bit words.

    >>> key(42)
    tensor([ 0, 42])
    """
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise ArgumentError(
            f"random.key needs an integer seed; found {seed!r} of type {type(seed).__name__}. Write "
            'random.key(0), and random.fold_in(key, "name") to derive a key from a name or a step.'
        )
    return torch.tensor([(seed >> 32) & _WORD, seed & _WORD], dtype=torch.int64, device=device)


def split(key: torch.Tensor, n: int = 2) -> torch.Tensor:
    """Independent keys from one; the parent must not be used again.

    As in JAX, row ``i`` is ``fold_in(key, i)``: derive from one key by splitting or by folding, not by both.

    Args:
        key: int64 of shape (2,).
        n: how many.

    Returns:
        int64 of shape (n, 2); rows are keys.

    >>> first, second = split(key(42))
    >>> first
    tensor([1832780943,  270669613])
    """
    _check_key(key, "split")
    return _words(threefry(key, torch.arange(n, device=key.device)))


def fold_in(key: torch.Tensor, data: int | torch.Tensor | str) -> torch.Tensor:
    """A key derived from a key and a datum: a step number, a layer index, the path of a parameter.

    Args:
        key: int64 of shape (2,).
        data: an int or a 0-d integer tensor (its low 64 bits count), or a string, hashed by BLAKE2b so that
            the key is the same in every process and version.

    Returns:
        int64 of shape (2,).

    >>> fold_in(key(42), 7)
    tensor([2547012911, 1371500959])
    """
    _check_key(key, "fold_in")
    if isinstance(data, str):
        data = int.from_bytes(hashlib.blake2b(data.encode(), digest_size=8).digest(), "big")
    if isinstance(data, torch.Tensor):
        if data.ndim != 0 or data.dtype.is_floating_point or data.dtype.is_complex:
            raise ArgumentError(
                f"random.fold_in takes a 0-d integer tensor; found shape {tuple(data.shape)} and {data.dtype}"
                ". Fold the elements in one by one, or convert with .to(torch.int64)."
            )
        counter = data.to(torch.int64)
    elif isinstance(data, int):
        signed = ((data + (1 << 63)) & ((1 << 64) - 1)) - (1 << 63)
        counter = torch.full((), signed, dtype=torch.int64, device=key.device)
    else:
        raise ArgumentError(
            f"random.fold_in takes an int, a 0-d integer tensor or a string; found {type(data).__name__}. "
            "Fold structured data in piece by piece: fold_in(fold_in(key, a), b)."
        )
    return _words(threefry(key, counter))


def bits(key: torch.Tensor, shape: Shape = ()) -> torch.Tensor:
    """Uniform 32-bit integers.

    Args:
        key: int64 of shape (2,).
        shape: the global shape.

    Returns:
        int64 of that shape, values in [0, 2**32).

    >>> bits(key(42), (2, 3))[0]
    tensor([2098992034, 2919706841, 2646866425])
    """
    return _sample(key, shape, "bits", _bits32)


def uniform(
    key: torch.Tensor,
    shape: Shape = (),
    dtype: torch.dtype = torch.float32,
    minval: float = 0.0,
    maxval: float = 1.0,
) -> torch.Tensor:
    """Uniform numbers in [minval, maxval).

    The unit numbers are multiples of 2**-23 in float32 (2**-52, 2**-10, 2**-7 in float64, float16, bfloat16),
    so that 1.0 is never reached; a scaled number that rounds up to maxval is put just below it.

    Args:
        key: int64 of shape (2,).
        shape: the global shape.
        dtype: a floating dtype.
        minval, maxval: Python numbers, minval < maxval.

    >>> uniform(key(42), (2,))
    tensor([0.4887, 0.6798])
    """
    _check_dtype(dtype, "uniform")
    _check_range(minval, maxval, "uniform")
    unit = _sample(key, shape, "uniform", lambda words: _unit(words, dtype))
    if (minval, maxval) == (0.0, 1.0):
        return unit
    return (unit * (maxval - minval) + minval).clamp(minval, -_above(-maxval, dtype))


def normal(key: torch.Tensor, shape: Shape = (), dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Standard normal numbers: the normal quantile of a uniform number, computed in float64 and rounded once.

    Narrower dtypes are the float32 numbers rounded. Values are finite, at most 5.5 in size (8.3 in float64).

    Args:
        key: int64 of shape (2,).
        shape: the global shape.
        dtype: a floating dtype.

    >>> normal(key(42), (3,))
    tensor([-0.0283,  0.4671,  0.2957])
    """
    _check_dtype(dtype, "normal")
    wide, digits = _wide(dtype)

    def transform(words: torch.Tensor) -> torch.Tensor:
        # The uniform number on (-1, 1) is 2u - 1 plus half its step: never an end of the interval.
        q = _unit64(words, digits) + (2.0 ** -(digits + 2) - 0.5)
        return normal_quantile(q, 0.5 - q.abs(), 2.0 ** -(digits + 2)).to(wide)

    return _sample(key, shape, "normal", transform).to(dtype)


def truncated_normal(
    key: torch.Tensor,
    lower: float,
    upper: float,
    shape: Shape = (),
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Standard normal numbers given that they fall between two bounds: the quantile of a uniform number.

    The bounds are open: no number equals one. The standard deviation is below one (0.8796 between -2 and 2).

    Args:
        key: int64 of shape (2,).
        lower, upper: Python numbers, lower < upper; an infinity leaves that side open.
        shape: the global shape.
        dtype: a floating dtype.

    >>> truncated_normal(key(42), -1.0, 2.0, (3,))
    tensor([0.1477, 0.5684, 0.4210])
    """
    _check_dtype(dtype, "truncated_normal")
    _check_range(lower, upper, "truncated_normal")
    wide, digits = _wide(dtype)
    # Beyond zero, upper tail probabilities are used: one minus a small tail would lose its digits.
    mirrored = lower > 0
    ends = (lower, upper) if mirrored else (-lower, -upper)
    first, last = (0.5 * math.erfc(x / math.sqrt(2.0)) for x in ends)
    smallest = max(min(first, last, 1.0 - first, 1.0 - last), 5e-324)

    def transform(words: torch.Tensor) -> torch.Tensor:
        p = _unit64(words, digits) * (last - first) + first
        q = p - 0.5
        tail = torch.where(q < 0.0, p, 0.5 - q).clamp(smallest, 0.5)
        z = normal_quantile(q, tail, smallest)
        return (-z if mirrored else z).to(wide)

    drawn = _sample(key, shape, "truncated_normal", transform).to(dtype)
    return drawn.clamp(_above(lower, dtype), -_above(-upper, dtype))


def bernoulli(key: torch.Tensor, p: float | torch.Tensor = 0.5, shape: Shape | None = None) -> torch.Tensor:
    """True with probability ``p``.

    Args:
        key: int64 of shape (2,).
        p: a number, or a floating tensor that broadcasts to ``shape``.
        shape: the global shape; by default that of ``p``.

    Returns:
        bool of that shape.

    >>> bernoulli(key(42), 0.3, (7,))
    tensor([False, False, False, False, False, False,  True])
    """
    if shape is None:
        shape = tuple(p.shape) if isinstance(p, torch.Tensor) else ()
    return uniform(key, shape) < p


def gumbel(key: torch.Tensor, shape: Shape = (), dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Standard Gumbel numbers, ``-log(-log(u))``; finite.

    Args:
        key: int64 of shape (2,).
        shape: the global shape.
        dtype: a floating dtype; narrower ones are the float32 numbers rounded.

    >>> gumbel(key(42), (2,))
    tensor([0.3341, 0.9520])
    """
    _check_dtype(dtype, "gumbel")
    wide, _ = _wide(dtype)
    tiny = torch.finfo(wide).tiny

    def transform(words: torch.Tensor) -> torch.Tensor:
        return -torch.log(-torch.log(_unit(words, wide).clamp(min=tiny)))

    return _sample(key, shape, "gumbel", transform).to(dtype)


def categorical(key: torch.Tensor, logits: torch.Tensor, axis: int = -1, shape: Shape | None = None) -> torch.Tensor:
    """Indices drawn with probabilities ``softmax(logits, axis)``, as the argmax of logits plus Gumbel noise.

    Args:
        key: int64 of shape (2,).
        logits: a floating tensor; minus infinity is never drawn.
        axis: the dim that the classes run along.
        shape: the shape of the result: leading sample dims, then the shape of logits without ``axis``. By
            default there are no sample dims.

    Returns:
        int64 of that shape.

    >>> categorical(key(42), torch.zeros(4, 50))
    tensor([29, 38, 34,  5])
    """
    _check_dtype(logits.dtype, "categorical")
    scores = logits.movedim(axis, -1) if axis not in (-1, logits.ndim - 1) else logits
    batch = tuple(scores.shape[:-1])
    wanted = batch if shape is None else tuple(shape)
    if wanted[len(wanted) - len(batch) :] != batch or len(wanted) < len(batch):
        raise ArgumentError(
            f"random.categorical was asked for shape {wanted}, which must end with {batch}, the shape of "
            f"logits {tuple(logits.shape)} without dim {axis}. Put sample dims in front: shape=(n, *{batch})."
        )
    wide = torch.promote_types(logits.dtype, torch.float32)
    noise = gumbel(key, (*wanted, scores.shape[-1]), wide)
    return torch.argmax(scores.to(wide) + noise, dim=-1)


def randint(key: torch.Tensor, shape: Shape, minval: int, maxval: int) -> torch.Tensor:
    """Uniform integers in [minval, maxval); the samples are not those of JAX.

    Args:
        key: int64 of shape (2,).
        shape: the global shape.
        minval, maxval: Python integers, minval < maxval. The bias is below (maxval - minval) / 2**63.

    Returns:
        int64 of that shape.

    >>> bool((randint(key(0), (100,), 3, 5) >= 3).all())
    True
    """
    _check_range(minval, maxval, "randint")

    def transform(words: torch.Tensor) -> torch.Tensor:
        return (words & ((1 << 63) - 1)) % (maxval - minval) + minval

    return _sample(key, shape, "randint", transform)


def permutation(key: torch.Tensor, x: int | torch.Tensor, axis: int = 0) -> torch.Tensor:
    """A random order: of ``range(x)`` for an int, of the slices of a tensor along one dim; not JAX's order.

    Args:
        key: int64 of shape (2,).
        x: a size, or a tensor of any dtype.
        axis: the dim of ``x`` that is permuted; all slices move together.

    >>> permutation(key(0), 5).sort().values
    tensor([0, 1, 2, 3, 4])
    """
    size = x if isinstance(x, int) else x.shape[axis]
    # Stable, so that equal words (one pair in 2**64) cannot make the order depend on the sort.
    order = torch.sort(_sample(key, (size,), "permutation", lambda words: words), stable=True).indices
    return order if isinstance(x, int) else x.index_select(axis, order)


def _sample(
    key: torch.Tensor, shape: Shape, name: str, transform: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """``transform`` of the 64 random bits of every element of ``shape``; ``transform`` is pointwise."""
    _check_key(key, name)
    dims = _check_shape(shape, name)
    numel = math.prod(dims)
    if numel <= _CHUNK or _torch.dispatch_modes_active():
        index = torch.arange(numel, device=key.device).view(dims)
        return transform(threefry(key, index))
    starts = range(0, numel, _CHUNK)
    indices = (torch.arange(s, min(s + _CHUNK, numel), device=key.device) for s in starts)
    return torch.cat([transform(threefry(key, index)) for index in indices]).view(dims)


def _wide(dtype: torch.dtype) -> tuple[torch.dtype, int]:
    """The dtype that a sample is rounded to first, and its bits: narrow dtypes round float32."""
    return (torch.float64, 52) if dtype == torch.float64 else (torch.float32, 23)


def _high(words: torch.Tensor) -> torch.Tensor:
    # Not ``>>``, which torch traces as an op of its own that is not marked as pointwise.
    return torch.bitwise_right_shift(words, 32) & _WORD


def _bits32(words: torch.Tensor) -> torch.Tensor:
    return (words ^ _high(words)) & _WORD


def _words(words: torch.Tensor) -> torch.Tensor:
    return torch.stack([_high(words), words & _WORD], dim=-1)


def _unit(words: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Multiples of 2**-digits in [0, 1), exact in ``dtype``."""
    digits = _FRACTION_BITS[dtype]
    return _integer(words, digits).to(dtype) * 2.0**-digits


def _unit64(words: torch.Tensor, digits: int) -> torch.Tensor:
    """As :func:`_unit`, held in float64."""
    return _integer(words, digits).to(torch.float64) * 2.0**-digits


def _integer(words: torch.Tensor, digits: int) -> torch.Tensor:
    if digits > 32:
        return torch.bitwise_right_shift(words, 64 - digits) & ((1 << digits) - 1)
    return torch.bitwise_right_shift(_bits32(words), 32 - digits)


def _above(x: float, dtype: torch.dtype) -> float:
    """The number of ``dtype`` next above ``x``; in Python, so that nothing of it is traced."""
    info = torch.finfo(dtype)
    if x == 0.0 or math.isinf(x):
        return info.min if x < 0 else info.tiny
    mantissa, exponent = math.frexp(x)
    # Numbers lie twice as dense on the side of zero of a power of two.
    exponent -= mantissa == -0.5
    step = max(2.0 ** (exponent - _FRACTION_BITS[dtype] - 1), info.tiny * info.eps)
    return (math.floor(x / step) + 1) * step


def _check_key(key: torch.Tensor, name: str) -> None:
    if isinstance(key, torch.Tensor) and key.shape == (2,) and key.dtype == torch.int64:
        return
    found = f"{key.dtype} of shape {tuple(key.shape)}" if isinstance(key, torch.Tensor) else repr(key)
    raise ArgumentError(
        f"random.{name} needs a key, int64 of shape (2,), as its first argument; found {found}. Make one "
        "with random.key(seed), and take one row of the result of random.split."
    )


def _check_shape(shape: Shape, name: str) -> tuple[int, ...]:
    if isinstance(shape, (tuple, list)) and all(isinstance(n, int) and n >= 0 for n in shape):
        return tuple(shape)
    raise ArgumentError(
        f"random.{name} needs a shape, a tuple of sizes; found {shape!r}. Write "
        f"random.{name}(key, shape=(4, 8)); an int alone is not a shape, a tuple (4,) is."
    )


def _check_dtype(dtype: torch.dtype, name: str) -> None:
    if dtype not in _FRACTION_BITS:
        known = ", ".join(str(d) for d in _FRACTION_BITS)
        raise ArgumentError(f"random.{name} needs one of {known}; found {dtype}. Draw float32 and convert.")


def _check_range(low: float, high: float, name: str) -> None:
    if not low < high:
        raise ArgumentError(f"random.{name} needs a lower bound below the upper one; found {low} and {high}.")
