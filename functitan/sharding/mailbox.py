"""Messages of tensors between the processes of one machine, through shared memory.

What a rank sends it writes into a segment of its own shared memory, and tells its readers so in one short message over
a socket. They map the segment when they first hear of it, and say in their own messages up to where they have read, so
that it can be written again. Sending never waits for a reader: while all segments are unread there is a new one.
"""

from __future__ import annotations

import array
import mmap
import os
import shutil
import socket
import struct
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from functitan.errors import FunctitanError

#: A message: its number, the number of the segment and its size, where in it the reader's part begins and how many
#: bytes it has, what kind of message the sender means, and the first message that the sender has not read itself.
_MESSAGE = struct.Struct("<7Q")
_ALIGNED = 64
_SMALLEST = 1 << 16


class TransportError(FunctitanError):
    """Processes of one machine lost each other, or send what others do not expect."""


@dataclass
class _Segment:
    """Shared memory of this rank. The file has no name: it goes with the last process that holds it.

    Attributes:
        number: its name in messages.
        descriptor: of the file.
        memory: uint8.
        message: the last that was written to it.
        known: the ranks that have the descriptor.
    """

    number: int
    descriptor: int
    memory: torch.Tensor
    message: int = -1
    known: set[int] = field(default_factory=set)


@dataclass
class _Peer:
    """What this rank knows of another.

    Attributes:
        link: where its messages come in order.
        parts: by message that came and is not read, the kind and this rank's part.
        segments: its memory.
        unread: the first message that it has not read.
    """

    link: socket.socket
    parts: dict[int, tuple[int, torch.Tensor]] = field(default_factory=dict)
    segments: dict[int, torch.Tensor] = field(default_factory=dict)
    unread: int = 0


