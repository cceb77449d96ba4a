"""Printing values from inside a function, compiled or not."""

from __future__ import annotations

import builtins
import string
from collections.abc import Sequence
from typing import Any

import torch

from functitan.errors import ArgumentError

_NAME = "functitan::debug_print"
torch.library.define(_NAME, "(Tensor[] values, str fmt) -> Tensor")
# What the lowering puts in its place on a mesh: every rank runs it, the one where ``here`` is true prints.
_WHERE = "functitan::debug_print_where"
torch.library.define(_WHERE, "(Tensor here, Tensor[] values, str fmt) -> Tensor")


def print(fmt: str, *args: Any, **kwargs: Any) -> None:
    """Print values when the function runs, as ``jax.debug.print`` does: ``print("loss {l:.3f}", l=loss)``.

    On plain tensors it prints at once. In a compiled function it becomes a node, and each run prints, once:
    the values must be whole on every rank (replicated), and the first rank prints.

    Args:
        fmt: a format string for ``str.format``.
        args, kwargs: its values. Tensors are printed when the function runs; everything else is formatted
            now. A format such as ``.3f`` is for 0-d tensors.

    Raises:
        ArgumentError: a field without a value, or a number's format for a tensor with dims.

    >>> print("loss {l:.2f} at step {}", 3, l=torch.tensor(1.25))
    loss 1.25 at step 3
    """
    if not isinstance(fmt, str):
        raise ArgumentError(
            f'debug.print takes a format string first; found {type(fmt).__name__}. Write debug.print("x = {{}}", x).'
        )
    text, values = _split_fields(fmt, args, kwargs)
    torch.ops.functitan.debug_print.default(values, text)


def _kernel(values: Sequence[torch.Tensor], fmt: str) -> torch.Tensor:
    builtins.print(fmt.format(*values))
    return _token()


torch.library.impl(_NAME, "CompositeExplicitAutograd", _kernel)


@torch.library.register_fake(_NAME)
def _fake(values: Sequence[torch.Tensor], fmt: str) -> torch.Tensor:
    return _token()


@torch.library.impl(_WHERE, "CompositeExplicitAutograd")
def _kernel_where(here: torch.Tensor, values: Sequence[torch.Tensor], fmt: str) -> torch.Tensor:
    return _kernel(values, fmt) if bool(here) else _token()


@torch.library.register_fake(_WHERE)
def _fake_where(here: torch.Tensor, values: Sequence[torch.Tensor], fmt: str) -> torch.Tensor:
    return _token()


def _vmap(info, in_dims, values, fmt):  # type: ignore[no-untyped-def]
    # One line per element of the batch, as if the function ran in a loop.
    for i in range(info.batch_size):
        rows = [v if d is None else v.select(d, i) for v, d in zip(values, in_dims[0], strict=True)]
        torch.ops.functitan.debug_print.default(rows, fmt)
    return _token(), None


torch.library.register_vmap(_NAME, _vmap)


def _token() -> torch.Tensor:
    # An op returns something; the node is kept for its effect.
    return torch.empty(0, dtype=torch.int8)


def _split_fields(fmt: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, list[torch.Tensor]]:
    """A format string over tensors alone, in order of use, and those tensors."""
    formatter = string.Formatter()
    pieces: list[str] = []
    values: list[torch.Tensor] = []
    automatic = 0
    try:
        for literal, field, spec, conversion in formatter.parse(fmt):
            pieces.append(_escape(literal))
            if field is None:
                continue
            if field == "" or field[0] in ".[":
                field, automatic = f"{automatic}{field}", automatic + 1
            value, _ = formatter.get_field(field, args, kwargs)
            if isinstance(value, torch.Tensor):
                _check_spec(field, value, spec)
                ending = (f"!{conversion}" if conversion else "") + (f":{spec}" if spec else "")
                pieces.append(f"{{{len(values)}{ending}}}")
                values.append(value.detach())
            else:
                pieces.append(_escape(formatter.format_field(formatter.convert_field(value, conversion), spec or "")))
    except (IndexError, KeyError, AttributeError) as e:
        given = [*(f"{{{i}}}" for i in range(len(args))), *(f"{{{k}}}" for k in kwargs)]
        raise ArgumentError(
            f"debug.print: {fmt!r} has a field without a value ({type(e).__name__}: {e}); given are "
            f"{', '.join(given) or 'none'}. Pass one value per field, or write {{{{ and }}}} for braces."
        ) from None
    return "".join(pieces), values


def _escape(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


def _check_spec(field: str, value: torch.Tensor, spec: str | None) -> None:
    if spec and value.ndim:
        raise ArgumentError(
            f"debug.print: the format {spec!r} of field {field} is for one number, and the value has shape "
            f"{tuple(value.shape)}. Print it without a format, or print a reduction such as x.norm()."
        )
