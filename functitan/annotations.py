"""What model code imports: parameter declarations and the annotations of the compiler.

Each annotation is an identity (or a plain Python loop) on plain tensors. While ``ft.compile`` traces a function, an
object with the methods of :class:`Annotator` is active, and the annotations are handed to it.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from functitan import tree
from functitan.errors import ShardingError, TreeError

#: A logical spec: one logical axis name, or None, per tensor dim.
LogicalAxes = tuple[str | None, ...]


@dataclass(frozen=True)
class Param:
    """The declaration of one parameter: global shape, logical axes, and how it is filled.

    Weights are (in, out): ``x @ w``. Dims before the fan dims are batch dims (layers, experts): they count many
    weights, not one larger one.

    Attributes:
        shape: the global shape.
        axes: a logical axis name or None per dim.
        fan_in: the dim, or dims, that an input vector runs along. None for norms and other vectors.
        fan_out: the dim, or dims, of the output.
        init: a function ``(key, shape, dtype) -> tensor``; see ``functitan.nn.init``. None is the default of
            ``ft.init``: a truncated normal of standard deviation 0.02.
        dtype: the dtype in storage.
        pad: per dim how many of its last entries are padding: zeros that make the size one that mesh axes divide.
            They are no part of the model, which must not let them reach its loss: then their gradient is zero, so
            they stay zero and add nothing to a norm. A saved file does not have them. None for no padding.
    """

    shape: tuple[int, ...]
    axes: LogicalAxes
    fan_in: int | tuple[int, ...] | None = None
    fan_out: int | tuple[int, ...] | None = None
    init: Callable[..., torch.Tensor] | None = None
    dtype: torch.dtype = torch.float32
    pad: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.axes):
            raise ShardingError(
                f"Param has {len(self.shape)} dims {tuple(self.shape)} but {len(self.axes)} logical axes "
                f"{tuple(self.axes)}; give one name, or None, per dim."
            )
        if self.pad is not None and (
            len(self.pad) != len(self.shape) or any(not 0 <= p < n for p, n in zip(self.pad, self.shape, strict=True))
        ):
            raise ShardingError(
                f"Param of shape {tuple(self.shape)} has pad={self.pad!r}; give one count per dim, 0 for none, each "
                "below "
                "the size, which includes it."
            )

    @property
    def real_shape(self) -> tuple[int, ...]:
        """The shape without padding."""
        return tuple(n - p for n, p in zip(self.shape, self.pad or (0,) * len(self.shape), strict=True))


class Annotator(Protocol):
    """What the tracer provides while it traces; see ``functitan.compiler.trace``."""

    def constrain(self, x: torch.Tensor, spec: Any, pending: Any, what: str = "") -> torch.Tensor: ...

    def constrain_like(self, x: torch.Tensor, like: torch.Tensor) -> torch.Tensor: ...

    def checkpoint_name(self, x: torch.Tensor, name: str) -> torch.Tensor: ...

    def region(self, f: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any: ...

    def scan(
        self, f: Callable[..., Any], init: Any, xs: Any, length: int, options: dict[str, Any]
    ) -> tuple[Any, Any]: ...

    def use_params(self, params: Any, pending: tuple[str, ...]) -> Any: ...

    def mark_gradients(self, gradients: Any, params: Any) -> Any: ...

    def local_map(self, local: Any, args: tuple[Any, ...]) -> Any: ...


_active: contextvars.ContextVar[Annotator | None] = contextvars.ContextVar("annotator", default=None)


def active() -> Annotator | None:
    """The tracer that is at work, or None when plain PyTorch runs."""
    return _active.get()


@contextlib.contextmanager
def activate(annotator: Annotator | None) -> Iterator[None]:
    """Hand annotations to ``annotator`` inside the block (None: make them identities again)."""
    token = _active.set(annotator)
    try:
        yield
    finally:
        _active.reset(token)


def constrain(
    x: torch.Tensor, spec: Any, pending: str | tuple[str, ...] | None = None, *, what: str = ""
) -> torch.Tensor:
    """State that from here on ``x`` has this spec; an identity on plain tensors.

    Args:
        x: a tensor of any shape and dtype.
        spec: a tuple with one logical axis name or None per dim, or a PartitionSpec of mesh axes.
        pending: mesh axes over which the value may stay a pending sum; otherwise it is settled here.
        what: how errors name the value; by default by its type and the line.

    Returns:
        A tensor of the same shape and dtype. Its gradient takes the operand's dual layout.

    >>> constrain(torch.ones(2, 3), ("batch", "embed")).shape
    torch.Size([2, 3])
    """
    annotator = _active.get()
    return x if annotator is None else annotator.constrain(x, spec, pending, what)


def constrain_like(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """State that ``x`` lies as ``like`` does, without pending sums; an identity on plain tensors.

    It is for what was moved and goes back, such as an update to where its parameter is stored, in code that does not
    know the layout.

    Args:
        x: a tensor of any dtype.
        like: a tensor of the same shape; where a dim of ``x`` has size 1, that of ``like`` may have any, such as one
            that a mean over it left.

    Raises:
        ShardingError: other shapes.

    >>> constrain_like(torch.ones(2), torch.zeros(2)), constrain_like(torch.ones(1, 2), torch.zeros(3, 2))
    (tensor([1., 1.]), tensor([[1., 1.]]))
    """
    if x.ndim != like.ndim or any(n not in (1, m) for n, m in zip(x.shape, like.shape, strict=True)):
        raise ShardingError(
            f"constrain_like was given values of shapes {tuple(x.shape)} and {tuple(like.shape)}; a layout is shared by "
            "values of one shape, up to dims of size 1 in the first. Write ft.constrain(x, spec) for another."
        )
    annotator = _active.get()
    return x if annotator is None else annotator.constrain_like(x, like)


def checkpoint_name(x: torch.Tensor, name: str) -> torch.Tensor:
    """Name a value for the remat policy ``save_only_these_names``; an identity otherwise."""
    annotator = _active.get()
    return x if annotator is None else annotator.checkpoint_name(x, name)


def region(f: Callable[..., Any], *, name: str | None = None, remat: Any = None) -> Callable[..., Any]:
    """Mark a function as a region: traced, lowered and compiled once per signature, called many times.

    Args:
        f: a pure function of tensors and pytrees of tensors. Tensors that it closes over become inputs.
        name: shown in reports; by default the function's name.
        remat: what the forward pass saves for backward, a policy of ``ft.remat_policies``.
    """

    def call(*args: Any) -> Any:
        annotator = _active.get()
        if annotator is None:
            return f(*args)
        return annotator.region(f, args, {"name": name or getattr(f, "__name__", "region"), "remat": remat})

    return call


def scan(
    f: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any,
    length: int | None = None,
    *,
    name: str | None = None,
    remat: Any = None,
) -> tuple[Any, Any]:
    """Run ``f`` over the leading dim of ``xs``, carrying a state: JAX's ``lax.scan``.

    Args:
        f: ``(carry, x) -> (carry, y)``; the carry keeps its structure, shapes and dtypes. ``y`` may be None.
        init: the first carry.
        xs: a pytree whose leaves have one leading dim of equal size, or None with ``length``.
        length: the number of steps, when ``xs`` has no leaves.
        name, remat: as for :func:`region`; the body is one region.

    Returns:
        The last carry, and the ``y`` of all steps stacked on a new leading dim.

    >>> scan(lambda c, x: (c + x, c * x), torch.tensor(0), torch.arange(4))
    (tensor(6), tensor([0, 0, 2, 9]))
    """
    steps = _scan_length(xs, length)
    annotator = _active.get()
    if annotator is not None:
        options = {"name": name or getattr(f, "__name__", "scan"), "remat": remat}
        return annotator.scan(f, init, xs, steps, options)
    carry, ys = init, []
    leaves, treedef = tree.flatten(xs)
    # unbind, not leaf[i]: the gradient of all rows is one stack, where each index would fill a whole zero tensor.
    columns = [leaf.unbind(0) for leaf in leaves]
    for i in range(steps):
        carry, y = f(carry, tree.unflatten(treedef, [rows[i] for rows in columns]))
        ys.append(y)
    return carry, (tree.map(lambda *rows: torch.stack(rows), *ys) if ys else None)


def _scan_length(xs: Any, length: int | None) -> int:
    sizes = {path: leaf.shape[0] if leaf.ndim else None for path, leaf in tree.flatten_with_paths(xs)[0]}
    found = set(sizes.values()) | ({length} if length is not None else set())
    if len(found) != 1 or None in found:
        rows = ", ".join(f"{p or 'xs'}: {n if n is not None else 'a scalar'}" for p, n in sizes.items())
        raise TreeError(
            f"scan needs one leading size, from length={length} and the leaves of xs; found {rows or 'no leaves'}. "
            "Stack every leaf of xs on a leading dim of one size, or pass length= when xs has no leaves."
        )
    steps = int(found.pop())  # type: ignore[arg-type]
    if steps < 1:
        raise TreeError(f"scan over {steps} steps: the results of its body have no shape. Leave such a scan out.")
    return steps


def use_params(params: Any, pending: str | tuple[str, ...] | None = None) -> Any:
    """Mark parameters as used for compute: storage-sharded dims are gathered where a value is first read.

    ``ft.value_and_grad`` and ``ft.vjp`` do it for what they differentiate; a model does it at its start, so that it
    also runs without a derivative. Twice is once.

    Args:
        params: a pytree of tensors.
        pending: mesh axes over which gradients may stay pending sums; otherwise they take the parameters' layouts.
    """
    annotator = _active.get()
    axes = (pending,) if isinstance(pending, str) else tuple(pending or ())
    return params if annotator is None else annotator.use_params(params, axes)


def mark_gradients(gradients: Any, params: Any) -> Any:
    """Mark values as the gradients of parameters: pending sums are added up, and each lies as its parameter is stored.

    What ``ft.value_and_grad`` returns is marked; this is for sums of gradients that it left pending.

    Args:
        gradients: a pytree of tensors.
        params: the parameters, in the same structure and of the same shapes.
    """
    annotator = _active.get()
    return gradients if annotator is None else annotator.mark_gradients(gradients, params)
