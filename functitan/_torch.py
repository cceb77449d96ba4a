"""The one place where private or unstable torch APIs are imported, so that a torch upgrade is one file's work."""

from __future__ import annotations

import contextlib
import logging
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch._decomp import get_decompositions as get_decompositions
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.proxy_tensor import make_fx as make_fx
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

#: Errors with which fake tensors refuse to give a value or a data-dependent shape.
DATA_DEPENDENT_ERRORS = (DataDependentOutputException, DynamicOutputShapeException)


@contextlib.contextmanager
def quiet_fake_tensors() -> Iterator[None]:
    """Keep fake tensors from logging the traceback of an op that refuses its operands: the error says it."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


@contextlib.contextmanager
def outside_trace(fake_mode: FakeTensorMode) -> Iterator[None]:
    """Suspend the trace at work, keeping only its fake tensors: for tracing a nested body by itself."""
    with _disable_current_modes(), fake_mode:
        yield


def last_traced_node() -> torch.fx.Node | None:
    """The newest node of the graph that is being traced."""
    mode = get_proxy_mode()
    return None if mode is None else next(iter(reversed(mode.tracer.graph.nodes)), None)


def backward_sequence_number() -> int | None:
    """The forward sequence number of the autograd node that runs now, or None outside backward."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def next_sequence_number() -> int:
    """The number that the next autograd node of this thread will take."""
    return torch.autograd._get_sequence_nr()  # pyright: ignore[reportPrivateImportUsage]


# Attention kernels: torch offers them publicly only through F.scaled_dot_product_attention, which returns no
# log-sum-exp and picks a kernel at trace time.
sdpa_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
sdpa_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
sdpa_cuda_flash = torch.ops.aten._scaled_dot_product_flash_attention.default
sdpa_cuda_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
sdpa_cuda_efficient = torch.ops.aten._scaled_dot_product_efficient_attention.default
sdpa_cuda_efficient_backward = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default


def dispatch_modes_active() -> bool:
    """Whether a trace, fake tensors or another dispatch mode sees the ops that run now."""
    return torch._C._len_torch_dispatch_stack() > 0 or torch.compiler.is_compiling()


def inside_functorch() -> bool:
    """Whether a transform of torch.func (vmap, grad) is at work: there, torch.autograd.grad is refused."""
    return torch._C._functorch.peek_interpreter_stack() is not None  # pyright: ignore[reportAttributeAccessIssue]


@contextlib.contextmanager
def shapes_only(leaves: list[object]) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    """Run on fake tensors, and not as part of a trace; yields what turns a tensor into a fake one.

    Inside a trace its fake mode is used again: fake tensors of two modes do not mix.
    """
    outer = detect_fake_mode(leaves)
    mode = FakeTensorMode(allow_non_fake_inputs=True) if outer is None else outer
    with _disable_current_modes(), mode:
        yield lambda t: t if isinstance(t, FakeTensor) else mode.from_tensor(t)


class DTensorPropagation:
    """DTensor's sharding propagation over one axis, with every implicit redistribution forbidden.

    Runs on meta tensors. Where no process group is, a fake one exists inside the ``with`` block.

    Args:
        world: the largest axis that will be asked about.
    """

    def __init__(self, world: int) -> None:
        self._world = world
        self._own_group = False

    def __enter__(self) -> DTensorPropagation:
        import torch.distributed as dist
        from torch.testing._internal.distributed.fake_pg import FakeStore

        if not dist.is_initialized():
            dist.init_process_group("fake", rank=0, world_size=self._world, store=FakeStore())
            self._own_group = True
        self._meshes: dict[int, Any] = {}
        return self

    def __exit__(self, *details: object) -> None:
        import torch.distributed as dist

        self._meshes.clear()
        if self._own_group:
            dist.destroy_process_group()
            self._own_group = False

    def propagate(self, op, build, operands, n):  # type: ignore[no-untyped-def]
        """The placements of the outputs, or None where DTensor would redistribute or does not know the op.

        Args:
            op: an aten overload.
            build: given a function from operand number to tensor, gives args and kwargs.
            operands: (shape, dtype, placement) each; a placement is (kind, dim, split factor).
            n: the axis size.
        """
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
        from torch.distributed.tensor._utils import ExplicitRedistributionContext
        from torch.distributed.tensor.placement_types import _StridedShard

        if n not in self._meshes:
            self._meshes[n] = DeviceMesh("cpu", torch.arange(n), _init_backend=False)
        mesh = self._meshes[n]

        def make(i: int) -> object:
            shape, dtype, (kind, dim, factor) = operands[i]
            local = list(shape)
            if kind == "shard":
                local[dim] //= n
                placed = Shard(dim) if factor == 1 else _StridedShard(dim, split_factor=factor)
            else:
                placed = Partial() if kind == "partial" else Replicate()
            return DTensor.from_local(torch.empty(local, dtype=dtype, device="meta"), mesh, [placed], run_check=False)

        def back(placed: Any) -> tuple[str, int, int]:
            if isinstance(placed, _StridedShard):
                return ("shard", placed.dim, int(placed.split_factor))
            if placed.is_shard():
                return ("shard", placed.dim, 1)
            if placed.is_partial():
                return ("partial", 0, 0) if placed.reduce_op == "sum" else (placed.reduce_op, 0, 0)
            return ("replicate", 0, 0)

        args, kwargs = build(make)
        try:
            with ExplicitRedistributionContext(strict=True), torch.no_grad():
                out = op(*args, **kwargs)
        except Exception:
            # Refusing to redistribute, lacking a strategy, and failing inside one all mean: no opinion.
            return None
        outs = out if isinstance(out, (list, tuple)) else [out]
        return [back(o.placements[0]) for o in outs]


