"""The transport `shm`: through memory that the two processes of a pair share. For two processes of one host and user.

The receiver makes a *window* for each pair: an anonymous file of some tens of MiB that this one sender maps. Nothing else of
the receiver is ever mapped by another process. Segments cross in five moves: the announcement (control link); the receiver's
grant of a place in the window; the sender's copy to it; its word that it is done; and the receiver's copy from there to the
target blocks.

The sender may write to its window at any time, so its contents are not trusted. The receiver digests its own copy, which no
other process can change, and compares the digests with those of the Commit. A segment that is not wanted any more is answered
at once, since only the receiver itself writes to its blocks; its place is used again when the sender has said that it is done.
"""

import os
import struct
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import torch

from kvtransfer.memory.copying import Copier
from kvtransfer.memory.digests import Digester, unpack
from kvtransfer.memory.pool import PoolRows
from kvtransfer.memory.shared import SharedMemory, map_shared
from kvtransfer.session.limits import SHM_WINDOW_BYTES, WINDOW_SEGMENTS_MAX
from kvtransfer.transports.granted import Granted, GrantedWriter, GrantingReceiver
from kvtransfer.transports.transport import (
    Answer,
    Channel,
    Inbox,
    Listener,
    LocalEnd,
    PairBroken,
    Rendezvous,
    SegmentJob,
    Transport,
)
from kvtransfer.transports.unix_socket import (
    GRANT,
    READY,
    UnixConnection,
    UnixListener,
    check_sealed,
    connect,
    ready,
    receive_with_descriptors,
    send_with_descriptors,
)

_HELLO = struct.Struct("<8sQQ")  # magic, sub-blocks in the window, bytes of a sub-block
_MAGIC = b"cdkvshm3"
_WINDOW_BYTES_MAX = 1 << 36
_WORD = "<u4"
_UNWANTED_PLACE = 0xFFFF_FFFF  # the word in place of a place: the segment is not wanted


def pack_places(places: Sequence[int | None]) -> bytes:
    """The places of segments that follow each other, the first sub-block of each in the window; None: it is not wanted."""
    return np.array([_UNWANTED_PLACE if one is None else one for one in places], dtype=_WORD).tobytes()


def unpack_places(payload: bytes) -> list[int | None]:
    """Raises `PairBroken`. Whether a segment fits there is known when it is written."""
    if not payload or len(payload) % 4 or len(payload) > 4 * WINDOW_SEGMENTS_MAX:
        raise PairBroken(f"the receiver broke the protocol: a grant of {len(payload)} bytes")
    return [None if word == _UNWANTED_PLACE else word for word in np.frombuffer(payload, dtype=_WORD).tolist()]


class ShmWriter(GrantedWriter[int | None]):
    """The sender's end: writes to the places in the window that it is granted."""

    def __init__(self, local: LocalEnd, connection: UnixConnection, window: PoolRows) -> None:
        super().__init__(local, connection)
        self._copier = Copier(local.rows, window, local.digests or Digester(local.rows))
        self._window_sub_blocks = window.sub_blocks

    def _unpack(self, payload: bytes) -> list[int | None]:
        return unpack_places(payload)

    def _write(self, job: SegmentJob, where: int | None, go_on: Callable[[int], bool]) -> bytes:
        assert job.block_ids is not None
        if where is None:
            return b""
        if where + job.blocks > self._window_sub_blocks:
            raise PairBroken(f"the receiver granted {job.blocks} blocks from {where} of {self._window_sub_blocks}")
        return self._copier.copy(job.block_ids, range(where, where + job.blocks), go_on, job.digest)


class WindowRing:
    """A ring of `sub_blocks` sub-blocks. Contiguous ranges of it are taken and given back in the same order."""

    def __init__(self, sub_blocks: int) -> None:
        self._sub_blocks = sub_blocks
        self._held: deque[tuple[int, int]] = deque()  # (first sub-block, sub-blocks), the oldest first

    def take(self, count: int) -> int | None:
        """Take a contiguous range of `count` sub-blocks. Returns its first sub-block, or None if there is no room now."""
        first = self._place(count)
        if first is not None:
            self._held.append((first, count))
        return first

    def give_back(self) -> None:
        """Give back the range that was taken first."""
        self._held.popleft()

    def take_back(self) -> None:
        """Undo the last `take`."""
        self._held.pop()

    def _place(self, count: int) -> int | None:
        assert count > 0
        if not self._held:
            return 0 if count <= self._sub_blocks else None
        oldest, (last, length) = self._held[0][0], self._held[-1]
        end = last + length
        if end <= oldest:  # it has gone round
            return end if end + count <= oldest else None
        if end + count <= self._sub_blocks:
            return end
        return 0 if count <= oldest else None


