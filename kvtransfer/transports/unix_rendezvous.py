"""How two processes of one host meet over a Unix connection: what `shm` and `cuda_ipc` have in common."""

import fcntl
import os
import socket

import numpy as np

from kvtransfer.memory.layout import KvLayout
from kvtransfer.memory.shared import SEALS, map_shared
from kvtransfer.transports.transport import MAX_QUEUED_SEGMENTS, LocalEnd, PairBroken
from kvtransfer.transports.unix_socket import GRANT_BLOCKS_MAX, READY, UnixConnection, send_with_descriptors

_RATIO_MAX = 4096


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


def check_fit(sub_blocks: KvLayout, pool_bytes: int, blocks: int, ratio: int, sub_block_bytes: int) -> int:
    """The bytes that the receiver's blocks take. Raises `PairBroken` if what it says of its pool cannot be so."""
    if sub_block_bytes != sub_blocks.block_bytes:
        raise PairBroken(f"the receiver's blocks have {sub_block_bytes} bytes, ours {sub_blocks.block_bytes}")
    used = blocks * ratio * sub_block_bytes
    if blocks < 1 or not 1 <= ratio <= _RATIO_MAX or used > pool_bytes:
        raise PairBroken(f"the receiver's {blocks} blocks do not fit its {pool_bytes} bytes")
    return used


def cannot_grant(local: LocalEnd, same_host: bool) -> str:
    """Why no sender can be granted blocks of this pool, or "": what `shm` and `cuda_ipc` have in common."""
    if not same_host:
        return "another host, user or namespace"
    if local.segment_blocks > GRANT_BLOCKS_MAX:
        return f"segments of more than {GRANT_BLOCKS_MAX} blocks"
    return ""