def copy_each(into: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Copy every value into the tensor at its place, in one call."""
    torch._foreach_copy_(into, values)  # type: ignore[arg-type]


def register_group(name: str, group: object) -> None:
    """Make a process group known to functional collectives under a name."""
    torch._C._distributed_c10d._register_process_group(name, group)  # type: ignore[arg-type]


def joined_axes(mesh: DeviceMesh, axes: Sequence[str], name: str, backend: Any) -> DeviceMesh:
    """The mesh of one axis that some of a mesh's axes, in its order, are together."""
    return mesh[tuple(axes)]._flatten(name, backend_override=backend)


def set_timeout(group: Any, seconds: float) -> None:
    """How long a rank waits in a collective of a group for the others."""
    torch.distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def placeholder_group(size: int) -> Any:
    """A process group with a size, which sends nothing and needs no default group."""
    return torch.distributed.ProcessGroup(0, size)  # pyright: ignore[reportCallIssue]


def unregister_group(name: str) -> None:
    """Forget a registered process group."""
    torch._C._distributed_c10d._unregister_process_group(name)  # type: ignore[arg-type]


@contextlib.contextmanager
def quiet_warnings() -> Iterator[None]:
    """Without warnings of libraries that call each other's deprecated functions."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


class MissingCompilerError(Exception):
    """Inductor found no C++ compiler."""


class FailedCompilerError(Exception):
    """The C++ compiler failed on a kernel of inductor's; with its command and what it said."""


def compile_graph(module: torch.fx.GraphModule, values: Sequence[torch.Tensor]) -> Callable[..., Any]:
    """A graph compiled by inductor for inputs like these (fake) values; a function of its inputs, without guards."""
    from torch._inductor import standalone_compile
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        return standalone_compile(module, list(values), dynamic_shapes="from_graph")
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, InvalidCxxCompiler):
                raise MissingCompilerError(str(cause)) from None
            cause = cause.__cause__ or cause.__context__
        raise


@contextlib.contextmanager
def kernels_built_together() -> Iterator[None]:
    """Graphs that this thread compiles inside have their kernels when it ends, and must not be called before.

    So C++ compilers work on the kernels of one graph while inductor works on the next.

    Raises:
        FailedCompilerError: a kernel could not be built.
    """
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.exc import CppCompileError

    mine, wait = threading.get_ident(), AsyncCompile.wait
    late: list[tuple[AsyncCompile, dict[str, Any]]] = []

    def later(self: AsyncCompile, scope: dict[str, Any]) -> None:
        if threading.get_ident() == mine:
            late.append((self, scope))
        else:
            wait(self, scope)

    AsyncCompile.wait = later
    try:
        yield
    finally:
        AsyncCompile.wait = wait
    try:
        for kernels, scope in late:
            wait(kernels, scope)
    except CppCompileError as error:
        raise FailedCompilerError(str(error)) from None


def prepare_inductor() -> None:
    """Import inductor, and have a thread try out the C++ compiler and precompile its header, as inductor does once."""
    from torch._inductor import codecache
    from torch.utils._filelock import FileLock as FileLock  # not first imported by two threads at once

    def once() -> None:
        with contextlib.suppress(Exception):  # whoever compiles meets it again
            codecache.CppPythonBindingsCodeCache.load_pybinding([], 'extern "C" void kernel() {}')

    threading.Thread(target=once, name="functitan-inductor", daemon=True).start()


def inductor_cache_hits() -> int:
    """How many graphs inductor has taken from its caches on disk in this process."""
    from torch._dynamo.utils import counters

    # A graph found in the first of these is not looked up in the second.
    return counters["aot_autograd"]["autograd_cache_hit"] + counters["inductor"]["fxgraph_cache_hit"]


def inductor_caches() -> bool:
    """Whether inductor keeps what it compiles on disk."""
    from torch._inductor import config

    return config.fx_graph_cache and not config.force_disable_caches


def flat_fakes(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Fake one-dimensional tensors of one symbolic size in place of values of one shape; scalars stay scalars.

    The size is guessed from the largest value, which decides how a compiler splits the work over threads.
    """
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

    mode = FakeTensorMode(shape_env=ShapeEnv())
    env, source = mode.shape_env, ConstantSource("elements")
    assert env is not None
    guess = max(2, *(v.numel() for v in values))
    with mode:
        size = env.create_symintnode(
            env.create_symbol(guess, source=source, dynamic_dim=DimDynamic.DYNAMIC), hint=guess, source=source
        )
        return [torch.empty(size if v.ndim else (), dtype=v.dtype, device=v.device) for v in values]
