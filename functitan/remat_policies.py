"""What a region keeps for backward: rematerialisation policies, named as in JAX, and ``remat``.

A policy is a value. The lowering reads it when it splits the joint graph of a region into forward and
backward: what the policy does not keep is computed again in backward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from functitan.annotations import region
from functitan.errors import ArgumentError, suggest

_F = TypeVar("_F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Policy:
    """Which values of the forward pass are kept for backward.

    Attributes:
        name: the policy's name in JAX; what the lowering chooses by.
        names: for ``save_only_these_names``, the sorted names given to ``checkpoint_name``.
        budget: for ``memory_budget``, the fraction.
        nbytes: for ``memory_budget``, the bytes.
    """

    name: str
    names: tuple[str, ...] = ()
    budget: float | None = None
    nbytes: int | None = None

    def __str__(self) -> str:
        if self.name == "memory_budget":
            return f"memory_budget({self.budget if self.nbytes is None else f'nbytes={self.nbytes}'})"
        return f"{self.name}({', '.join(self.names)})" if self.names else self.name


#: Keep only the inputs; compute everything again in backward. Least memory.
nothing_saveable = Policy("nothing_saveable")
#: Keep whatever backward reads. Most memory, no second computation.
everything_saveable = Policy("everything_saveable")
#: Keep results of matrix products; compute the cheap rest again.
dots_saveable = Policy("dots_saveable")


def save_only_these_names(*names: str) -> Policy:
    """Keep the values named by ``checkpoint_name`` with one of these names, and the inputs.

    Raises:
        ArgumentError: no names, or a name that is not a string.

    >>> print(save_only_these_names("attn_out", "ffn_in"))
    save_only_these_names(attn_out, ffn_in)
    >>> save_only_these_names("b", "a") == save_only_these_names("a", "b", "a")
    True
    """
    wrong = [n for n in names if not isinstance(n, str)]
    if wrong or not names:
        found = f"{wrong[0]!r}" if wrong else "no names"
        raise ArgumentError(
            f"save_only_these_names takes one or more strings; found {found}. Name values in the model with "
            'ft.checkpoint_name(x, "attn_out") and list those names here, or use nothing_saveable.'
        )
    return Policy("save_only_these_names", tuple(sorted(set(names))))


def memory_budget(fraction: float | None = None, *, nbytes: int | None = None) -> Policy:
    """Keep what saves most work within a budget of memory; PyTorch's ``activation_memory_budget``.

    What is saved is a minimal cut of the lowered graph, by bytes and operations on one rank. A larger budget never
    saves less, nor repeats more. Collectives are not repeated, but for the gathers of parameters, unless the fraction
    is 0.

    Args:
        fraction: from 0, keep only the inputs and compute everything again, to 1, keep what is needed so that no
            matrix product and no reduction is computed again; what is cheap is.
        nbytes: instead of it, bytes that one call of the region (one step of a scan) may save on a rank. When even the
            least is more, the least is saved.

    Raises:
        ArgumentError: not one of the two, or one out of its range.

    >>> str(memory_budget(0.5)), str(memory_budget(nbytes=4096))
    ('memory_budget(0.5)', 'memory_budget(nbytes=4096)')
    """
    if (fraction is None) == (nbytes is None):
        raise ArgumentError(
            f"memory_budget takes a fraction or nbytes; found fraction={fraction!r}, nbytes={nbytes!r}. Write "
            "memory_budget(0.5) or memory_budget(nbytes=1 << 30)."
        )
    if fraction is not None and not (isinstance(fraction, int | float) and 0 <= fraction <= 1):
        raise ArgumentError(
            f"memory_budget takes a fraction from 0 to 1; found {fraction!r}. Write bytes as memory_budget(nbytes=...)."
        )
    if nbytes is not None and not (isinstance(nbytes, int) and nbytes >= 0):
        raise ArgumentError(f"memory_budget takes bytes as an integer from 0 on; found nbytes={nbytes!r}.")
    return Policy("memory_budget", budget=None if fraction is None else float(fraction), nbytes=nbytes)


def remat(f: _F, policy: Policy = nothing_saveable, *, name: str | None = None) -> _F:
    """Mark a function as a region with a policy: JAX's ``jax.checkpoint``.

    On plain tensors the result is ``f`` itself in effect: the same values and gradients, and PyTorch keeps
    what it always keeps. Under ``ft.compile``, what the policy does not keep is computed again in backward.
    Random numbers come from keys, so a dropout mask is the same in both computations.

    Args:
        f: a pure function of tensors and pytrees of tensors.
        policy: what forward keeps.
        name: shown in reports; by default the function's name.

    Raises:
        ArgumentError: ``policy`` is not a policy of this module.

    >>> import torch
    >>> remat(lambda x: x.sin(), dots_saveable)(torch.zeros(2))
    tensor([0., 0.])
    """
    check_policy(policy)
    return region(f, name=name, remat=policy)  # type: ignore[return-value]


def check_policy(policy: Any) -> None:
    """Raise an ArgumentError unless ``policy`` is a :class:`Policy`.

    >>> check_policy("dots_savable")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    functitan.errors.ArgumentError: a remat policy was expected; found 'dots_savable'. Did you mean ...
    """
    if isinstance(policy, Policy):
        return
    known = ["nothing_saveable", "everything_saveable", "dots_saveable", "save_only_these_names", "memory_budget"]
    near = suggest(policy if isinstance(policy, str) else getattr(policy, "__name__", ""), known)
    raise ArgumentError(
        f"a remat policy was expected; found {policy!r}.{near} Write nothing_saveable, everything_saveable, "
        "dots_saveable, save_only_these_names(...) or memory_budget(...) of functitan.remat_policies."
    )
