"""What tests of the compiler share: meshes, rules, and one comparison of plain with compiled."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

import functitan as ft
from functitan import tree
from functitan.sharding.array import put
from functitan.sharding.logical import layout_of, param_layout

TOLERANCE = 1e-10
RULES = ft.Rules(
    batch=("data", "fsdp"),
    seq="tensor",
    whole_seq=None,
    embed=None,
    mlp="tensor",
    layers=None,
    storage={"embed": "fsdp"},
)
MESHES: list[dict[str, int]] = [{}, {"fsdp": 2}, {"fsdp": 2, "tensor": 2}]
on_meshes = pytest.mark.parametrize("axes", MESHES, ids=lambda a: "x".join(a) or "one")


def mesh_of(axes: Mapping[str, int]) -> ft.Mesh:
    """A simulated mesh that has all three axes, those not given of size 1."""
    return ft.make_mesh({"data": 1, "fsdp": 1, "tensor": 1, **axes}, simulate=True)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    """Fixed float64 numbers, no two alike."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def place(values: Any, names: Any, mesh: ft.Mesh, rules: ft.Rules = RULES) -> Any:
    """Lay a pytree out by logical names, one text per leaf: "embed mlp"; "_" is a whole dim, None a plain tensor.

    A leading "param" keeps the leaf in its storage spec.
    """
    leaves, treedef = tree.flatten(values)
    texts = [names] * len(leaves) if isinstance(names, str) or names is None else _texts(names)
    out = []
    for x, text in zip(leaves, texts, strict=True):
        if text is None:
            out.append(x)
            continue
        words = text.split()
        stored = words[:1] == ["param"]
        axes = [None if w == "_" else w for w in words[stored:]]
        if stored:
            layout = param_layout(x.shape, axes, rules, mesh, text)
        else:
            layout = layout_of(x.shape, rules.spec(axes, text), mesh, text)
        out.append(put(x, layout, mesh))
    return tree.unflatten(treedef, out)


def _texts(names: Any) -> list[str | None]:
    marked = tree.map(lambda n: n, names)
    return [None if n == "plain" else n for n in tree.leaves(marked)]


def whole(x: Any) -> torch.Tensor:
    """The global value of an Array or a tensor."""
    return x.full() if isinstance(x, ft.Array) else x


def assert_same(got: Any, expected: Any) -> None:
    """Every leaf equal to 1e-10 of its largest element, in shape and dtype too."""
    tree.check_same_structure(expected, got, ("expected", "found"))
    for path, a, b in zip(tree.paths(expected), tree.leaves(expected), tree.leaves(got), strict=True):
        b = whole(b)
        assert (a.shape, a.dtype) == (b.shape, b.dtype), path
        if not a.numel():
            continue
        error = (a.double() - b.double()).abs().max() / a.double().abs().max().clamp(min=1e-300)
        assert error <= TOLERANCE, f"{path}: {error:.1e}"


def agree(
    f: Callable[..., Any],
    args: Sequence[Any],
    names: Sequence[Any],
    axes: Mapping[str, int],
    rules: ft.Rules = RULES,
    **options: Any,
) -> tuple[ft.Program, Any]:
    """Run ``f`` plain and compiled on a mesh, and compare every result; returns the Program and the results."""
    mesh = mesh_of(axes)
    arrays = [place(a, n, mesh, rules) for a, n in zip(args, names, strict=True)]
    compiled = ft.compile(f, mesh=mesh, rules=rules, **options)
    got = compiled(*arrays)
    assert_same(got, f(*args))
    return compiled.lower(*arrays), got


def body_calls(program: ft.Program) -> list[str]:
    """The names of the bodies that the step's graph calls, in order."""
    return [str(n.args[0]) for n in program.graph.nodes if "body" in n.meta]


def text_of(error: BaseException) -> str:
    """A message with line numbers of tests as N, so that golden texts survive an edit above them."""
    return re.sub(r"\b(test_\w+\.py):\d+", r"\1:N", str(error))
