"""The Unix connection of a `shm` or `cuda_ipc` pair: how the two meet, and what they say to each other while data moves.

    receiver → sender   Hello, with descriptors: for `shm` that of the window, for `cuda_ipc` those of board and lifeline
    sender → receiver   READY                       it has mapped the memory
    receiver → sender   GRANT sequence, where       write this and the following segments there; nowhere: it is not wanted
    sender → receiver   DONE sequence | SKIPPED sequence     written, or not; either way it is not touched again

The end of the connection says that the pair is over. For `cuda_ipc` the proof that nothing is written any more is the end of
the *lifeline*, a pipe whose only writing end is the sender's: it closes it after it has unmapped the pool, and for a process
that dies the kernel closes it after its memory is gone. Unlike a connection, a pipe cannot be shut down while its ends live.

The listening socket has an unguessable name in the abstract namespace: nothing in any file system, gone with its process,
and only for processes of one network namespace. A process that connects must run as our own user.
"""

import array
import fcntl
import os
import secrets
import socket
import struct
import time
from collections.abc import Sequence
from itertools import accumulate
from typing import Final

import numpy as np

from kvtransfer.memory.shared import SEALS
from kvtransfer.session.limits import WINDOW_SEGMENTS_MAX
from kvtransfer.transports.side_channel import wait_readable
from kvtransfer.transports.transport import PairBroken

READY: Final = 1
GRANT: Final = 2
DONE: Final = 3
SKIPPED: Final = 4
MESSAGE_BYTES_MAX: Final = 128 << 10  # well below what a socket buffer takes at once
DESCRIPTORS: Final = 2  # with Hello, at most
GRANT_BLOCKS_MAX: Final = (MESSAGE_BYTES_MAX - 16) // 4 - WINDOW_SEGMENTS_MAX

_HEAD = struct.Struct("<II")
_WORD = "<u4"
_CREDENTIALS = struct.Struct("iII")
_TIMEVAL = struct.Struct("ll")


def pack_grants(targets: Sequence[Sequence[int]]) -> bytes:
    """The blocks of segments that follow each other; at most WINDOW_SEGMENTS_MAX and GRANT_BLOCKS_MAX. How many segments
    there are, how many blocks each has, and the blocks."""
    words = [len(targets), *map(len, targets)]
    for block_ids in targets:
        words += block_ids
    return np.array(words, dtype=_WORD).tobytes()


def unpack_grants(payload: bytes, sub_blocks: int) -> list[list[int]]:
    """The blocks of each segment, all of a pool of so many. Raises `PairBroken`."""
    if not payload or len(payload) % 4:
        raise PairBroken(f"the receiver broke the protocol: a grant of {len(payload)} bytes")
    words = np.frombuffer(payload, dtype=_WORD)
    segments = int(words[0])
    counts, blocks = words[1 : 1 + segments].tolist(), words[1 + segments :]
    if not 1 <= segments <= WINDOW_SEGMENTS_MAX or len(counts) != segments or sum(counts) != blocks.size:
        raise PairBroken(f"the receiver broke the protocol: a grant of {blocks.size} blocks for {segments} segments")
    if blocks.size and int(blocks.max()) >= sub_blocks:
        raise PairBroken(f"the receiver granted block {blocks.max()} of a pool of {sub_blocks}")
    ids, ends = blocks.tolist(), list(accumulate(counts))
    return [ids[end - count : end] for count, end in zip(counts, ends, strict=True)]


