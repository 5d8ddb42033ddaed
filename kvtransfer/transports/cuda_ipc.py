"""The transport `cuda_ipc`: the sender's GPU copies straight into the receiver's blocks. Both processes must run on one host,
as one user, and use the same GPU.

`tests/gpu` runs it on a GPU. The other parts are tested without a GPU: the checks of the peer's messages, the copy and
checksum arithmetic on CPU tensors, and the protocol (`granted`).

The receiver's first message holds a handle of its pool (`kvtransfer.memory.cuda`). The GPU copies and makes checksums
(`device_copy`) on a separate stream. The sender sends DONE when its stream has finished. So work that the receiver enqueues
later reads the written data, and no CUDA event must be shared. The end of the lifeline alone proves little: a process that is
killed closes its descriptors in no particular order, so its kernels may still run when the connection ends. So the receiver
waits until the process has ended; by then the driver has destroyed its context.
"""

import os
import select
import struct
from typing import Final

from kvtransfer.memory.cuda import HANDLE_BYTES, DeviceMemory, Mapping, device_uuid
from kvtransfer.memory.device_copy import DIGEST_EVERY_MAX, DeviceCopier, DeviceDigester
from kvtransfer.memory.layout import KvLayout
from kvtransfer.memory.pool import PoolRows
from kvtransfer.transports.granted import RemoteWriter, WriteCredits
from kvtransfer.transports.transport import (
    Answer,
    Channel,
    Inbox,
    Listener,
    LocalEnd,
    PairBroken,
    Rendezvous,
    Transport,
)
from kvtransfer.transports.unix_rendezvous import CancelFlags, cannot_grant, check_fit, check_sealed, ready, send_hello
from kvtransfer.transports.unix_socket import (
    READY,
    UnixConnection,
    UnixListener,
    connect,
    peer_process,
    receive_with_descriptors,
)

_HELLO = struct.Struct(f"<8sQQQQQ16s{HANDLE_BYTES}s")
"""Magic, bytes of the pool's memory, blocks in it, sub-blocks in a block, bytes of a sub-block, one segment in how many is
digested, the GPU's id, the handle of the memory."""
_MAGIC = b"cdkvipc1"
DEATH_WAIT_MS: Final = 10_000  # still alive then, the process has closed its connection in order, after its last write


class _Writes(RemoteWriter):
    def __init__(
        self,
        local: LocalEnd,
        connection: UnixConnection,
        mapping: Mapping,
        target: PoolRows,
        told: "_Told",
        lifeline: int,
    ) -> None:
        copier = DeviceCopier(local.rows, target, told.digest_every)
        super().__init__(local, connection, copier, target.sub_blocks, told.board, lifeline)
        self._mapping = mapping
        self._rows = local.rows

    def settle(self, inbox: Inbox, answer: Answer) -> None:
        # The lifeline ends last: its end says that nothing is written any more.
        self._copier = None
        try:
            self._rows.wait()
            self._mapping.close()
        except RuntimeError:
            pass  # the context is broken, and with it every kernel; the driver unmaps when this process ends
        super().settle(inbox, answer)


class _Grants(WriteCredits):
    def __init__(
        self, local: LocalEnd, connection: UnixConnection, board: CancelFlags, lifeline: int, process: int
    ) -> None:
        digester = DeviceDigester(local.rows, local.settings.digest_every)
        super().__init__(local, connection, digester, board, lifeline)
        self._process = process  # readable when the sender's process has ended; -1: there is none

    def settle(self, inbox: Inbox, answer: Answer) -> None:
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
            return _Grants(local, ready(connected, timeout_ms), board, lifeline, process)
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
        return cannot_grant(local, same_host)

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
            return _Writes(local, connection, mapping, target, told, descriptors.pop())
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
