"""Collectives through shared memory, by several ranks in one process: starting one never waits."""

from __future__ import annotations

import socket

import pytest
import torch

from functitan import _torch
from functitan.runtime.collectives import join
from functitan.sharding.mailbox import Listener, Mailbox, TransportError
from functitan.sharding.shared_memory import SharedMemoryGroup

c10d = torch.ops._c10d_functional
KINDS = ("apple", "pear")


def links(n: int) -> list[list[socket.socket | None]]:
    """Per rank the sockets to all."""
    rows: list[list[socket.socket | None]] = [[None] * n for _ in range(n)]
    for i in range(n):
        for j in range(i):
            rows[i][j], rows[j][i] = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return rows


class Ranks:
    """The groups of n ranks, under names of their own."""

    def __init__(self, n: int) -> None:
        self.groups = [SharedMemoryGroup(row, timeout=5.0) for row in links(n)]
        self.names = [f"test_shared_memory:{n}:{rank}" for rank in range(n)]
        for name, group in zip(self.names, self.groups, strict=True):
            _torch.register_group(name, group)

    def close(self) -> None:
        for name in self.names:
            _torch.unregister_group(name)

    def start(self, target, operands, *args):
        return [target(x, *args, name) for x, name in zip(operands, self.names, strict=True)]

    def run(self, target, operands, *args):
        return [c10d.wait_tensor(x) for x in self.start(target, operands, *args)]


@pytest.fixture(params=[2, 3, 5])
def ranks(request):
    made = Ranks(request.param)
    yield made
    made.close()


def operands(n, *shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator).mul(100).to(dtype) for _ in range(n)]


@pytest.mark.parametrize("how", ["sum", "avg", "max", "min", "product"])
def test_reductions_have_the_bits_of_the_simulator(ranks, how):
    """It adds up in the order of ranks; three random numbers have other bits in other orders."""
    n = len(ranks.groups)
    given = operands(n, 3 * n, 50)
    for target, args in ((c10d.all_reduce.default, (how,)), (c10d.reduce_scatter_tensor.default, (how, n))):
        for mine, expected in zip(ranks.run(target, given, *args), join(target, given, (*args, "")), strict=True):
            assert mine.equal(expected)
    assert [x.sum() for x in given] == [x.sum() for x in operands(n, 3 * n, 50)]  # operands stay


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_moves_have_the_bits_of_the_simulator(ranks, dtype):
    n = len(ranks.groups)
    given = operands(n, 2 * n, 3, dtype=dtype)
    sizes = [2] * n
    for target, args in ((c10d.all_gather_into_tensor.default, (n,)), (c10d.all_to_all_single.default, (sizes, sizes))):
        for mine, expected in zip(ranks.run(target, given, *args), join(target, given, (*args, "")), strict=True):
            assert mine.dtype == dtype and mine.equal(expected)


def test_exchanges_of_uneven_and_of_no_parts(ranks):
    """Rank r sends s elements to rank s, so the ranks get n times as many as their number."""
    n = len(ranks.groups)
    counts = list(range(n))
    given = [torch.full((sum(counts),), float(r)) for r in range(n)]
    out = [
        c10d.all_to_all_single(x, [me] * n, counts, name)
        for me, (x, name) in enumerate(zip(given, ranks.names, strict=True))
    ]
    for me, mine in enumerate(out):
        assert c10d.wait_tensor(mine).tolist() == [float(r) for r in range(n) for _ in range(me)]


def test_scalars_and_empty_tensors(ranks):
    n = len(ranks.groups)
    total = ranks.run(c10d.all_reduce.default, [torch.tensor(r) for r in range(n)], "sum")
    assert [int(t) for t in total] == [sum(range(n))] * n
    assert all(x.shape == (0, 4) for x in ranks.run(c10d.all_gather_into_tensor.default, [torch.ones(0, 4)] * n, n))


def test_collectives_in_flight_are_waited_for_in_any_order(ranks):
    n = len(ranks.groups)
    given = [operands(n, size) for size in (10, 100_000, 1)]
    started = [ranks.start(c10d.all_gather_into_tensor.default, x, n) for x in given]
    for x, out in reversed(list(zip(given, started, strict=True))):
        for mine in out:
            assert c10d.wait_tensor(mine).equal(torch.cat(x))


def test_an_operand_may_change_once_its_collective_has_begun(ranks):
    n = len(ranks.groups)
    given = operands(n, 2 * n)
    kept = [x.clone() for x in given]
    cases = [
        (c10d.all_gather_into_tensor.default, (n,)),
        (c10d.reduce_scatter_tensor.default, ("sum", n)),
        (c10d.all_to_all_single.default, ([2] * n, [2] * n)),
    ]
    for target, args in cases:
        out = ranks.start(target, given, *args)
        for x in given:
            x.zero_()
        for mine, expected in zip(out, join(target, kept, (*args, "")), strict=True):
            assert c10d.wait_tensor(mine).equal(expected)
        for x, value in zip(given, kept, strict=True):
            x.copy_(value)


def test_memory_is_used_again(ranks):
    """A step's collectives need no more segments in the hundredth step than in the second."""
    n = len(ranks.groups)
    held = []
    for _ in range(20):
        for size in (1000, 200_000, 30):
            ranks.run(c10d.all_reduce.default, operands(n, size), "sum")
        held.append([len(g._mailbox._segments) for g in ranks.groups])
    assert held[1] == held[-1]


def test_other_collectives_on_other_ranks_are_refused():
    ranks = Ranks(2)
    first = c10d.all_gather_into_tensor(torch.ones(4), 2, ranks.names[0])
    second = c10d.reduce_scatter_tensor(torch.ones(4), "sum", 2, ranks.names[1])
    with pytest.raises(TransportError, match=r"all-gather of 16 bytes here, and reduce-scatter of 8 bytes on rank 1"):
        c10d.wait_tensor(first)
    with pytest.raises(TransportError, match=r"reduce-scatter of 8 bytes here, and all-gather of 16 bytes on rank 0"):
        c10d.wait_tensor(second)
    ranks.close()


def test_a_rank_that_has_ended_or_does_not_come():
    a, b = (Mailbox(row, 0.05, KINDS) for row in links(2))
    one = torch.ones(1)
    number = a.send(0, {1: one})
    with pytest.raises(TransportError, match=r"rank 1 of the group did not start its apple within 0.05 s"):
        a.read(number, 0, 1, one)
    b.send(0, {0: 2 * one})
    del b
    assert a.read(number, 0, 1, one).item() == 2  # what was sent before is there
    with pytest.raises(TransportError, match="rank 1 of the group has ended"):
        a.read(a._sent, 0, 1, one)
    with pytest.raises(TransportError, match="rank 1 of the group has ended"):
        a.send(0, {1: one})


def test_a_listener_links_a_group_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    listeners = [Listener() for _ in range(3)]
    paths = [each.path for each in listeners]
    late = listeners[2].links(2, paths)  # connects to those before it, which take it in later
    middle = listeners[1].links(1, paths)
    early = listeners[0].links(0, paths)
    for rank, row in enumerate((early, middle, late)):
        assert [x is None for x in row] == [other == rank for other in range(3)]
    assert early[2] is not None and late[0] is not None
    early[2].send(b"hello")
    assert late[0].recv(5) == b"hello"
    assert not list(tmp_path.iterdir())