class UnixConnection:
    """Messages in both directions. Calls return at once, unless they say otherwise, and raise `PairBroken` when it is over."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        self._socket = connected
        self._buffer = memoryview(bytearray(MESSAGE_BYTES_MAX))  # allocating it anew takes longer than reading

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, kind: int, sequence: int, payload: bytes = b"") -> bool:
        """False if there is no room for it now."""
        try:
            self._socket.send(_HEAD.pack(kind, sequence) + payload)
        except BlockingIOError:
            return False
        except OSError as error:
            # Unlike an end of stream, this does not mean that all data was read: earlier messages may still be waiting.
            raise PairBroken(f"the peer is gone: {error.strerror}") from None
        return True

    def receive(self) -> tuple[int, int, bytes] | None:
        """(kind, sequence, payload) of the next message; None if there is none now."""
        try:
            size = self._socket.recv_into(self._buffer)
        except BlockingIOError:
            return None
        except OSError:
            size = 0
        if not size:
            raise PairBroken("the peer is gone, or has ended the connection")
        if size < _HEAD.size:
            raise PairBroken(f"the peer sent {size} bytes that are no message")
        kind, sequence = _HEAD.unpack_from(self._buffer)
        return kind, sequence, bytes(self._buffer[_HEAD.size : size])

    def wait(self, timeout_ms: int) -> tuple[int, int, bytes]:
        """The next message; waits for it."""
        deadline = time.monotonic() + timeout_ms / 1e3
        while (message := self.receive()) is None:
            wait_readable(self._socket, deadline, "the peer said nothing")
        return message

    def hang_up(self) -> None:
        """The other end reads our end of the connection as ended."""
        try:
            self._socket.shutdown(socket.SHUT_WR)
        except OSError:
            return  # it was gone before

    def close(self) -> None:
        self._socket.close()


def ready(connected: socket.socket, timeout_ms: int) -> UnixConnection:
    """The connection, when the sender has said that it can begin. Raises `PairBroken`."""
    connection = UnixConnection(connected)
    kind, _, _ = connection.wait(timeout_ms)
    if kind != READY:
        raise PairBroken(f"the sender broke the protocol: message {kind} before it was ready")
    return connection


def check_sealed(descriptor: int, size: int) -> None:
    """Raises `PairBroken` unless this memory has this size for good: one that can still change could end this process."""
    if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & SEALS != SEALS or os.fstat(descriptor).st_size != size:
        raise PairBroken("the receiver's memory is not sealed, or not of the size it says")


class UnixListener:
    """The receiver's listening socket. `name` is what a sender must know."""

    def __init__(self) -> None:
        self.name = secrets.token_hex(16)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind(_address(self.name))
        self._socket.listen(4)
        self._socket.setblocking(False)

    def accept(self, timeout_ms: int) -> socket.socket:
        """Returns the first connection from our own user. Closes the listening socket. Raises `PairBroken` or `OSError`."""
        deadline = time.monotonic() + timeout_ms / 1e3
        try:
            while True:
                wait_readable(self._socket, deadline, "the sender did not come")
                connected, _ = self._socket.accept()
                if is_ours(connected):
                    return connected
                connected.close()
        finally:
            self._socket.close()

    def abandon(self) -> None:
        """Make `accept` fail now, from any thread."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # closed already


def connect(name: str, timeout_ms: int) -> socket.socket:
    """Connect to a `UnixListener` of this host. Raises `OSError`, or `PairBroken` if it belongs to another user or does not
    accept in time: other processes may fill its backlog."""
    connecting = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # Not settimeout: with that, a full backlog is an error at once.
    connecting.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(*divmod(timeout_ms * 1000, 1_000_000)))
    try:
        try:
            connecting.connect(_address(name))
        except BlockingIOError:
            raise PairBroken("the receiver did not accept in time") from None
        if not is_ours(connecting):
            raise PairBroken("the receiver runs as another user")
    except (OSError, PairBroken):
        connecting.close()
        raise
    return connecting


def is_ours(connected: socket.socket) -> bool:
    """Whether the process at the other end runs as our own user."""
    raw = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(raw)
    return bool(uid == os.geteuid())


def peer_process(connected: socket.socket) -> int:
    """A descriptor of the process at the other end, readable when that has ended; -1 where there can be none: it has ended
    already, or its number means nothing here (another namespace, an old kernel). The caller closes it."""
    raw = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, _, _ = _CREDENTIALS.unpack(raw)
    try:
        return os.pidfd_open(pid)
    except OSError:
        return -1


def send_with_descriptors(connected: socket.socket, message: bytes, descriptors: list[int]) -> None:
    socket.send_fds(connected, [message], descriptors)


def receive_with_descriptors(connected: socket.socket, size: int, timeout_ms: int) -> tuple[bytes, list[int]]:
    """A message of at most `size` bytes and the descriptors with it, at most DESCRIPTORS; the caller closes them."""
    connected.setblocking(False)
    wait_readable(connected, time.monotonic() + timeout_ms / 1e3, "the receiver said nothing")
    room = socket.CMSG_SPACE(DESCRIPTORS * array.array("i").itemsize)
    message, ancillary, _, _ = connected.recvmsg(size, room, socket.MSG_CMSG_CLOEXEC)
    descriptors = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    return message, descriptors.tolist()


def _address(name: str) -> str:
    return f"\0crossdock-kv-{name}"
