"""Derivatives of pure functions: ``grad``, ``value_and_grad``, ``vjp``, ``stop_gradient``.

They behave as JAX's, and are reverse mode over ``torch.autograd.grad``: the function runs on fresh leaves
that require a gradient, and results carry no autograd graph. Inside another derivative of this module they
keep the graph, so derivatives nest. They work the same on plain tensors, under ``make_fx``, and whatever the
ambient grad mode is.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from functitan import _torch, tree
from functitan.annotations import use_params
from functitan.errors import GradientError

# How many derivatives of this module are at work around the code that runs now.
_depth: contextvars.ContextVar[int] = contextvars.ContextVar("derivatives", default=0)

#: Takes flat inputs; returns differentiable outputs and whatever goes along with them.
_FlatFunction = Callable[[list[torch.Tensor]], tuple[list[torch.Tensor], Any]]
_Pullback = Callable[..., list[torch.Tensor]]


def value_and_grad(
    f: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    pending: str | tuple[str, ...] | None = None,
) -> Callable[..., Any]:
    """A function that returns the value of ``f`` and its gradient.

    Args:
        f: returns a 0-d floating tensor, or with ``has_aux`` a pair of it and a pytree. Keyword arguments are
            passed on and not differentiated.
        argnums: which positional arguments to differentiate; each is a pytree of floating tensors.
        has_aux: whether ``f`` returns ``(loss, aux)``.
        pending: mesh axes over which a compiled function leaves gradients as pending sums, to add several of
            them up before one reduction; otherwise a gradient is laid out as its parameter is stored.

    Returns:
        A function of the arguments of ``f`` that returns ``(value, gradient)``, or ``((value, aux),
        gradient)``. The gradient has the structure, shapes and dtypes of the argument (a tuple of them when
        ``argnums`` is a sequence), with zeros for leaves that the value does not depend on. None of it
        carries an autograd graph.

    Raises:
        GradientError: a leaf that is not a floating tensor (by path), an ``argnums`` out of range, a value
            that is not 0-d and floating.

    >>> loss = lambda params, x: (params["w"] * x).sum()
    >>> value_and_grad(loss)({"w": torch.tensor([1.0, 2.0])}, torch.tensor([3.0, 4.0]))
    (tensor(11.), {'w': tensor([3., 4.])})
    """
    single = isinstance(argnums, int)
    wanted = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    name = getattr(f, "__name__", type(f).__name__)

    @functools.wraps(f)
    def call(*args: Any, **kwargs: Any) -> Any:
        places = _places(wanted, len(args), name)
        chosen = tuple(args[i] for i in places)
        leaves, treedef = tree.flatten(chosen)
        _check_leaves(chosen, places, name)

        def flat(inputs: list[torch.Tensor]) -> tuple[list[torch.Tensor], Any]:
            given = list(args)
            for i, value in zip(places, tree.unflatten(treedef, inputs), strict=True):
                given[i] = use_params(value, pending)
            out = f(*given, **kwargs)
            loss, aux = _pair(out, name) if has_aux else (out, None)
            _check_loss(loss, name)
            return [loss], aux

        (loss,), aux, pull = _linearize(flat, leaves)
        # 1 with the loss's own dtype and device, as a node that traces.
        gradients = pull([torch.ones_like(loss)], again=False)
        trees = tree.unflatten(treedef, gradients)
        loss, aux = _settled((loss, aux))
        return ((loss, aux) if has_aux else loss), (trees[0] if single else trees)

    return call


def grad(
    f: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    pending: str | tuple[str, ...] | None = None,
) -> Callable[..., Any]:
    """As :func:`value_and_grad`, without the value: returns the gradient, or ``(gradient, aux)``.

    >>> grad(lambda x: x**3)(torch.tensor(2.0))
    tensor(12.)
    >>> grad(grad(lambda x: x**3))(torch.tensor(2.0))
    tensor(12.)
    """
    both = value_and_grad(f, argnums, has_aux, pending)

    @functools.wraps(f)
    def call(*args: Any, **kwargs: Any) -> Any:
        value, gradient = both(*args, **kwargs)
        return (gradient, value[1]) if has_aux else gradient

    return call


def vjp(
    f: Callable[..., Any],
    *primals: Any,
    has_aux: bool = False,
    pending: str | tuple[str, ...] | None = None,
) -> Any:
    """Run ``f`` and return its result and the function that pulls cotangents back.

    Args:
        f: returns a pytree of floating tensors, or with ``has_aux`` a pair of it and a pytree.
        primals: the arguments of ``f``; each is a pytree of floating tensors.
        has_aux: whether ``f`` returns ``(out, aux)``.
        pending: as for :func:`value_and_grad`.

    Returns:
        ``(out, pullback)``, or ``(out, pullback, aux)``. ``pullback`` takes cotangents with the structure,
        shapes and dtypes of ``out`` and returns a tuple with one gradient per primal; it may be called many
        times.

    Raises:
        GradientError: a leaf of the primals or of ``out`` that is not a floating tensor (by path), or a
            cotangent of another shape or dtype than its output.

    >>> out, pullback = vjp(lambda x, y: x * y, torch.tensor(2.0), torch.tensor(3.0))
    >>> out, pullback(torch.tensor(1.0))
    (tensor(6.), (tensor(3.), tensor(2.)))
    """
    name = getattr(f, "__name__", type(f).__name__)
    _check_leaves(primals, range(len(primals)), name)
    leaves, treedef = tree.flatten(primals)

    def flat(inputs: list[torch.Tensor]) -> tuple[list[torch.Tensor], Any]:
        out = f(*use_params(tree.unflatten(treedef, inputs), pending))
        out, aux = _pair(out, name) if has_aux else (out, None)
        _check_outputs(out, name)
        outs, out_tree = tree.flatten(out)
        return outs, (out_tree, aux)

    outs, (out_tree, aux), pull = _linearize(flat, leaves)
    out = _settled(tree.unflatten(out_tree, outs))

    def pullback(cotangents: Any) -> tuple[Any, ...]:
        tree.check_same_structure(cotangents, out, ("the cotangents", "the output"))
        _check_cotangents(cotangents, out, name)
        return tree.unflatten(treedef, pull(tree.leaves(cotangents)))

    return (out, pullback, _settled(aux)) if has_aux else (out, pullback)


def stop_gradient(value: Any) -> Any:
    """The same values, constant for differentiation; ``value`` is a pytree.

    >>> grad(lambda x: x * stop_gradient(x))(torch.tensor(3.0))
    tensor(3.)
    """
    return tree.map(lambda v: v.detach() if isinstance(v, torch.Tensor) else v, value)


def differentiating_twice() -> bool:
    """Whether a derivative of a derivative is being taken around the code that runs now."""
    return _depth.get() > 1


def _linearize(f: _FlatFunction, leaves: list[torch.Tensor]) -> tuple[list[torch.Tensor], Any, _Pullback]:
    """Run ``f`` on leaves; return its outputs, what goes along, and the pullback of cotangents."""
    if _torch.inside_functorch():
        # Inside vmap, torch refuses autograd.grad on batched values; its own transform does the same work
        # there.
        def run(*inputs: torch.Tensor) -> Any:
            with _deeper():
                outs, extra = f(list(inputs))
            kept.append(extra)
            return outs

        kept: list[Any] = []
        outs, vjp_fn = torch.func.vjp(run, *leaves)[:2]
        return list(outs), kept[0], lambda cotangents, again=True: list(vjp_fn(list(cotangents)))

    # A leaf of an outer derivative keeps its history; a view, so that only uses in here count.
    nested = _nested()
    with torch.enable_grad():
        inputs = [x.view_as(x) if nested and x.requires_grad else x.detach().requires_grad_() for x in leaves]
        with _deeper():
            outs, extra = f(inputs)

    def pull(cotangents: Sequence[torch.Tensor], again: bool = True) -> list[torch.Tensor]:
        # What forward saved is freed on the way unless a second pull needs it.
        further = _nested()
        reached = [i for i, out in enumerate(outs) if out.requires_grad]
        found: Sequence[torch.Tensor | None] = [None] * len(inputs)
        if reached and inputs:
            found = torch.autograd.grad(
                [outs[i] for i in reached],
                inputs,
                [cotangents[i] for i in reached],
                retain_graph=again or further,
                create_graph=further,
                allow_unused=True,
            )
        return [
            torch.zeros_like(x, requires_grad=False) if g is None else g for g, x in zip(found, leaves, strict=True)
        ]

    return outs, extra, pull


def _nested() -> bool:
    """Whether results must stay differentiable: an outer derivative is at work, and not paused by no_grad."""
    return _depth.get() > 0 and torch.is_grad_enabled()


@contextlib.contextmanager
def _deeper() -> Iterator[None]:
    token = _depth.set(_depth.get() + 1)
    try:
        yield
    finally:
        _depth.reset(token)


def _settled(value: Any) -> Any:
    """Cut results from the graph, unless an outer derivative needs it."""
    return value if _nested() or _torch.inside_functorch() else stop_gradient(value)


def _places(wanted: tuple[int, ...], n_args: int, name: str) -> tuple[int, ...]:
    wrong = [i for i in wanted if not -n_args <= i < n_args]
    if wrong:
        raise GradientError(
            f"the gradient of {name} was asked for positional argument {wrong[0]}, and the call has {n_args} "
            f"positional arguments. Pass that argument by position, or choose argnums below {n_args}."
        )
    return tuple(i % n_args for i in wanted)


def _check_leaves(chosen: Sequence[Any], places: Sequence[int], name: str) -> None:
    for place, value in zip(places, chosen, strict=True):
        for path, leaf in tree.flatten_with_paths(value)[0]:
            if isinstance(leaf, torch.Tensor) and leaf.dtype.is_floating_point:
                continue
            where = f"argument {place}" + (f", leaf {path}" if path else "")
            raise GradientError(
                f"the gradient of {name} was asked for {where}, which is {_kind(leaf)}; only floating "
                "tensors have gradients. Pass it as another argument that is not differentiated (argnums "
                "chooses), close over it, or convert it with torch.as_tensor(x, dtype=torch.float32)."
            )


def _check_loss(loss: Any, name: str) -> None:
    if isinstance(loss, torch.Tensor) and loss.ndim == 0 and loss.dtype.is_floating_point:
        return
    if isinstance(loss, (tuple, list)):
        raise GradientError(
            f"{name} returned a {type(loss).__name__} of {len(loss)}; a function that is differentiated "
            "returns one 0-d floating tensor. Write has_aux=True if it returns the pair (loss, aux)."
        )
    raise GradientError(
        f"{name} returned {_kind(loss)}; a function that is differentiated returns one 0-d floating tensor: "
        "a sum over all elements divided by their count: x.sum() / count. For other outputs use ft.vjp."
    )


def _check_outputs(out: Any, name: str) -> None:
    for path, leaf in tree.flatten_with_paths(out)[0]:
        if not (isinstance(leaf, torch.Tensor) and leaf.dtype.is_floating_point):
            where = f"leaf {path} of the output" if path else "the output"
            raise GradientError(
                f"vjp of {name}: {where} is {_kind(leaf)}; outputs that are pulled back are floating "
                "tensors. Return the rest in a second value with has_aux=True."
            )


def _check_cotangents(cotangents: Any, out: Any, name: str) -> None:
    pairs = zip(tree.flatten_with_paths(cotangents)[0], tree.leaves(out), strict=True)
    for (path, ct), y in pairs:
        if not isinstance(ct, torch.Tensor) or ct.shape != y.shape or ct.dtype != y.dtype:
            raise GradientError(
                f"vjp of {name}: cotangent {path or 'of the output'} is {_kind(ct)}, and its output is "
                f"{_kind(y)}; give each cotangent its output's shape and dtype, as torch.ones_like(out) has."
            )


def _pair(out: Any, name: str) -> tuple[Any, Any]:
    if isinstance(out, tuple) and len(out) == 2:
        return out
    found = f"a tuple of {len(out)}" if isinstance(out, tuple) else _kind(out)
    raise GradientError(
        f"{name} returned {found}; with has_aux=True it returns a pair (value, aux). Return one, or leave has_aux out."
    )


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"
    return f"{value!r} of type {type(value).__name__}" if isinstance(value, (int, float, str)) else type(value).__name__
