"""The one place where private or unstable torch APIs are imported, so that a torch upgrade is one file's work."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch._decomp import core_aten_decompositions, get_decompositions
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

#: Errors with which fake tensors refuse to give a value or a data-dependent shape.
DATA_DEPENDENT_ERRORS = (DataDependentOutputException, DynamicOutputShapeException)


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
    return torch.autograd._get_sequence_nr()


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
    return torch._C._functorch.peek_interpreter_stack() is not None


@contextlib.contextmanager
def shapes_only(leaves: list[object]) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    """Run on fake tensors, and not as part of a trace; yields what turns a tensor into a fake one.

    Inside a trace its fake mode is used again: fake tensors of two modes do not mix.
    """
    outer = detect_fake_mode(leaves)
    mode = FakeTensorMode(allow_non_fake_inputs=True) if outer is None else outer
    with _disable_current_modes(), mode:
        yield lambda t: t if isinstance(t, FakeTensor) else mode.from_tensor(t)
