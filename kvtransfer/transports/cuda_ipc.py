"""The transport `cuda_ipc`: the sender's GPU copies straight into the receiver's blocks. Both processes must run on one host,
as one user, and use the same GPU.

`tests/gpu` runs it on a GPU. The other parts are tested without a GPU: the checks of the peer's messages, the copy and
checksum arithmetic and both ends together on CPU tensors.

The receiver's first message holds a handle of its pool (`kvtransfer.memory.cuda`). The GPU copies and makes checksums
(`device_copy`) on a separate stream. The sender sends DONE when its stream has finished. So work that the receiver enqueues
later reads the written data, and no CUDA event must be shared. The end of the lifeline alone proves little: a process that is
killed closes its descriptors in no particular order, so its kernels may still run when the connection ends. So the receiver
waits until the process has ended; by then the driver has destroyed its context.
"""

import fcntl
import os
import select
import socket
import struct
from collections.abc import Callable
from itertools import islice
from typing import Final

import numpy as np

from kvtransfer.memory.cuda import HANDLE_BYTES, DeviceMemory, Mapping, device_uuid
from kvtransfer.memory.device_copy import DIGEST_EVERY_MAX, DeviceCopier, DeviceDigester
from kvtransfer.memory.layout import KvLayout
from kvtransfer.memory.pool import PoolRows
from kvtransfer.memory.shared import SEALS, map_shared
from kvtransfer.session.limits import WINDOW_SEGMENTS_MAX
from kvtransfer.transports.granted import Granted, GrantedWriter, GrantingReceiver
from kvtransfer.transports.transport import (
    MAX_QUEUED_SEGMENTS,
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
    GRANT_BLOCKS_MAX,
    READY,
    UnixConnection,
    UnixListener,
    check_sealed,
    connect,
    pack_grants,
    peer_process,
    ready,
    receive_with_descriptors,
    send_with_descriptors,
    unpack_grants,
)

_HELLO = struct.Struct(f"<8sQQQQQ16s{HANDLE_BYTES}s")
"""Magic, bytes of the pool's memory, blocks in it, sub-blocks in a block, bytes of a sub-block, one segment in how many is
digested, the GPU's id, the handle of the memory."""
_MAGIC = b"cdkvipc1"
_RATIO_MAX: Final = 4096
DEATH_WAIT_MS: Final = 10_000  # still alive then, the process has closed its connection in order, after its last write


class CancelFlags:
    """Revoked sequences: slot `sequence % MAX_QUEUED_SEGMENTS` holds `sequence + 1`. No more are under way at once."""

    SIZE = 8 * MAX_QUEUED_SEGMENTS

    def __init__(self, descriptor: int) -> None:
        self._words = np.frombuffer(map_shared(descriptor, self.SIZE), dtype=np.uint64)

    def revoke(self, sequence: int) -> None:
        self._words[sequence % MAX_QUEUED_SEGMENTS] = sequence + 1

    def is_revoked(self, sequence: int) -> bool:
        return int(self._words[sequence % MAX_QUEUED_SEGMENTS]) == sequence + 1


