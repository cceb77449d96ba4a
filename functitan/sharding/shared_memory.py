"""A process group of the processes of one machine, whose collectives are copies through shared memory.

Gloo sends everything through the kernel's TCP, by threads of its own, and adds up the whole of what a reduce-scatter
divides: it sends twice the bytes. Sums here are taken in the order of ranks, as on a simulated mesh, so that the bits
are the same for any number of processes.
"""

# torch's stubs name parameters otherwise and know overloads that functional collectives do not call.
# pyright: reportIncompatibleMethodOverride=false

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from functitan.sharding.mailbox import Listener, Mailbox

#: The name under which torch knows groups of this kind.
BACKEND = "shared_memory"
_KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")
_REDUCE, _GATHER, _SCATTER, _EXCHANGE = range(4)
_ADDS: dict[Any, Callable[..., torch.Tensor]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.AVG: torch.add,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.PRODUCT: torch.mul,
}


class _Work(dist.Work):
    """A collective that was started; waiting ends it, once."""

    def __init__(self, end: Callable[[], None]) -> None:
        super().__init__()
        self._end: Callable[[], None] | None = end

    def wait(self, timeout: Any = None) -> bool:
        end, self._end = self._end, None
        if end is not None:
            end()
        return True


class SharedMemoryGroup(dist.ProcessGroup):
    """What torch's functional collectives call, by torch's names, on contiguous CPU tensors.

    Starting one copies what others need, and this rank's own part of the result; waiting for it does the rest.

    Args:
        links: per rank of the group the socket to it; None for this rank.
        timeout: seconds that a rank waits for another.
        name: torch's for the group.
    """

    def __init__(self, links: Sequence[socket.socket | None], timeout: float, name: str = "") -> None:
        self._own = links.index(None)
        self._name = name
        super().__init__(self._own, len(links))  # pyright: ignore[reportCallIssue]
        self._others = [rank for rank, link in enumerate(links) if link is not None]
        self._mailbox = Mailbox(links, timeout, _KINDS)

    @property
    def group_name(self) -> str:
        return self._name

    def getBackendName(self) -> str:
        return BACKEND

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        (out,), (x,) = outputs, inputs
        rows = out.view(self.size(), -1)
        rows[self._own].copy_(x.view(-1))
        number = self._mailbox.send(_GATHER, {rank: x for rank in self._others})
        return self._moved(number, _GATHER, rows)

    def alltoall_base(self, out: Any, x: Any, gets: list[int], sends: list[int], opts: Any = None) -> dist.Work:
        parts = x.split(sends) if sends else x.chunk(self.size())
        rows = out.split(gets) if gets else out.chunk(self.size())
        rows[self._own].copy_(parts[self._own])
        number = self._mailbox.send(_EXCHANGE, {rank: parts[rank] for rank in self._others})
        return self._moved(number, _EXCHANGE, rows)

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        (out,), (x,) = outputs, inputs
        rows = x.view(self.size(), -1)
        out.view(-1).copy_(rows[self._own])
        number = self._mailbox.send(_SCATTER, {rank: rows[rank] for rank in self._others})
        return self._added(number, _SCATTER, out.view(-1), opts.reduceOp)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> dist.Work:
        (x,) = tensors
        number = self._mailbox.send(_REDUCE, {rank: x for rank in self._others})
        return self._added(number, _REDUCE, x.view(-1), opts.reduceOp)

    def allreduce(self, tensors: Any, opts: Any = None) -> dist.Work:
        return self.allreduce_coalesced(tensors, opts)

    def _moved(self, number: int, kind: int, rows: Sequence[torch.Tensor]) -> dist.Work:
        """Ends by copying every other rank's part to its place."""

        def end() -> None:
            for rank in self._others:
                rows[rank].view(-1).copy_(self._mailbox.read(number, kind, rank, rows[rank]))
            self._mailbox.close(number)

        return _Work(end)

    def _added(self, number: int, kind: int, out: torch.Tensor, op: Any) -> dist.Work:
        """Ends by adding every other rank's part to this rank's, which is in ``out``, in the order of ranks."""
        add = next(f for known, f in _ADDS.items() if op == known)

        def end() -> None:
            parts = [self._mailbox.read(number, kind, rank, out) for rank in self._others]
            parts.insert(self._own, out)
            # Two addends have one sum; a third one is added to theirs.
            total = out if self._own < 2 else torch.empty_like(out)
            if len(parts) > 1:
                add(parts[0], parts[1], out=total)
            for k, part in enumerate(parts[2:], 2):
                total = add(total, part, out=out if k >= self._own else total)
            if op == dist.ReduceOp.AVG:
                out.div_(len(parts))
            self._mailbox.close(number)

        return _Work(end)


def register(timeout: float) -> None:
    """Let torch make groups of this kind, whose ranks find each other by the group's store."""

    def make(options: Any, _: Any) -> SharedMemoryGroup:
        listener = Listener()
        options.store.set(str(options.group_rank), listener.path)
        paths = [options.store.get(str(rank)).decode() for rank in range(options.group_size)]
        return SharedMemoryGroup(listener.links(options.group_rank, paths), timeout, options.group_id)

    dist.Backend.register_backend(BACKEND, make, extended_api=True, devices=["cpu"])
