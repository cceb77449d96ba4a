"""Functions with a hand-written derivative: ``custom_vjp``, as ``jax.custom_vjp``."""

from __future__ import annotations

import contextvars
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from functitan import _torch, autodiff, tree
from functitan.annotations import active
from functitan.autodiff_rule import Rule
from functitan.errors import GradientError

_Function = Callable[..., Any]
# Whether a forward rule runs: it needs no derivative of its own, and often calls the function that it belongs
# to.
_in_forward: contextvars.ContextVar[bool] = contextvars.ContextVar("in_forward", default=False)


class custom_vjp:
    """A function whose derivative is given by two functions.

    ``fwd`` takes the arguments and returns ``(out, residuals)``; ``bwd`` takes the residuals and the
    cotangents of ``out``, and returns a tuple with one gradient per differentiated argument. Outputs,
    residuals and arguments are pytrees. A gradient may be None for "zero"; arguments without floating tensors
    take None.

    Args:
        f: the function, run as it is where no derivative is taken.
        nondiff_argnums: arguments that are not tensors or have no gradient. As in JAX, ``fwd`` gets them in
            place, ``bwd`` gets them first, and returns no gradient for them.

    A second derivative differentiates ``fwd`` and ``bwd``.

    >>> @custom_vjp
    ... def clipped(x, low):
    ...     return x.clamp(min=low)
    >>> def fwd(x, low):
    ...     return clipped(x, low), x >= low
    >>> def bwd(inside, g):
    ...     return torch.where(inside, g, 0.1 * g), None
    >>> clipped.defvjp(fwd, bwd)
    >>> autodiff.grad(lambda x: clipped(x, torch.tensor(0.0)).sum())(torch.tensor([-1.0, 2.0]))
    tensor([0.1000, 1.0000])
    """

    def __init__(self, f: _Function, nondiff_argnums: Sequence[int] = ()) -> None:
        functools.update_wrapper(self, f)
        self._name = getattr(f, "__name__", type(f).__name__)
        self._f = f
        self._nondiff = tuple(nondiff_argnums)
        self._fwd: _Function | None = None
        self._bwd: _Function | None = None

    def defvjp(self, fwd: _Function, bwd: _Function) -> None:
        """Give the two rules: ``fwd(*args) -> (out, residuals)`` and ``bwd(residuals, g) -> gradients``."""
        self._fwd, self._bwd = fwd, bwd

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function; with a derivative around it, run ``fwd`` and remember ``bwd``.

        Raises:
            GradientError: no rules were given, a rule returns something of another structure or shape than it
                must.
        """
        if self._fwd is None or self._bwd is None:
            raise GradientError(
                f"custom_vjp function {self._name} was called before its rules were given. Write "
                f"{self._name}.defvjp(fwd, bwd) below its definition."
            )
        args = self._positional(args, kwargs)
        leaves, treedef = tree.flatten(args)
        if _in_forward.get() or not _wants_derivative(leaves):
            return self._f(*args)
        if active() is not None:
            # In the body of a region, reading a captured tensor gives the body's own input, but
            # Function.apply is not a read; a view is.
            leaves = [leaf.view_as(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        further = autodiff.differentiating_twice() or _torch.inside_functorch()
        rule = Rule(self._name, self._fwd, self._bwd, self._nondiff, args, treedef, further)
        return rule.result(_Apply.apply(rule, *leaves))

    def _positional(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        # Rules speak of positions, so names and defaults are resolved first.
        try:
            bound = inspect.signature(self._f).bind(*args, **kwargs)
        except ValueError:  # a builtin without a signature
            return args
        bound.apply_defaults()
        if bound.kwargs:
            raise GradientError(
                f"custom_vjp function {self._name} has keyword-only parameters ({', '.join(bound.kwargs)}), "
                "which its rules cannot see. Make them positional, or close over them."
            )
        return bound.args


def _wants_derivative(leaves: Sequence[Any]) -> bool:
    floats = [v for v in leaves if isinstance(v, torch.Tensor) and v.dtype.is_floating_point]
    # torch.func hides from an inner level whether an outer one differentiates, so there the rule always runs.
    return torch.is_grad_enabled() and (
        any(v.requires_grad for v in floats) or (bool(floats) and _torch.inside_functorch())
    )


class _Apply(torch.autograd.Function):
    """The autograd node: runs the two functions of a :class:`Rule` on flat leaves."""

    generate_vmap_rule = True

    @staticmethod
    def forward(rule: Rule, *leaves: Any) -> Any:
        token = _in_forward.set(True)
        try:
            return rule.forward(leaves)
        finally:
            _in_forward.reset(token)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        rule, *leaves = inputs
        ctx.rule = rule
        ctx.mark_non_differentiable(*rule.not_differentiable(output))
        ctx.set_materialize_grads(False)
        ctx.slots, tensors = rule.saved(leaves, output)
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> Any:
        return (None, *ctx.rule.backward(ctx.slots, ctx.saved_tensors, cotangents))
