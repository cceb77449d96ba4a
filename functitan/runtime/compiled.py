"""``ft.compile``: trace, lower and run a function; one program per signature."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from functitan import _torch, tree
from functitan.compiler.donation import successors
from functitan.compiler.lower import lower
from functitan.compiler.passes import DEFAULT_PASSES, Passes
from functitan.compiler.program import Program
from functitan.compiler.trace import Traced, argument_names, trace
from functitan.errors import ArgumentError, ShardingError, TraceError, raise_batch, suggest
from functitan.runtime.arguments import constants, drained, memory, owned, paths, positional, signature_of, take
from functitan.runtime.compilation import Compilation
from functitan.runtime.eager import Eager
from functitan.runtime.host_memory import keep_freed_memory
from functitan.runtime.inductor import Inductor
from functitan.runtime.lockstep import Lockstep
from functitan.sharding import processes
from functitan.sharding.array import Array
from functitan.sharding.layout import replicated
from functitan.sharding.logical import Rules
from functitan.sharding.mesh import Mesh

BACKENDS = ("eager", "inductor")
_LOG = logging.getLogger("functitan")


@dataclass(frozen=True)
class _Ready:
    """What one signature runs: the program, what runs it, the memory of its constants, for every input whether its
    argument is donated, and for every output whether it is whole on each rank, and the donated input that it replaces.
    """

    program: Program
    runner: Any
    constants: set[int]
    donated: list[bool]
    whole: list[tuple[bool, int | None]]


class Compiled:
    """A compiled function: call it, or ``lower`` it to look at its Program.

    Made by :func:`compile`.

    Attributes:
        compilations: what every signature so far took to be made ready. Each is logged too, by the logger
            "functitan" of the first process: the first as information, others as warnings with what changed.
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
        backend: str,
        passes: Passes,
    ) -> None:
        self._f = f
        self._signature = signature_of(f)
        self._mesh = mesh
        self._rules = rules
        self._donated = donate_argnums
        self._conflicts = conflicts
        self._reduce_dtype = reduce_dtype
        self._max_traces = max_traces
        self._backend = backend
        self._passes = passes
        self._traces: dict[Any, Traced] = {}
        self._programs: dict[Any, _Ready] = {}
        self.compilations: list[Compilation] = []
        self.__name__ = getattr(f, "__name__", type(f).__name__)
        self.__doc__ = f.__doc__

    def lower(self, *args: Any, **kwargs: Any) -> Program:
        """The Program for these arguments, without running it; Arrays of an abstract mesh will do."""
        args = positional(self._signature, self.__name__, args, kwargs)
        return self._ready(args, *tree.flatten(args)).program

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function on Arrays and tensors.

        Sharded results, and those that replace a donated Array, are Arrays; other replicated ones are plain tensors.

        Raises:
            ArgumentError: arguments that the function does not take.
            ShardingError: what cannot be lowered; an Array that was donated, or that is donated and shares memory.
            TraceError: what cannot be traced.
        """
        args = positional(self._signature, self.__name__, args, kwargs)
        leaves, structure = tree.flatten(args)
        ready = self._ready(args, leaves, structure)
        program, runner = ready.program, ready.runner
        if runner is None:
            raise ShardingError(
                f"{self.__name__} is compiled for {self._mesh}, on which nothing runs. Use .lower(...) for its "
                "Program, or a "
                "mesh of ft.make_mesh."
            )
        given = [donated and isinstance(leaf, Array) for leaf, donated in zip(leaves, ready.donated, strict=True)]
        columns = take(self.__name__, program.inputs, leaves, given, self._mesh.processes)
        held = ready.constants | memory([c for c, g in zip(columns, given, strict=True) if not g])
        with torch.no_grad():
            if isinstance(runner, Eager):
                # A plain tensor in a donated argument stays its owner's, so a copy is written over in its place.
                copied = {k for k in runner.written if not given[k]}
                inputs = [c[0].clone() if k in copied else c[0] for k, c in enumerate(columns)]
                columns.clear()
                ranked = [[o] for o in runner.run(inputs)]
            else:
                ranked = runner.graph("step", program.graph, drained(columns))
            # Whole results are plain tensors; what replaces a donated Array is one, so that it can be donated in turn.
            plain = [whole and (place is None or not given[place]) for whole, place in ready.whole]
            ranked = owned([parts[:1] if p else parts for parts, p in zip(ranked, plain, strict=True)], held)
        results = [
            parts[0] if p else Array(typ.shape, typ.dtype, layout, self._mesh, parts)
            for parts, p, layout, typ in zip(ranked, plain, program.out_layouts, program.out_types, strict=True)
        ]
        return tree.unflatten(program.out_tree, results)

    def _ready(self, args: tuple[Any, ...], leaves: list[Any], structure: tree.TreeDef) -> _Ready:
        beyond = [n for n in self._donated if n >= len(args)]
        if beyond:
            raise ArgumentError(
                f"{self.__name__} was compiled with donate_argnums={self._donated} and called with {len(args)} "
                "arguments; "
                f"there is no argument {beyond[0]} to donate."
            )
        strangers, types, layouts = [], [], []
        for leaf in leaves:
            shape = tuple(getattr(leaf, "shape", ()))
            types.append((shape, getattr(leaf, "dtype", type(leaf))))
            if not isinstance(leaf, Array):
                layouts.append(replicated(shape))
                continue
            if leaf.mesh is not self._mesh and (leaf.mesh.axes, leaf.mesh.kind) != (self._mesh.axes, self._mesh.kind):
                strangers.append(leaf)
            layouts.append(leaf.layout)
        signature = (structure, tuple(types))
        key = (signature, tuple(layouts))
        if strangers or key not in self._programs:
            self._programs[key] = self._made(key, args, leaves, strangers)
        return self._programs[key]

    def _made(self, key: Any, args: tuple[Any, ...], leaves: list[Any], strangers: list[Array]) -> _Ready:
        """What runs a signature that is new; an error if some Arrays are of another mesh."""
        names = argument_names(self._f, len(args))
        where = paths(names, args)
        problems = [
            f"{path} is on mesh {leaf.mesh}, {self.__name__} is compiled for {self._mesh}; put it there with "
            "ft.device_put(x.full(), spec, mesh)."
            for path, leaf in zip(where, leaves, strict=True)
            if any(leaf is stranger for stranger in strangers)
        ]
        raise_batch(ShardingError, problems, f"the arguments of {self.__name__}")
        if self._max_traces is not None and len(self._programs) >= self._max_traces:
            raise TraceError(self._retraced(key, where))
        begun = time.perf_counter()
        if self._runs() is Inductor:
            _torch.prepare_inductor()
        signature, layouts = key
        if signature not in self._traces:
            self._traces[signature] = trace(self._f, args, names)
        program = lower(
            self._traces[signature],
            list(layouts),
            self._mesh,
            self._rules,
            conflicts=self._conflicts,
            reduce_dtype=self._reduce_dtype,
            passes=self._passes,
        )
        donated = [i in self._donated for i, arg in enumerate(args) for _ in tree.leaves(arg)]
        program.donated = tuple(leaf for leaf, gone in enumerate(donated) if gone)
        lowered = time.perf_counter()
        changed = self._changed(key, where) if self._programs else ""
        runner = self._runner(program)
        if runner is not None:
            seconds = (lowered - begun, time.perf_counter() - lowered)
            self._note(Compilation(self.__name__, len(self._programs) + 1, *seconds, *_counts(runner), changed))
        places = successors(program)
        whole = [(not (layout.axes or layout.storage), places.get(j)) for j, layout in enumerate(program.out_layouts)]
        return _Ready(program, runner, constants(program), donated, whole)

    def _runs(self) -> type | None:
        """What runs a program here; nothing does on an abstract mesh."""
        if self._mesh.kind == "abstract":
            return None
        keep_freed_memory()
        if self._mesh.kind == "process" or self._mesh.size == 1:
            return Inductor if self._backend == "inductor" else Eager
        return Lockstep

    def _runner(self, program: Program) -> Any:
        kind = self._runs()
        if kind is Lockstep:
            return Lockstep(self._mesh, program.bodies)
        return None if kind is None else kind(program, self._mesh.local_coordinates()[0])

    def _note(self, made: Compilation) -> None:
        """Keep and log what was made: the first program is expected, another one may be a mistake."""
        self.compilations.append(made)
        if processes.rank() == 0:  # all do the same
            _LOG.log(logging.INFO if made.number == 1 else logging.WARNING, "%s", made)

    def _retraced(self, key: Any, paths: list[str]) -> str:
        """The error of a call that needs more programs than there may be."""
        return (
            f"{self.__name__} would be compiled for signature number {len(self._programs) + 1}, and "
            f"max_traces={self._max_traces}. What changed since the last: {self._changed(key, paths)}. Keep "
            "structure, shapes, dtypes and specs equal between calls, or raise max_traces."
        )

    def _changed(self, key: Any, paths: list[str]) -> str:
        """Why a call needs another program than the last one made, leaf by leaf."""
        last_key = list(self._programs)[-1]
        last = self._programs[last_key].program
        changed = [f"{p} is new" for p in paths if p not in last.inputs]
        changed += [f"{p} is gone" for p in last.inputs if p not in paths]
        if not changed:
            for path, was, now in zip(paths, last_key[0][1], key[0][1], strict=True):
                if was != now:
                    changed.append(f"{path}: {_type_text(was)} -> {_type_text(now)}")
            for path, old, new in zip(paths, last_key[1], key[1], strict=True):
                if old.dims != new.dims and old.shape(self._mesh.shape) == new.shape(self._mesh.shape):
                    changed.append(f"{path}: spec {old} -> {new}")
                elif old.storage != new.storage:
                    changed.append(f"{path}: storage axes {sorted(old.storage)} -> {sorted(new.storage)}")
        shown = "; ".join(changed[:5]) + (f"; and {len(changed) - 5} more" if len(changed) > 5 else "")
        return shown or "the containers of the arguments"


def _counts(runner: Any) -> tuple[int, int]:
    """The graphs that were compiled, and how many came from the cache."""
    return (len(runner.from_cache), sum(runner.from_cache)) if isinstance(runner, Inductor) else (0, 0)


def _type_text(type_: tuple[tuple[int, ...], Any]) -> str:
    shape, dtype = type_
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def compile(
    f: Callable[..., Any],
    *,
    mesh: Mesh,
    rules: Rules | None = None,
    donate_argnums: int | Sequence[int] = (),
    conflicts: str = "error",
    reduce_dtype: torch.dtype = torch.float32,
    max_traces: int | None = None,
    backend: str = "eager",
    passes: Passes = DEFAULT_PASSES,
) -> Compiled:
    """Compile a pure function on global tensors for a mesh.

    Args:
        f: a pure function of pytrees of tensors.
        mesh: where it runs.
        rules: what logical axis names mean; needed when the function uses them.
        donate_argnums: arguments whose Arrays are given up to the call: their memory is freed after its last use, or
            written over by what replaces them, which is an Array too. Plain tensors among them are not given up; put
            them on the mesh for that. Results share no memory with other arguments or with each other.
        conflicts: "error": operands that disagree are an error with the constrain to write; "auto": they are settled
            by bytes moved, and the Program lists each choice.
        reduce_dtype: the lowest dtype in which gradients of parameters are reduced over ranks.
        max_traces: an error instead of compiling for more signatures than this.
        backend: how a rank runs its graphs: "eager", op by op, or "inductor", each graph compiled once. A simulated mesh
            of several ranks is interpreted whatever it says.
        passes: which passes run on the lowered Program, and how; the same for every backend.

    >>> import functitan as ft
    >>> mesh = ft.make_mesh({"data": 2}, simulate=True)
    >>> double = ft.compile(lambda x: x * 2, mesh=mesh)
    >>> double(ft.device_put(torch.arange(4.0), ft.P("data"), mesh)).full()
    tensor([0., 2., 4., 6.])
    """
    if conflicts not in ("error", "auto"):
        raise ShardingError(f'conflicts={conflicts!r} is not one of "error", "auto".')
    if backend not in BACKENDS:
        raise ArgumentError(f"backend={backend!r} is not one of {', '.join(BACKENDS)}.{suggest(backend, BACKENDS)}")
    donated = (donate_argnums,) if isinstance(donate_argnums, int) else tuple(donate_argnums)
    if any(n < 0 for n in donated):
        raise ArgumentError(f"donate_argnums={donate_argnums!r}: count arguments from 0.")
    return Compiled(f, mesh, rules, donated, conflicts, reduce_dtype, max_traces, backend, passes)