class Mailbox:
    """One rank's end. All ranks send the same numbers of messages, and read each of them when they like.

    Args:
        links: per rank the socket to it; None for this rank.
        timeout: seconds that reading waits for a message.
        kinds: names of the kinds of messages, for errors.
    """

    def __init__(self, links: Sequence[socket.socket | None], timeout: float, kinds: Sequence[str]) -> None:
        self._peers = {rank: _Peer(link) for rank, link in enumerate(links) if link is not None}
        self._timeout = timeout
        self._kinds = kinds
        self._segments: list[_Segment] = []
        self._sent = 0
        self._read: set[int] = set()
        self._unread = 0
        bound = struct.pack("ll", int(timeout), int(timeout % 1 * 1e6))
        for peer in self._peers.values():
            peer.link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, bound)
            peer.link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, bound)

    def send(self, kind: int, parts: Mapping[int, torch.Tensor]) -> int:
        """Send every other rank its part; the number of the message. One tensor for several ranks is written once.

        Raises:
            TransportError: another rank has ended.
        """
        for peer in self._peers.values():
            while self._receive(peer, socket.MSG_DONTWAIT):
                pass
        number, self._sent = self._sent, self._sent + 1
        places: dict[int, int] = {}
        size = 0
        for part in parts.values():
            if id(part) not in places:
                places[id(part)] = size
                size += -(-part.nbytes // _ALIGNED) * _ALIGNED
        segment = self._segment(size)
        segment.message = number
        written: set[int] = set()
        for rank, part in parts.items():
            at = places[id(part)]
            if part.numel() and at not in written:
                written.add(at)
                segment.memory[at : at + part.nbytes].view(part.dtype).view(part.shape).copy_(part)
            facts = (number, segment.number, segment.memory.numel(), at, part.nbytes, kind, self._unread)
            self._tell(rank, segment, _MESSAGE.pack(*facts))
        return number

    def read(self, number: int, kind: int, rank: int, like: torch.Tensor) -> torch.Tensor:
        """A rank's part of a message, flat, in its memory, with the dtype of a tensor of so many elements.

        Raises:
            TransportError: the rank has ended, is not there in time, or sent something else.
        """
        peer = self._peers[rank]
        while number not in peer.parts:
            try:
                open_ = self._receive(peer, 0)
            except BlockingIOError:
                raise TransportError(
                    f"rank {rank} of the group did not start its {self._kinds[kind]} within {self._timeout:g} s "
                    "(FUNCTITAN_TIMEOUT); it hangs, or works longer than that on something else."
                ) from None
            if not open_:
                raise _ended(rank)
        found, part = peer.parts.pop(number)
        if (found, part.numel()) != (kind, like.nbytes):
            raise TransportError(
                f"collective {number} of the group is {self._kinds[kind]} of {like.nbytes} bytes here, and "
                f"{self._kinds[found]} of {part.numel()} bytes on rank {rank} of the group. All ranks of a group start "
                "the same collectives in the same order."
            )
        return part.view(like.dtype)

    def close(self, number: int) -> None:
        """This rank has read a message: its memory may be written again."""
        self._read.add(number)
        while self._unread in self._read:
            self._read.remove(self._unread)
            self._unread += 1

    def _segment(self, size: int) -> _Segment:
        """The smallest segment that takes so much and that nobody reads any more, a new one if there is none."""
        unread = min((peer.unread for peer in self._peers.values()), default=self._sent)
        free = [s for s in self._segments if s.message < unread and s.memory.numel() >= size]
        if not free:
            descriptor = os.memfd_create("functitan")
            size = max(_SMALLEST, 1 << (size - 1).bit_length())
            os.ftruncate(descriptor, size)
            free.append(_Segment(len(self._segments), descriptor, _mapped(descriptor, size)))
            self._segments += free
        return min(free, key=lambda s: s.memory.numel())

    def _tell(self, rank: int, segment: _Segment, message: bytes) -> None:
        beside = []
        if rank not in segment.known:
            segment.known.add(rank)
            beside.append((socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [segment.descriptor])))
        try:
            self._peers[rank].link.sendmsg([message], beside)
        except OSError as error:
            raise _ended(rank) from error

    def _receive(self, peer: _Peer, flags: int) -> bool:
        """Take in one message; False when there is none and ``flags`` say not to wait, or when its rank has ended."""
        try:
            message, beside, _, _ = peer.link.recvmsg(_MESSAGE.size, socket.CMSG_SPACE(4), flags)
        except BlockingIOError:
            if flags:
                return False
            raise
        except ConnectionError:
            return False
        if not message:
            return False
        number, segment, size, at, nbytes, kind, unread = _MESSAGE.unpack(message)
        for _, _, data in beside:
            (descriptor,) = array.array("i", data)
            peer.segments[segment] = _mapped(descriptor, size)
            os.close(descriptor)
        peer.parts[number] = (kind, peer.segments[segment][at : at + nbytes])
        peer.unread = unread
        return True


def _mapped(descriptor: int, size: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)


def _ended(rank: int) -> TransportError:
    return TransportError(f"rank {rank} of the group has ended, and others wait for it; its own error says why.")


class Listener:
    """Where other processes of this machine can reach this one until all have done so.

    Attributes:
        path: of the socket.
    """

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="functitan-")  # for this user alone
        self.path = os.path.join(self._folder, "link")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind(self.path)
        self._socket.listen(1024)

    def links(self, own: int, paths: Sequence[str]) -> list[socket.socket | None]:
        """Connect all processes of a group, each of which calls this with its rank and the paths of all, in order."""
        links: list[socket.socket | None] = [None] * len(paths)
        for rank, path in enumerate(paths[:own]):
            link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            link.connect(path)
            link.send(struct.pack("<Q", own))
            links[rank] = link
        for _ in paths[own + 1 :]:
            link, _ = self._socket.accept()
            (rank,) = struct.unpack("<Q", link.recv(8))
            links[rank] = link
        self.close()
        return links

    def close(self) -> None:
        """Be reachable no longer; links stay."""
        self._socket.close()
        shutil.rmtree(self._folder)


def place() -> str:
    """Equal for processes that can share memory: of one machine, with the same files."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/mnt')}"
