"""``ft.compile``: trace, lower and run a function; one program per signature."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from functitan import tree
from functitan.compiler.lower import lower
from functitan.compiler.program import Program
from functitan.compiler.trace import Traced, argument_names, trace
from functitan.errors import ShardingError, TraceError, raise_batch
from functitan.runtime.eager import Eager
from functitan.runtime.lockstep import Lockstep
from functitan.sharding.array import Array
from functitan.sharding.layout import replicated
from functitan.sharding.logical import Rules
from functitan.sharding.mesh import Mesh


class Compiled:
    """A compiled function: call it, or ``lower`` it to look at its Program.

    Made by :func:`compile`.
    """

    def __init__(
        self,
        f: Callable[..., Any],
        mesh: Mesh,
        rules: Rules | None,
        donate_argnums: tuple[int, ...],
        conflicts: str,
        reduce_dtype: torch.dtype,
        max_traces: int | None,
    ) -> None:
        self._f = f
        self._mesh = mesh
        self._rules = rules
        self._donated = donate_argnums
        self._conflicts = conflicts
        self._reduce_dtype = reduce_dtype
        self._max_traces = max_traces
        self._traces: dict[Any, Traced] = {}
        self._programs: dict[Any, tuple[Program, Any]] = {}
        self.__name__ = getattr(f, "__name__", type(f).__name__)
        self.__doc__ = f.__doc__

    def lower(self, *args: Any) -> Program:
        """The Program for these arguments, without running it; Arrays of an abstract mesh will do."""
        return self._program(args)[0]

    def __call__(self, *args: Any) -> Any:
        """Run the function on Arrays and tensors; sharded results are Arrays, replicated ones plain tensors."""
        program, runner = self._program(args)
        if runner is None:
            raise ShardingError(
                f"{self.__name__} is compiled for {self._mesh}, on which nothing runs. Use .lower(...) for its Program, or a "
                "mesh of ft.make_mesh."
            )
        columns = self._inputs(args)
        if isinstance(runner, Eager):
            ranked = [[o] for o in runner.run([c[0] for c in columns])]
        else:
            ranked = runner.graph("step", program.graph, columns)
        results: list[Any] = []
        for parts, layout, typ in zip(ranked, program.out_layouts, program.out_types, strict=True):
            whole = not layout.axes
            results.append(
                parts[0] if whole and not layout.storage else Array(typ.shape, typ.dtype, layout, self._mesh, parts)
            )
        return tree.unflatten(program.out_tree, results)

    def _inputs(self, args: tuple[Any, ...]) -> list[list[torch.Tensor]]:
        columns: list[list[torch.Tensor]] = []
        for i, arg in enumerate(args):
            for leaf in tree.leaves(arg):
                if isinstance(leaf, Array):
                    columns.append(leaf.donate(self.__name__) if i in self._donated else leaf.shards)
                else:
                    columns.append([leaf.detach()] * max(self._mesh.processes, 1))
        return columns

    def _program(self, args: tuple[Any, ...]) -> tuple[Program, Any]:
        names = argument_names(self._f, len(args))
        leaves, problems, layouts = [], [], []
        for name, arg in zip(names, args, strict=True):
            for path, leaf in tree.flatten_with_paths(arg)[0]:
                where = f"{name}/{path}" if path else name
                leaves.append(leaf)
                if isinstance(leaf, Array):
                    if leaf.mesh.axes != self._mesh.axes or leaf.mesh.kind != self._mesh.kind:
                        problems.append(
                            f"{where} is on mesh {leaf.mesh}, {self.__name__} is compiled for {self._mesh}; put it there with "
                            "ft.device_put(x.full(), spec, mesh)."
                        )
                    layouts.append(leaf.layout)
                else:
                    shape = tuple(getattr(leaf, "shape", ()))
                    layouts.append(replicated(shape))
        raise_batch(ShardingError, problems, f"the arguments of {self.__name__}")
        types = tuple((tuple(getattr(x, "shape", ())), getattr(x, "dtype", type(x))) for x in leaves)
        signature = (tree.structure(args), types)
        key = (signature, tuple(layouts))
        if key not in self._programs:
            if self._max_traces is not None and len(self._programs) >= self._max_traces:
                raise TraceError(self._retraced(key))
            if signature not in self._traces:
                self._traces[signature] = trace(self._f, args, names)
            program = lower(
                self._traces[signature],
                layouts,
                self._mesh,
                self._rules,
                conflicts=self._conflicts,
                reduce_dtype=self._reduce_dtype,
            )
            program.donated = self._donated_leaves(args)
            self._programs[key] = (program, self._runner(program))
        return self._programs[key]

    def _donated_leaves(self, args: tuple[Any, ...]) -> tuple[int, ...]:
        """The flat inputs that belong to donated arguments."""
        owners = [i for i, arg in enumerate(args) for _ in tree.leaves(arg)]
        return tuple(leaf for leaf, i in enumerate(owners) if i in self._donated)

    def _runner(self, program: Program) -> Any:
        if self._mesh.kind == "abstract":
            return None
        if self._mesh.size == 1:
            return Eager(program, {a: 0 for a in self._mesh.names})
        return Lockstep(self._mesh, program.bodies)

    def _retraced(self, key: Any) -> str:
        last = list(self._programs)[-1]
        what = "the structure of the arguments" if key[0][0] != last[0][0] else ""
        changed = [
            f"leaf {i}: {a} -> {b}" for i, (a, b) in enumerate(zip(last[0][1], key[0][1], strict=False)) if a != b
        ] + [f"leaf {i}: spec {a} -> {b}" for i, (a, b) in enumerate(zip(last[1], key[1], strict=False)) if a != b]
        return (
            f"{self.__name__} would be compiled a {len(self._programs) + 1}th time, and max_traces={self._max_traces}. What "
            f"changed: {what or '; '.join(changed[:5])}. Keep shapes, dtypes and specs equal between calls."
        )


def compile(
    f: Callable[..., Any],
    *,
    mesh: Mesh,
    rules: Rules | None = None,
    donate_argnums: int | Sequence[int] = (),
    conflicts: str = "error",
    reduce_dtype: torch.dtype = torch.float32,
    max_traces: int | None = None,
) -> Compiled:
    """Compile a pure function on global tensors for a mesh.

    Args:
        f: a pure function of pytrees of tensors.
        mesh: where it runs.
        rules: what logical axis names mean; needed when the function uses them.
        donate_argnums: arguments whose Arrays are given up to the call.
        conflicts: "error": operands that disagree are an error with the constrain to write; "auto": they are settled
            by bytes moved, and the Program lists each choice.
        reduce_dtype: the lowest dtype in which gradients of parameters are reduced over ranks.
        max_traces: an error instead of compiling for more signatures than this.

    >>> import functitan as ft
    >>> mesh = ft.make_mesh({"data": 2}, simulate=True)
    >>> double = ft.compile(lambda x: x * 2, mesh=mesh)
    >>> double(ft.device_put(torch.arange(4.0), ft.P("data"), mesh)).full()
    tensor([0., 2., 4., 6.])
    """
    if conflicts not in ("error", "auto"):
        raise ShardingError(f'conflicts={conflicts!r} is not one of "error", "auto".')
    donated = (donate_argnums,) if isinstance(donate_argnums, int) else tuple(donate_argnums)
    return Compiled(f, mesh, rules, donated, conflicts, reduce_dtype, max_traces)