def send_hello(connected: socket.socket, hello: bytes, descriptors: list[int], their_lifeline: int) -> CancelFlags:
    """The receiver's first word, with these descriptors, that of a new board, and the sender's end of the lifeline, of
    which our own copy is closed."""
    try:
        board_memory = os.memfd_create("crossdock-kv-board", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(board_memory, CancelFlags.SIZE)
            fcntl.fcntl(board_memory, fcntl.F_ADD_SEALS, SEALS)
            send_with_descriptors(connected, hello, [*descriptors, board_memory, their_lifeline])
            return CancelFlags(board_memory)
        finally:
            os.close(board_memory)
    finally:
        os.close(their_lifeline)


class CudaWriter(GrantedWriter[list[int]]):
    """The sender's end: writes to the blocks that it is granted."""

    def __init__(
        self,
        local: LocalEnd,
        connection: UnixConnection,
        mapping: Mapping,
        target: PoolRows,
        told: "_Told",
        lifeline: int,
    ) -> None:
        super().__init__(local, connection)
        self._rows, self._mapping = local.rows, mapping
        self._copier: DeviceCopier | None = DeviceCopier(local.rows, target, told.digest_every)
        self._target_sub_blocks = target.sub_blocks
        self._board: CancelFlags | None = told.board
        self._lifeline = lifeline

    def _unpack(self, payload: bytes) -> list[list[int]]:
        return unpack_grants(payload, self._target_sub_blocks)

    def _write(self, job: SegmentJob, where: list[int], go_on: Callable[[int], bool]) -> bytes:
        board = self._board
        assert job.block_ids is not None and self._copier is not None and board is not None
        if len(where) not in (0, job.blocks):
            raise PairBroken(f"the receiver granted {len(where)} blocks for a segment of {job.blocks}")

        def is_wanted(copied: int) -> bool:
            return go_on(copied) and not board.is_revoked(job.sequence)

        return self._copier.copy(job.block_ids, where, is_wanted, job.digest) if where else b""

    def settle(self, inbox: Inbox, answer: Answer) -> None:
        # The lifeline ends last: its end says that nothing is written any more.
        self._copier = None
        try:
            self._rows.wait()
            self._mapping.close()
        except RuntimeError:
            pass  # the context is broken, and with it every kernel; the driver unmaps when this process ends
        self._board = None
        os.close(self._lifeline)
        super().settle(inbox, answer)


class CudaReceiver(GrantingReceiver[tuple[int, ...]]):
    """The receiver's end: grants target blocks, and digests them when they are written.

    Stale writes are prevented by order, not by timeouts: granted blocks are not reused until the sender says DONE or SKIPPED
    or its process has ended. A receiver that no longer wants a segment writes its sequence to the *board*, a page shared by
    the two; the sender looks there before each piece and skips the rest. This only makes the answer come sooner.
    """

    def __init__(
        self, local: LocalEnd, connection: UnixConnection, board: CancelFlags, lifeline: int, process: int
    ) -> None:
        super().__init__(local, connection)
        self._digester = DeviceDigester(local.rows, local.settings.digest_every)
        self._board, self._lifeline = board, lifeline
        self._process = process  # readable when the sender's process has ended; -1: there is none

    def revoke(self, job: SegmentJob) -> None:
        self._board.revoke(job.sequence)

    def _grant(self) -> bool:
        while self._outbox and len(self._granted) < WINDOW_SEGMENTS_MAX:
            taken: list[Granted[tuple[int, ...]]] = []
            blocks = 0
            for one in islice(self._outbox, WINDOW_SEGMENTS_MAX - len(self._granted)):
                blocks += one.job.blocks
                if blocks > GRANT_BLOCKS_MAX:
                    break
                one.where = one.job.block_ids
                taken.append(one)
            targets = pack_grants([one.where or () for one in taken])
            if not self._connection.send(GRANT, self._outbox[0].job.sequence, targets):
                return False
            self._granted.extend(self._outbox.popleft() for _ in taken)
        return True

    def _written(self, one: Granted[tuple[int, ...]], is_done: bool) -> bytes:
        block_ids = one.job.block_ids if one.where else None
        if block_ids is None:
            return b""
        if not is_done:
            raise PairBroken(f"the sender skipped segment {one.job.sequence}, which is wanted")
        return self._digester.digest(block_ids)

    def settle(self, inbox: Inbox, answer: Answer) -> None:
        for one in self._granted:
            one.job.block_ids = None
            self._board.revoke(one.job.sequence)
        self._connection.hang_up()
        poll = select.poll()
        for source in (inbox, self._connection, self._lifeline):
            poll.register(source, select.POLLIN)
        while self._granted:
            ready = dict(poll.poll(inbox.settle_limit_ms))
            inbox.take()
            try:
                if self._connection.fileno() in ready:
                    self._hear(answer)
                elif not ready or self._lifeline in ready:
                    break
            except PairBroken:
                # The connection is of no use now, but the sender may still write: only the end of its lifeline proves
                # otherwise.
                poll.unregister(self._connection)
        os.close(self._lifeline)
        super().settle(inbox, answer)
        if self._granted:
            wait_until_gone(self._process, inbox.settle_limit_ms or DEATH_WAIT_MS)
        if self._process >= 0:
            os.close(self._process)


def wait_until_gone(process: int, limit_ms: int) -> None:
    """Wait until the process of this descriptor has ended, at most `limit_ms`. Without a descriptor (-1), always wait
    `limit_ms`."""
    poll = select.poll()
    if process >= 0:
        poll.register(process, select.POLLIN)
    poll.poll(limit_ms)


class _Told:
    """The receiver's description of itself, checked before anything is mapped. Raises `PairBroken` or `OSError`."""

    def __init__(self, sub_blocks: KvLayout, device: bytes, message: bytes, descriptors: list[int]) -> None:
        if len(message) != _HELLO.size or len(descriptors) != 2:
            raise PairBroken(f"the receiver sent {len(message)} bytes and {len(descriptors)} descriptors for a pool")
        magic, self.pool_bytes, blocks, self.ratio, sub_block_bytes, self.digest_every, uuid, self.handle = (
            _HELLO.unpack(message)
        )
        if magic != _MAGIC:
            raise PairBroken("the receiver speaks another version of cuda_ipc")
        if uuid != device:
            raise PairBroken("the two are on different GPUs")
        self.used = check_fit(sub_blocks, self.pool_bytes, blocks, self.ratio, sub_block_bytes)
        if not 1 <= self.digest_every <= DIGEST_EVERY_MAX:
            raise PairBroken(f"the receiver wants one segment in {self.digest_every} digested")
        check_sealed(descriptors[0], CancelFlags.SIZE)
        self.board = CancelFlags(descriptors[0])


def check_fit(sub_blocks: KvLayout, pool_bytes: int, blocks: int, ratio: int, sub_block_bytes: int) -> int:
    """The bytes that the receiver's blocks take. Raises `PairBroken` if what it says of its pool cannot be so."""
    if sub_block_bytes != sub_blocks.block_bytes:
        raise PairBroken(f"the receiver's blocks have {sub_block_bytes} bytes, ours {sub_blocks.block_bytes}")
    used = blocks * ratio * sub_block_bytes
    if blocks < 1 or not 1 <= ratio <= _RATIO_MAX or used > pool_bytes:
        raise PairBroken(f"the receiver's {blocks} blocks do not fit its {pool_bytes} bytes")
    return used


def hello(rows: PoolRows, memory: DeviceMemory, digest_every: int, device: bytes) -> bytes:
    blocks, ratio = rows.sub_blocks // rows.ratio, rows.ratio
    sub_block_bytes = rows.layout.block_bytes
    return _HELLO.pack(_MAGIC, memory.bytes, blocks, ratio, sub_block_bytes, digest_every, device, memory.handle)


class _Listener(Listener):
    def __init__(self, local: LocalEnd) -> None:
        self._local = local
        self._rendezvous_listener = UnixListener()
        self.meeting = Rendezvous(CudaIpc.name, "", 0, self._rendezvous_listener.name)

    def meet(self) -> Channel:
        local, memory = self._local, self._local.memory
        assert isinstance(memory, DeviceMemory)
        timeout_ms = local.settings.rendezvous_timeout_ms
        local_device = device_uuid(local.rows.device)
        connected = self._rendezvous_listener.accept(timeout_ms)
        process = peer_process(connected)
        lifeline, their_lifeline = os.pipe()
        try:
            said = hello(local.rows, memory, local.settings.digest_every, local_device)
            board = send_hello(connected, said, [], their_lifeline)
            return CudaReceiver(local, ready(connected, timeout_ms), board, lifeline, process)
        except (OSError, RuntimeError, PairBroken):
            connected.close()
            for descriptor in (lifeline, process):
                if descriptor >= 0:
                    os.close(descriptor)
            raise

    def abandon(self) -> None:
        self._rendezvous_listener.abandon()


class CudaIpc(Transport):
    name = "cuda_ipc"
    devices = ("cuda",)
    skips_unwanted = True
    confidential = True
    within_process = False  # CUDA cannot open a memory handle in the process that made it

    def unusable(self, local: LocalEnd, same_host: bool) -> str:
        if not isinstance(local.memory, DeviceMemory):
            return "the KV pool is not in GPU memory that others can map"
        if not same_host:
            return "another host, user or namespace"
        if local.segment_blocks > GRANT_BLOCKS_MAX:
            return f"segments of more than {GRANT_BLOCKS_MAX} blocks"
        return ""

    def listen(self, local: LocalEnd) -> Listener:
        return _Listener(local)

    def connect(self, local: LocalEnd, meeting: Rendezvous) -> Channel:
        timeout_ms = local.settings.rendezvous_timeout_ms
        connected = connect(meeting.secret, timeout_ms)
        rows = local.rows
        mapping = None
        descriptors: list[int] = []
        try:
            message, descriptors = receive_with_descriptors(connected, _HELLO.size, timeout_ms)
            told = _Told(rows.layout, device_uuid(rows.device), message, descriptors)
            mapping = Mapping(told.handle, told.pool_bytes, rows.device)
            assert mapping.tensor is not None
            target = PoolRows.of_bytes(mapping.tensor[: told.used], rows.layout, told.ratio)
            connection = UnixConnection(connected)
            connection.send(READY, 0)
            return CudaWriter(local, connection, mapping, target, told, descriptors.pop())
        except (OSError, RuntimeError, ValueError, PairBroken) as error:
            if mapping is not None:
                mapping.close()
            connected.close()
            if isinstance(error, ValueError):
                raise PairBroken(f"the receiver sent {error}") from None
            raise
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
