"""Random programs over the covered ops, for property tests: a pool of values grows by steps that read it.

A program is a list of steps. A step is a name, the places of its operands in the pool, and a function of them. Inputs
are made as steps ask for them: floats for operands, integers for indices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st

import functitan as ft
from tests.sharding.strategies import specs

SIZES = (1, 2, 3, 4, 6, 8)
MAX_ELEMENTS = 2048
Draw = Callable[[st.SearchStrategy[Any]], Any]


@dataclass
class Program:
    """Inputs first, then one value per step; ``run`` returns the values that no step reads."""

    inputs: list[torch.Tensor] = field(default_factory=list)
    steps: list[tuple[str, tuple[int, ...], Callable[..., torch.Tensor]]] = field(default_factory=list)
    shapes: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def run(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        pool = {-1 - i: x for i, x in enumerate(inputs)}
        used: set[int] = set()
        for number, (_, places, f) in enumerate(self.steps):
            pool[number] = f(*(pool[p] for p in places))
            used |= set(places)
        return [pool[n] for n in range(len(self.steps)) if n not in used]

    def __str__(self) -> str:
        rows = [f"in {-1 - i}: {x.dtype} {tuple(x.shape)}" for i, x in enumerate(self.inputs)]
        rows += [f"{n}: {name}{places} -> {self.shapes[n]}" for n, (name, places, _) in enumerate(self.steps)]
        return "\n".join(rows)


UNARY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "neg": torch.neg,
    "double": lambda x: x * 2,
    "shift": lambda x: x + 0.5,
    "relu": F.relu,
    "softplus": F.softplus,
    "clone_write": lambda x: x.clone().mul_(3).add_(x),
    "stop": lambda x: x * ft.stop_gradient(x),
    "region": lambda x: ft.region(lambda y: torch.tanh(y) * y)(x),
}


class Builder:
    """Draws steps."""

    def __init__(self, draw: Draw, mesh: ft.Mesh) -> None:
        self.draw = draw
        self.mesh = mesh
        self.program = Program()
        self.generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))

    def pick(self, options: Sequence[Any]) -> Any:
        return self.draw(st.sampled_from(list(options)))

    def input(self, shape: Sequence[int]) -> int:
        x = torch.randn(tuple(shape), generator=self.generator, dtype=torch.float64)
        return self._add_input(x)

    def indices(self, high: int, shape: Sequence[int]) -> int:
        return self._add_input(torch.randint(0, high, tuple(shape), generator=self.generator))

    def _add_input(self, x: torch.Tensor) -> int:
        self.program.inputs.append(x)
        place = -len(self.program.inputs)
        self.program.shapes[place] = tuple(x.shape)
        return place

    def value(self) -> tuple[int, tuple[int, ...]]:
        """An operand: mostly the newest value."""
        floats = [p for p in self.program.shapes if p >= 0 or self.program.inputs[-1 - p].is_floating_point()]
        newest = max(floats)
        place = self.pick([newest, newest, *floats])
        return place, self.program.shapes[place]

    def step(self, name: str, places: Sequence[int], f: Callable[..., torch.Tensor]) -> bool:
        """Add a step, unless its result would be too large."""
        zeros = [torch.zeros(self.program.shapes[p], dtype=self._dtype(p)) for p in places]
        shape = tuple(f(*zeros).shape)
        if torch.Size(shape).numel() > MAX_ELEMENTS:
            return False
        self.program.steps.append((name, tuple(places), f))
        self.program.shapes[len(self.program.steps) - 1] = shape
        return True

    def _dtype(self, place: int) -> torch.dtype:
        return torch.float64 if place >= 0 else self.program.inputs[-1 - place].dtype

    # --- kinds of steps ----------------------------------------------------------------------------------------

    def unary(self) -> None:
        x, _ = self.value()
        name = self.pick(sorted(UNARY))
        self.step(name, [x], UNARY[name])

    def binary(self) -> None:
        x, shape = self.value()
        same = [p for p, s in self.program.shapes.items() if s == shape and self._dtype(p).is_floating_point]
        if len(same) > 1 and self.draw(st.booleans()):
            y = self.pick(same)
        else:
            lead = self.draw(st.integers(0, len(shape)))
            y = self.input([n if self.draw(st.booleans()) else 1 for n in shape[lead:]])
        name, f = self.pick([("add", torch.add), ("mul", torch.mul), ("sub", torch.sub), ("maximum", torch.maximum)])
        self.step(name, [x, y], f)

    def where(self) -> None:
        x, shape = self.value()
        y = self.input(shape)
        self.step("where", [x, y], lambda a, b: torch.where(b > 0, a, b))

    def matmul(self) -> None:
        x, shape = self.value()
        if not shape:
            return self.unary()
        w = self.input([shape[-1], self.pick(SIZES)])
        self.step("matmul", [x, w], torch.matmul)
        return None

    def bmm(self) -> None:
        x, shape = self.value()
        if len(shape) != 3:
            return self.matmul()
        w = self.input([shape[0], shape[2], self.pick(SIZES)])
        self.step("bmm", [x, w], torch.bmm)
        return None

    def reduction(self) -> None:
        x, shape = self.value()
        if not shape:
            return self.unary()
        name = self.pick(["sum", "mean", "amax", "logsumexp", "var", "norm", "prod"])
        dim, keep = self.draw(st.integers(-len(shape), len(shape) - 1)), self.draw(st.booleans())
        if name == "var" and shape[dim] < 2:
            name = "mean"
        functions = {
            "norm": lambda a: torch.linalg.vector_norm(a, dim=dim, keepdim=keep),
            "prod": lambda a: torch.prod(a, dim, keepdim=keep),
        }
        f = functions.get(name, lambda a: getattr(torch, name)(a, dim, keepdim=keep))
        self.step(f"{name}[{dim}]", [x], f)
        return None

    def along(self) -> None:
        x, shape = self.value()
        if not shape:
            return self.unary()
        dim = self.draw(st.integers(-len(shape), len(shape) - 1))
        names = ["softmax", "log_softmax", "cumsum", "flip", "roll", "sort", "normalize"]
        name = self.pick(names)
        functions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
            "softmax": lambda a: a.softmax(dim),
            "log_softmax": lambda a: a.log_softmax(dim),
            "cumsum": lambda a: a.cumsum(dim),
            "flip": lambda a: a.flip(dim),
            "roll": lambda a: a.roll(1, dim),
            "sort": lambda a: a.sort(dim)[0],
            "normalize": lambda a: F.normalize(a, dim=dim),
        }
        self.step(f"{name}[{dim}]", [x], functions[name])
        return None

    def norm(self) -> None:
        x, shape = self.value()
        if not shape or shape[-1] < 2:
            return self.unary()
        w = self.input([shape[-1]])
        if self.draw(st.booleans()):
            self.step("layer_norm", [x, w], lambda a, b: F.layer_norm(a, (shape[-1],), b))
        else:
            self.step("rms_norm", [x, w], lambda a, b: F.rms_norm(a, (shape[-1],), b, 1e-5))
        return None

    def view(self) -> None:
        x, shape = self.value()
        if not shape:
            return self.unary()
        d = self.draw(st.integers(0, len(shape) - 1))
        kind = self.pick(["join", "split", "flatten", "transpose", "unsqueeze", "expand"])
        if kind == "join" and d + 1 < len(shape):
            new = (*shape[:d], shape[d] * shape[d + 1], *shape[d + 2 :])
        elif kind == "split" and shape[d] > 1:
            part = self.pick([n for n in range(1, shape[d] + 1) if shape[d] % n == 0])
            new = (*shape[:d], part, shape[d] // part, *shape[d + 1 :])
        elif kind == "flatten":
            new = (-1,)
        elif kind == "unsqueeze":
            new = (*shape[:d], 1, *shape[d:])
        elif kind == "expand":
            wide = (2, *shape)
            self.step("expand", [x], lambda a: a.expand(wide))
            return None
        else:
            e = self.draw(st.integers(0, len(shape) - 1))
            self.step(f"transpose[{d},{e}]", [x], lambda a: a.transpose(d, e))
            return None
        self.step(f"reshape{new}", [x], lambda a: a.reshape(new))
        return None

    def cut(self) -> None:
        x, shape = self.value()
        if not shape:
            return self.unary()
        d = self.draw(st.integers(0, len(shape) - 1))
        n = shape[d]
        kind = self.pick(["slice", "select", "pad", "cat", "stack", "chunk", "repeat", "set"])
        start = self.draw(st.integers(0, n - 1))
        functions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
            "slice": lambda a: a.narrow(d, start, n - start),
            "select": lambda a: a.select(d, start),
            "pad": lambda a: F.pad(a, [0, 0] * (a.ndim - 1 - d) + [1, 2]),
            "cat": lambda a: torch.cat([a, a * 2], d),
            "stack": lambda a: torch.stack([a, a * 2], d),
            "chunk": lambda a: a.chunk(2, d)[0],
            "repeat": lambda a: a.repeat_interleave(2, d),
            "set": lambda a: _set(a, d, start),
        }
        self.step(f"{kind}[{d},{start}]", [x], functions[kind])
        return None

    def lookup(self) -> None:
        x, shape = self.value()
        if not shape:
            return self.unary()
        d = self.draw(st.integers(0, len(shape) - 1))
        kind = self.pick(["index_select", "gather", "rows", "embedding", "scatter_add", "index_add"])
        if kind == "embedding" and len(shape) != 2:
            kind = "rows"
        if kind in ("index_select", "rows", "embedding"):
            d = d if kind == "index_select" else 0
            i = self.indices(shape[d], [self.pick(SIZES)] if kind == "index_select" else [2, self.pick(SIZES)])
            functions: dict[str, Any] = {
                "index_select": lambda a, j: a.index_select(d, j),
                "rows": lambda a, j: a[j],
                "embedding": lambda a, j: F.embedding(j, a),
            }
            self.step(f"{kind}[{d}]", [x, i], functions[kind])
        elif kind == "index_add":
            i = self.indices(4, [shape[d]])
            self.step(f"index_add[{d}]", [x, i], lambda a, j: _zeros(a, d, 4).index_add(d, j, a))
        else:
            short = (*shape[:d], self.pick(SIZES), *shape[d + 1 :])
            if kind == "gather":
                i = self.indices(shape[d], short)
                self.step(f"gather[{d}]", [x, i], lambda a, j: a.gather(d, j))
            else:
                i = self.indices(4, shape)
                self.step(f"scatter_add[{d}]", [x, i], lambda a, j: _zeros(a, d, 4).scatter_add(d, j, a))
        return None

    def constrain(self) -> None:
        x, shape = self.value()
        spec = self.draw(specs(shape, self.mesh))
        self.step(f"constrain{spec}", [x], lambda a: ft.constrain(a, spec))


def _zeros(x: torch.Tensor, dim: int, n: int) -> torch.Tensor:
    return x.new_zeros((*x.shape[:dim], n, *x.shape[dim + 1 :]))


def _set(x: torch.Tensor, dim: int, at: int) -> torch.Tensor:
    y = x * 2
    y.select(dim, at).fill_(0.5)
    return y


KINDS = (
    "unary", "binary", "where", "matmul", "bmm", "reduction", "along", "norm", "view", "view", "cut", "lookup",
    "constrain", "constrain",
)  # fmt: skip


@st.composite
def programs(draw: Draw, mesh: ft.Mesh, steps: int = 7) -> Program:
    builder = Builder(draw, mesh)
    builder.input([draw(st.sampled_from(SIZES)) for _ in range(draw(st.integers(1, 3)))])
    for _ in range(draw(st.integers(1, steps))):
        getattr(builder, draw(st.sampled_from(KINDS)))()
    if not builder.program.steps:
        builder.unary()
    return builder.program
