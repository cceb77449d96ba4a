"""Floating-point operations and memory traffic of lowered ops, from their local shapes."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from functitan.compiler.owned import Orthogonalize
from functitan.ops import attention, attention_logits, grouped_mm  # noqa: F401 (register their ops)
from functitan.ops.newton_schulz import newton_schulz_flops
from functitan.ops.orthogonalize import Spread, matrix_flops

aten = torch.ops.aten
_own = torch.ops.functitan

Shape = tuple[int, ...]


def _product(a: Shape, b: Shape) -> int:
    """``a @ b`` with any batch dims: a multiplication and an addition per term."""
    return 2 * math.prod(a) * b[-1]


def _attention(q: Shape, k: Shape, v: Shape, *, products_qk: int, products_v: int) -> int:
    """Products of queries with keys, and of probabilities with values; a mask does not make them fewer."""
    pairs = math.prod(q[:-1]) * k[-2]
    return 2 * pairs * (products_qk * q[-1] + products_v * v[-1])


def _convolution(x: Shape, w: Shape, out: Shape, transposed: bool) -> int:
    # Every output element (of a transposed one every input element) meets one filter.
    return 2 * math.prod(x if transposed else out) * math.prod(w[1:])


def _orthogonalized(xs: Sequence[fx.Node], steps: int, spread: str) -> int:
    shapes = [tuple(x.meta["val"].shape) for x in xs]
    pairs = zip(shapes, Spread.of(spread).blocks, strict=True)
    return sum(math.prod(s[:-2]) * matrix_flops(s[-2:], parts, steps) for s, parts in pairs)


_FORMULAS: dict[Any, Callable[..., int]] = {
    aten.mm.default: lambda out, a, b, *_: _product(a, b),
    aten.bmm.default: lambda out, a, b, *_: _product(a, b),
    aten.addmm.default: lambda out, c, a, b, *_: _product(a, b),
    aten.baddbmm.default: lambda out, c, a, b, *_: _product(a, b),
    aten.convolution.default: lambda out, x, w, bias, stride, padding, dilation, transposed, *_: _convolution(
        x, w, out, transposed
    ),
    # Rows times one group's matrix each: groups do not matter.
    _own.grouped_mm.default: lambda out, x, w, *_: 2 * math.prod(x) * w[-1],
    _own.grouped_mm_dw.default: lambda out, x, dy, *_: 2 * math.prod(x) * dy[-1],
    _own.newton_schulz.default: lambda out, x, abc, eps: newton_schulz_flops(x, len(abc) // 3),
    _own.orthogonalize.default: lambda out, xs, abc, eps, dtype, spread: _orthogonalized(xs, len(abc) // 3, spread),
    _own.attention.default: lambda out, q, k, v, *_: _attention(q, k, v, products_qk=1, products_v=1),
    _own.attention_max_logits.default: lambda out, q, k, *_: _attention(q, k, k, products_qk=1, products_v=0),
    # Logits again, gradients of q and k; gradients of probabilities and of v.
    _own.attention_backward.default: lambda out, grad, grad_lse, q, k, v, *_: _attention(
        q, k, v, products_qk=3, products_v=2
    ),
}


def flops(node: fx.Node) -> int:
    """Operations of matrix products in one call on one rank; pointwise work counts as memory traffic."""
    if isinstance(node.target, Orthogonalize):
        return node.target.flops
    formula = _FORMULAS.get(node.target)
    if formula is None:
        return 0

    def shape(a: Any) -> Any:
        return tuple(a.meta["val"].shape) if isinstance(a, fx.Node) else a

    val = node.meta["val"]
    first = val if isinstance(val, torch.Tensor) else val[0]
    return formula(tuple(first.shape), *(shape(a) for a in node.args))


def is_pointwise(node: fx.Node) -> bool:
    """Whether a compiler would fuse the call with its neighbours."""
    tags = getattr(node.target, "tags", ())
    return torch.Tag.pointwise in tags or node.target in (aten._to_copy.default, aten.clone.default)


def moved_bytes(graph: fx.Graph) -> dict[fx.Node, int]:
    """Bytes that each call of a graph reads from and writes to memory, with pointwise ops fused.

    A value between two pointwise ops stays in registers; views move nothing; a value that is read by several
    products is read each time. Rank coordinates and collectives are not counted.
    """
    moved: dict[fx.Node, int] = {}
    for node in graph.nodes:
        if node.op != "call_function" or node.target is operator.getitem or _is_view(node) or "body" in node.meta:
            continue
        if "collective" in node.meta or not isinstance(node.target, torch._ops.OpOverload):
            continue
        fused = is_pointwise(node)
        total = 0
        for used in set(node.all_input_nodes):
            source = _base(used)
            if not (fused and is_pointwise(source)):
                total += _bytes(used)
        if not (fused and node.users and all(is_pointwise(u) for u in node.users)):
            total += _bytes(node)
        moved[node] = total
    return moved


def _base(node: fx.Node) -> fx.Node:
    while node.op == "call_function" and _is_view(node):
        node = node.all_input_nodes[0]
    return node


def _is_view(node: fx.Node) -> bool:
    """Whether a call gives its operand's storage."""
    val = node.meta.get("val")
    if not isinstance(val, torch.Tensor):
        return False
    if node.target is torch.ops._c10d_functional.wait_tensor.default:
        return True
    own = val.untyped_storage()._cdata
    values = (n.meta.get("val") for n in node.all_input_nodes)
    return any(isinstance(v, torch.Tensor) and v.untyped_storage()._cdata == own for v in values)


def _bytes(node: fx.Node) -> int:
    val = node.meta.get("val")
    rows = val if isinstance(val, list | tuple) else [val]
    return sum(v.numel() * v.dtype.itemsize for v in rows if isinstance(v, torch.Tensor))
