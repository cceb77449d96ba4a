"""What draws from torch's global random state, and what to write instead.

A compiled function may not: the state is not an input, so neither a replay nor another mesh would see the
same numbers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from functitan.errors import TraceError

_UNIFORM = "ft.random.uniform(key, shape)"
_NORMAL = "ft.random.normal(key, shape)"
_RANDINT = "ft.random.randint(key, shape, low, high)"
_BERNOULLI = "ft.random.bernoulli(key, p, shape)"
_TRANSFORMED = "a function of ft.random.uniform(key, shape), such as the inverse of the distribution function"
_DROPOUT = "x * ft.random.bernoulli(key, 1 - p, x.shape) / (1 - p)"

#: Functions that always draw, by the name a user writes; "Tensor." are methods.
_DRAWS = {
    "torch.rand": _UNIFORM,
    "torch.rand_like": _UNIFORM,
    "torch.randn": _NORMAL,
    "torch.randn_like": _NORMAL,
    "torch.normal": _NORMAL,
    "torch.randint": _RANDINT,
    "torch.randint_like": _RANDINT,
    "torch.randperm": "ft.random.permutation(key, n)",
    "torch.bernoulli": _BERNOULLI,
    "torch.multinomial": "ft.random.categorical(key, logits)",
    "torch.poisson": _TRANSFORMED,
    "torch.binomial": _TRANSFORMED,
    "Tensor.uniform_": _UNIFORM,
    "Tensor.normal_": _NORMAL,
    "Tensor.random_": _RANDINT,
    "Tensor.bernoulli": _BERNOULLI,
    "Tensor.bernoulli_": _BERNOULLI,
    "Tensor.multinomial": "ft.random.categorical(key, logits)",
    "Tensor.exponential_": _TRANSFORMED,
    "Tensor.geometric_": _TRANSFORMED,
    "Tensor.log_normal_": "ft.random.normal(key, shape).exp()",
    "Tensor.cauchy_": _TRANSFORMED,
    "nn.init.uniform_": _UNIFORM,
    "nn.init.normal_": _NORMAL,
    "nn.init.kaiming_uniform_": _UNIFORM,
    "nn.functional.gumbel_softmax": "softmax((logits + ft.random.gumbel(key, logits.shape)) / tau, -1)",
    "nn.functional.fractional_max_pool2d_with_indices": "max_pool2d",
    "nn.functional.fractional_max_pool3d_with_indices": "max_pool3d",
}

#: Functions that draw when they train with a rate above zero.
_DRAWS_IN_TRAINING = {
    "nn.functional.dropout": _DROPOUT,
    "nn.functional.dropout1d": _DROPOUT,
    "nn.functional.dropout2d": _DROPOUT,
    "nn.functional.dropout3d": _DROPOUT,
    "nn.functional.alpha_dropout": _DROPOUT,
    "nn.functional.feature_alpha_dropout": _DROPOUT,
    "nn.functional.rrelu": "leaky_relu(x, slope) with a slope from ft.random.uniform(key, x.shape)",
    "torch.dropout": _DROPOUT,
    "torch.dropout_": _DROPOUT,
    "torch.feature_dropout": _DROPOUT,
    "torch.alpha_dropout": _DROPOUT,
    "torch.feature_alpha_dropout": _DROPOUT,
    "torch.rrelu": "leaky_relu(x, slope) with a slope from ft.random.uniform(key, x.shape)",
}


def _lookup(names: dict[str, str]) -> dict[Callable[..., Any], tuple[str, str]]:
    found: dict[Callable[..., Any], tuple[str, str]] = {}
    for name, instead in names.items():
        owner: Any = torch
        for part in name.removeprefix("torch.").split("."):
            owner = getattr(owner, part, None)
        if owner is not None:
            found[owner] = (name, instead)
    return found


_ALWAYS, _IN_TRAINING = _lookup(_DRAWS), _lookup(_DRAWS_IN_TRAINING)


def global_rng_error(name: str, instead: str = "a function of ft.random") -> TraceError:
    """The error for a draw inside a compiled function.

    >>> str(global_rng_error("torch.randn", "ft.random.normal(key, shape)"))[:57]
    'torch.randn uses the global RNG inside a compiled functio'
    """
    return TraceError(
        f"{name} uses the global RNG inside a compiled function, where every number must come from an "
        "argument. Pass a key (ft.random.key(seed), ft.random.split) into the function and write "
        f"{instead}."
    )


def refuse_global_rng(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise a TraceError when this call of a torch function would draw from the global random state."""
    if func in _ALWAYS:
        raise global_rng_error(*_ALWAYS[func])
    if func in _IN_TRAINING and _trains(func, args, kwargs):
        raise global_rng_error(*_IN_TRAINING[func])


def draws(op: Any) -> bool:
    """Whether a node of a graph draws from the global random state, by torch's own tag.

    It finds in a finished trace what the functions above do not cover: draws inside compiled parts of torch.

    >>> draws(torch.ops.aten.randn.default), draws(torch.ops.aten.mm.default)
    (True, False)
    """
    return torch.Tag.nondeterministic_seeded in getattr(op, "tags", ())


def _trains(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    try:
        bound = inspect.signature(func).bind(*args, **kwargs)
    except (TypeError, ValueError):
        # Builtins have no signature: (input, p, train), or (input, lower, upper, training) of rrelu.
        named = [v for k, v in kwargs.items() if k in ("train", "training")]
        flags = named or [a for a in args[1:] if isinstance(a, bool)]
        rates = [kwargs["p"]] if "p" in kwargs else [a for a in args[1:] if isinstance(a, float | int)]
        return bool(flags and flags[0]) and bool(rates and rates[0] > 0)
    bound.apply_defaults()
    rate = bound.arguments.get("p", bound.arguments.get("upper", 0.0))
    return bool(bound.arguments.get("training")) and rate > 0