class ShmReceives(GrantingReceiver[int]):
    """The receiver's end: grants places in the window, and copies what is written there to the target blocks."""

    def __init__(self, local: LocalEnd, connection: UnixConnection, memory: SharedMemory) -> None:
        super().__init__(local, connection)
        self._rows = local.rows
        self._sub_block_bytes = local.rows.layout.block_bytes
        self._window = memory.tensor
        self._ring = WindowRing(memory.bytes // self._sub_block_bytes)

    def revoke(self, job: SegmentJob) -> None:
        if self._inbox is not None:
            self._inbox.wake()

    def _take_in(self, inbox: Inbox, answer: Answer) -> None:
        super()._take_in(inbox, answer)
        if inbox.was_woken():
            # Given up: nothing but this thread touches their blocks, so they are the session's again at once.
            for one in (*self._granted, *self._outbox):
                if one.job.owner is not None and one.job.block_ids is None and not one.answered:
                    one.answered = True
                    answer(one.job, b"")

    def _grant(self) -> bool:
        places: list[int | None] = []
        for one in self._outbox:
            if len(self._granted) + len(places) >= WINDOW_SEGMENTS_MAX:
                break
            one.where = None if one.job.block_ids is None else self._ring.take(one.job.blocks)
            if one.where is None and one.job.block_ids is not None:
                break
            places.append(one.where)
        if not places:
            return True
        if not self._connection.send(GRANT, self._outbox[0].job.sequence, pack_places(places)):
            for place in reversed(places):
                if place is not None:
                    self._ring.take_back()
            return False
        self._granted.extend(self._outbox.popleft() for _ in places)
        return True

    def _written(self, one: Granted[int], is_done: bool) -> bytes:
        if is_done != (one.where is not None):
            raise PairBroken(f"the sender broke the protocol: segment {one.job.sequence} was {is_done=}")
        if one.where is None:
            return b""
        segment_digest = self._land(one.job, one.where)
        self._ring.give_back()
        return segment_digest

    def _land(self, job: SegmentJob, place: int) -> bytes:
        """Copy what is written to its blocks, if it is still wanted; the digest of the copy."""
        block_ids = job.block_ids
        if block_ids is None:
            return b""
        written = self._window[place * self._sub_block_bytes : (place + job.blocks) * self._sub_block_bytes]
        if not self._rows.is_flat:
            written = written.clone()  # the sender may go on writing, and what is digested must be what is kept
        return unpack(self._rows.as_packed(written), self._rows, block_ids)


def window_sub_blocks(local: LocalEnd) -> int:
    """Room for two of the largest segments at least, so that one is written while the other is read."""
    return max(2 * local.segment_blocks, local.settings.shm_window_bytes // local.rows.layout.block_bytes)


class _ShmListener(Listener):
    def __init__(self, local: LocalEnd) -> None:
        self._local = local
        self._rendezvous_listener = UnixListener()
        self.meeting = Rendezvous(Shm.name, "", 0, self._rendezvous_listener.name)

    def meet(self) -> Channel:
        local, timeout_ms = self._local, self._local.settings.rendezvous_timeout_ms
        connected = self._rendezvous_listener.accept(timeout_ms)
        try:
            sub_block_bytes, sub_blocks = local.rows.layout.block_bytes, window_sub_blocks(local)
            memory = SharedMemory(sub_blocks * sub_block_bytes)
            try:
                send_with_descriptors(connected, _HELLO.pack(_MAGIC, sub_blocks, sub_block_bytes), [memory.descriptor])
            finally:
                memory.close()  # the mapping stays
            return ShmReceives(local, ready(connected, timeout_ms), memory)
        except (OSError, PairBroken):
            connected.close()
            raise

    def abandon(self) -> None:
        self._rendezvous_listener.abandon()


class Shm(Transport):
    name = "shm"
    devices = ("cpu",)
    skips_unwanted = True
    confidential = True

    def unusable(self, local: LocalEnd, same_host: bool) -> str:
        return "" if same_host else "another host, user or namespace"

    def pair_bytes(self, segment_bytes: int) -> int:
        return max(2 * segment_bytes, SHM_WINDOW_BYTES)

    def listen(self, local: LocalEnd) -> Listener:
        return _ShmListener(local)

    def connect(self, local: LocalEnd, meeting: Rendezvous) -> Channel:
        timeout_ms = local.settings.rendezvous_timeout_ms
        connected = connect(meeting.secret, timeout_ms)
        try:
            message, descriptors = receive_with_descriptors(connected, _HELLO.size, timeout_ms)
            window = mapped_window(local, message, descriptors)
            connection = UnixConnection(connected)
            connection.send(READY, 0)
        except (OSError, PairBroken):
            connected.close()
            raise
        return ShmWriter(local, connection, window)


def mapped_window(local: LocalEnd, message: bytes, descriptors: list[int]) -> PoolRows:
    """The window of this pair, mapped; closes the descriptors. Nothing that the receiver says is believed before it is checked:
    a size that can still change could end this process. Raises `PairBroken` or `OSError`."""
    try:
        if len(message) != _HELLO.size or len(descriptors) != 1:
            raise PairBroken(f"the receiver sent {len(message)} bytes and {len(descriptors)} descriptors for a window")
        magic, sub_blocks, sub_block_bytes = _HELLO.unpack(message)
        if magic != _MAGIC:
            raise PairBroken("the receiver speaks another version of shm")
        if sub_block_bytes != local.rows.layout.block_bytes:
            raise PairBroken(
                f"the receiver's blocks have {sub_block_bytes} bytes, ours {local.rows.layout.block_bytes}"
            )
        if not 0 < sub_blocks <= _WINDOW_BYTES_MAX // sub_block_bytes:
            raise PairBroken(f"the receiver's window is of {sub_blocks} blocks")
        check_sealed(descriptors[0], sub_blocks * sub_block_bytes)
        mapped = map_shared(descriptors[0], sub_blocks * sub_block_bytes)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    return PoolRows.of_bytes(torch.frombuffer(mapped, dtype=torch.uint8), local.rows.layout, 1)
