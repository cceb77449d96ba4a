"""``ft.check``: one device against a mesh, in float64.

Three comparisons, each a relative difference max|a - b| / max|b| per leaf:

1. the function as it is, on plain tensors, against its traced graph on one device (outputs that do not come after a
   gradient, and the gradients), in the given dtype: a mistake in tracing cannot cancel;
2. the traced graph in float64 on one device against the mesh: outputs and gradients;
3. leaves that are computed from gradients (updated parameters, optimizer state), on the one-device gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from functitan import tree
from functitan.annotations import activate
from functitan.annotations import scan as plain_scan
from functitan.compiler.by_value import difference
from functitan.compiler.gradients import Exposed, expose
from functitan.compiler.lower import lower
from functitan.compiler.passes import DEFAULT_PASSES, Passes
from functitan.compiler.precision import to_float64
from functitan.compiler.program import Program
from functitan.compiler.trace import Traced, trace
from functitan.compiler.verify import Verification
from functitan.compiler.verify import verify as verify_layouts
from functitan.errors import ArgumentError
from functitan.runtime.lockstep import Lockstep
from functitan.runtime.on_globals import run_on_globals
from functitan.sharding.array import Array, assemble
from functitan.sharding.layout import Layout, replicated
from functitan.sharding.logical import Rules
from functitan.sharding.mesh import Mesh
from functitan.sharding.shard_map import LocalFunction
from functitan.sharding.shard_map import plain as plain_shard_map

#: Units in the last place, relative to the largest element, within which another order of rounding stays.
_PLAIN_ULPS = 2**10
_OFF = Passes.off()


@dataclass(frozen=True)
class Row:
    """One compared leaf.

    Attributes:
        kind: "plain", "output", "gradient" or "update".
        path: the leaf.
        error: max|a - b| / max|b|.
        tolerance: what it must not exceed.
    """

    kind: str
    path: str
    error: float
    tolerance: float

    @property
    def ok(self) -> bool:
        return self.error <= self.tolerance


@dataclass(frozen=True)
class CheckReport:
    """The result of :func:`check`; true when every leaf is within its tolerance.

    Attributes:
        name, mesh: what was checked, on which mesh.
        rows: every compared leaf.
        first: where the mesh first differs from one device, when it does.
        verification: the layouts' second opinion.
    """

    name: str
    mesh: Mesh
    rows: tuple[Row, ...]
    first: str
    verification: Verification | None = field(default=None)

    def __bool__(self) -> bool:
        return all(r.ok for r in self.rows)

    def worst(self, kind: str) -> Row | None:
        """The leaf of a kind that differs most."""
        rows = [r for r in self.rows if r.kind == kind]
        return max(rows, key=lambda r: (not r.ok, r.error, r.tolerance)) if rows else None

    def __str__(self) -> str:
        words = {
            "plain": "plain function against its trace",
            "output": "outputs on the mesh, float64",
            "gradient": "gradients on the mesh, float64",
            "update": "updates from given gradients, float64",
        }
        lines = [f"{self.name} on {self.mesh}: {'equal' if self else 'NOT equal'}"]
        for kind, text in words.items():
            worst = self.worst(kind)
            if worst is not None:
                n = sum(r.kind == kind for r in self.rows)
                lines.append(
                    f"  {text:<40} {n:>3} leaves, largest difference {worst.error:.1e} (allowed {worst.tolerance:.0e}) at "
                    f"{worst.path}"
                )
        if self.first:
            lines.append(f"  first difference: {self.first}")
        if self.verification is not None:
            lines.append(f"  {self.verification}")
        return "\n".join(lines)


def check(
    f: Callable[..., Any],
    args: Sequence[Any],
    mesh: Mesh,
    rules: Rules | None = None,
    *,
    tolerance: float = 1e-10,
    conflicts: str = "error",
    layouts: bool = True,
    passes: Passes = DEFAULT_PASSES,
    backend: str = "eager",
) -> CheckReport:
    """Compare a function on one device with the same function on a mesh, in float64.

    On one device the graph is run as it was lowered, on the mesh after the passes: they are part of what is compared.

    Args:
        f: a pure function of pytrees of tensors.
        args: Arrays on ``mesh``, or plain tensors (global values).
        mesh: a simulated mesh, or one of this job's processes, which all make the same call.
        rules: what logical axis names mean.
        tolerance: the largest relative difference between one device and the mesh.
        conflicts: as for ``ft.compile``.
        layouts: also verify every layout; see ``functitan.compiler.verify``.
        passes: which passes run on the mesh's Program, as for ``ft.compile``.
        backend: how each process runs its part, "eager" or "inductor"; a simulated mesh is interpreted.

    Returns:
        A report that is true when all leaves agree, the same on every process; print it.

    Raises:
        ArgumentError: a mesh on which nothing runs; inductor on a simulated mesh.

    >>> import functitan as ft
    >>> mesh = ft.make_mesh({"data": 2}, simulate=True)
    >>> x = ft.device_put(torch.arange(8.0), ft.P("data"), mesh)
    >>> bool(check(lambda x: (x * x).sum(), (x,), mesh))
    True
    """
    if mesh.kind == "abstract":
        raise ArgumentError(f"a check runs, and nothing runs on {mesh}. Use a mesh of ft.make_mesh.")
    if backend == "inductor" and mesh.kind == "simulated":
        raise ArgumentError(
            f'backend="inductor" compiles what one process runs, and {mesh} is interpreted. Use a mesh of as many '
            'processes (functitan check --nproc), or backend="eager".'
        )
    leaves = tree.leaves(tuple(args))
    given_layouts = [x.layout if isinstance(x, Array) else replicated(tuple(x.shape)) for x in leaves]
    whole = [x.full() if isinstance(x, Array) else x.detach() for x in leaves]
    single = Mesh(tuple((a, 1) for a, _ in mesh.axes), "simulated")
    plain = [
        Layout(replicated(tuple(w.shape)).dims, storage=lay.storage)
        for w, lay in zip(whole, given_layouts, strict=True)
    ]
    traced = trace(f, args)
    rows: list[Row] = []

    once = expose(traced, given=False)
    one = _program(once.traced, plain, single, rules, conflicts)
    rows += _plain_rows(f, args, whole, once, run_on_globals(one, whole))

    wide = to_float64(traced)
    values = [_wide(w) for w in whole]
    reference = expose(wide, given=False)
    n = traced.out_tree.num_leaves
    first_run = run_on_globals(_program(reference.traced, plain, single, rules, conflicts), values)
    gradients = first_run[n:]

    given = expose(wide, given=True)
    more = [
        given_layouts[p] if p is not None else replicated(tuple(g.shape))
        for p, g in zip(given.params, gradients, strict=True)
    ]
    after = _program(given.traced, plain + [replicated(tuple(g.shape)) for g in gradients], single, rules, conflicts)
    expected = run_on_globals(after, values + gradients)
    sharded = _program(given.traced, [*given_layouts, *more], mesh, rules, conflicts, passes)
    found = run_on_globals(sharded, values + gradients, backend=backend)
    paths = [*sharded.outputs[:n], *(_gradient_path(traced, p) for p in given.params)]
    paths = [p.removeprefix("0/") for p in paths]
    kinds = ["update" if a else "output" for a in given.after] + ["gradient"] * len(gradients)
    for kind, path, a, b in zip(kinds, paths, found, expected, strict=True):
        rows.append(Row(kind, path or "value", difference(a, b), tolerance))
    first = ""
    if not all(r.ok for r in rows if r.kind != "plain"):
        first = _first_difference(after, sharded, values + gradients, tolerance)
    verification = None
    if layouts:
        verification = verify(sharded)
    return CheckReport(traced.name, mesh, tuple(rows), first, verification)


def verify(program: Program) -> Verification:
    """A second opinion on every layout of a program: DTensor's where it has one, and each distinct op by value.

    Raises:
        ShardingError: a layout is wrong; the message names op, layouts and what differs.

    >>> import functitan as ft
    >>> mesh = ft.make_mesh({"data": 2}, simulate=True)
    >>> x = ft.device_put(torch.arange(8.0), ft.P("data"), mesh)
    >>> print(verify(ft.compile(lambda x: (x * x).sum(), mesh=mesh).lower(x)))
    verified: 2 layouts agreed with DTensor, 2 equal by value, 0 unchecked
    """
    runner = Lockstep(Mesh(program.mesh.axes, "simulated"), {})
    return verify_layouts(program, lambda graph, parts: runner.graph("verify", graph, parts))


def _program(
    traced: Traced,
    layouts: Sequence[Layout],
    mesh: Mesh,
    rules: Rules | None,
    conflicts: str,
    passes: Passes = _OFF,
) -> Program:
    return lower(traced, layouts, mesh, rules, conflicts=conflicts, passes=passes)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.double() if x.dtype.is_floating_point else x


def _gradient_path(traced: Traced, place: int | None) -> str:
    return f"gradient of {traced.inputs[place]}" if place is not None else "gradient"


# --- the function as it is -------------------------------------------------------------------------------------


class _GradientTap:
    """Leaves annotations what they are without a compiler, and notes the gradients of parameters."""

    def __init__(self) -> None:
        self.found: list[torch.Tensor | None] = []
        self._used: dict[int, torch.Tensor] = {}
        self._bodies_open = 0

    def constrain(self, x: torch.Tensor, spec: Any, pending: Any, what: str = "") -> torch.Tensor:
        return x

    def constrain_like(self, x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return x

    def checkpoint_name(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x

    def region(self, f: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        return self._inside(f, *args)

    def scan(self, f: Callable[..., Any], init: Any, xs: Any, length: int, options: dict[str, Any]) -> Any:
        with _plain():
            tapped = plain_scan(lambda c, x: self._inside(f, c, x), init, xs, length)
        return tapped

    def _inside(self, f: Callable[..., Any], *args: Any) -> Any:
        """Run a body; a trace does not show the gradients that are taken in one."""
        self._bodies_open += 1
        try:
            with activate(self):
                return f(*args)
        finally:
            self._bodies_open -= 1

    def local_map(self, local: LocalFunction, args: tuple[Any, ...]) -> Any:
        return plain_shard_map(local, args)

    def use_params(self, params: Any, pending: tuple[str, ...]) -> Any:
        def tap(p: torch.Tensor) -> torch.Tensor:
            if id(p) in self._used or self._bodies_open:
                return p
            place = len(self.found)
            self.found.append(None)
            used = p.view_as(p)
            self._used[id(used)] = used
            if used.requires_grad:
                used.register_hook(lambda g: self.found.__setitem__(place, g.detach()))
            return used

        return tree.map(tap, params)

    def mark_gradients(self, gradients: Any, params: Any) -> Any:
        if not self._bodies_open:
            self.found += [g.detach() for g in tree.leaves(gradients)]
        return gradients


@contextmanager
def _plain() -> Iterator[None]:
    with activate(None):
        yield


def _plain_rows(
    f: Callable[..., Any], args: Sequence[Any], whole: list[torch.Tensor], once: Exposed, traced: list[torch.Tensor]
) -> list[Row]:
    """The function on plain tensors against its trace on one device, in the given dtype."""
    tap = _GradientTap()
    with activate(tap):
        out = f(*tree.unflatten(tree.structure(tuple(args)), whole))
    paths, leaves = tree.paths(out), tree.leaves(out)
    rows = []
    for path, a, b, late in zip(paths, leaves, traced, once.after, strict=False):
        if not late:
            rows.append(_plain_row(path or "value", a, b))
    for place, param, b in zip(once.places, once.params, traced[len(leaves) :], strict=True):
        a = tap.found[place]
        if a is not None:
            rows.append(_plain_row(_gradient_path(once.traced, param), a, b))
    return rows


def _plain_row(path: str, a: torch.Tensor, b: torch.Tensor) -> Row:
    eps = torch.finfo(a.dtype).eps if a.dtype.is_floating_point else 0.0
    return Row("plain", path, difference(a.detach(), b), _PLAIN_ULPS * eps)


# --- where they first differ -----------------------------------------------------------------------------------


def _first_difference(one: Program, many: Program, values: Sequence[torch.Tensor], tolerance: float) -> str:
    """Run both again and compare every node's value; the first that differs, with its line."""
    interpreted = replace(many, mesh=Mesh(many.mesh.axes, "simulated"))
    known: dict[Any, torch.Tensor] = {}
    counts: dict[Any, int] = {}

    def key_of(name: str, node: fx.Node) -> Any:
        body, _, late = name.partition(".backward")
        key = (body.rsplit(".", 1)[0], late, node.meta["source"])
        counts[key] = counts.get(key, -1) + 1
        return (*key, counts[key])

    def remember(name: str, node: fx.Node, parts: list[Any]) -> None:
        if "source" in node.meta and "layout" in node.meta and isinstance(parts[0], torch.Tensor):
            known[key_of(name, node)] = parts[0]

    found: list[str] = []

    def compare(name: str, node: fx.Node, parts: list[Any]) -> None:
        if found or "source" not in node.meta or "layout" not in node.meta or not isinstance(parts[0], torch.Tensor):
            return
        key = key_of(name, node)
        if key not in known:
            return
        error = difference(assemble(parts, node.meta["layout"], many.mesh), known[key])
        if error > tolerance:
            line = node.meta["origin"].line if "origin" in node.meta else None
            place = f" at {line.shown()}" if line is not None else ""
            found.append(
                f"{node.meta['source'][0]} ({node.target}) in {name}{place}: differs by {error:.1e} "
                f"with layout {node.meta['layout']}"
            )

    run_on_globals(one, values, observe=remember)
    counts.clear()
    run_on_globals(interpreted, values, observe=compare)
    if found:
        return found[0]
    if many.mesh.kind == "process":
        return "none when all ranks are interpreted in one process: the backend or the collectives differ"
    return "no single node differs alone; the outputs do"
