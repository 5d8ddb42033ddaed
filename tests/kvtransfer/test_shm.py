"""What is particular to `shm`: memory that leaves nothing behind, peers that are not believed, and ways out when it fails."""

import asyncio
import errno
import gc
import os
import socket
import struct
import threading
import time
from collections import deque
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.memory.pool import PoolRows
from kvtransfer.memory.shared import SharedMemory
from kvtransfer.session.limits import WINDOW_SEGMENTS_MAX
from kvtransfer.session.session import KvFailed, KvSent
from kvtransfer.transports import cuda_ipc, shm
from kvtransfer.transports import unix_socket as shm_socket
from kvtransfer.transports.shm import _HELLO, _MAGIC, ShmReceives, ShmWriter, mapped_window, pack_places, unpack_places
from kvtransfer.transports.transport import LocalEnd, PairBroken
from kvtransfer.transports.unix_socket import GRANT, UnixConnection, UnixListener, connect
from tests.kvtransfer import ends as ends_module
from tests.kvtransfer.ends import LAYOUT, SMALL, Ends, filled_pool, same_bytes, shuffled, with_ends


@pytest.fixture(autouse=True)
def only_shm(monkeypatch):
    monkeypatch.setattr(ends_module, "TRANSPORT", "shm")


def open_things() -> tuple[int, int, int]:
    """Descriptors, threads of pairs, mappings of pools."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text(encoding="ascii").count("crossdock-kv")
    return len(os.listdir("/proc/self/fd")), sum(t.name.startswith("kv-") for t in threading.enumerate()), maps


def test_pairs_leave_nothing_open():
    """Pairs leave no descriptor, thread or mapping when they have ended."""

    async def main() -> None:
        ends = Ends()
        before = open_things()
        for number in range(3):
            ends.transfer(f"r{number}", shuffled(64, 20, number))
            await ends.ended(number + 1)
            ends.sender.peer_lost(2, "test")
            ends.receiver.peer_lost(1, "test")
            async with asyncio.timeout(20):
                await ends.sender._all_down.wait()
                await ends.receiver._all_down.wait()
        assert open_things() == before
        await ends.close()

    asyncio.run(main())


def hello(**wrong: int) -> bytes:
    fields = {"cells": 8, "cell": LAYOUT.block_bytes} | wrong
    return _HELLO.pack(_MAGIC, *fields.values())


def test_failed_hello_leaves_no_descriptor(monkeypatch):
    """A hello that fails for lack of descriptors closes the descriptor that it was given."""

    def no_more(*_: object) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with one, other:
        lifeline, theirs = os.pipe()
        monkeypatch.setattr(os, "memfd_create", no_more)
        with pytest.raises(OSError, match="too many"):
            cuda_ipc.send_hello(one, b"", [], theirs)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(theirs)
        os.close(lifeline)


@pytest.mark.parametrize(
    ("wrong", "fault"),
    [
        ({"cells": 1 << 40}, "window is of"),
        ({"cells": (1 << 64) - 1}, "window is of"),
        ({"cells": 0}, "window is of"),
        ({"cells": 9}, "not of the size it says"),
        ({"cell": LAYOUT.block_bytes // 2}, "ours"),
        ({"cell": 0}, "ours"),
    ],
)
def test_bad_window_hello_is_refused(wrong: dict[str, int], fault: str) -> None:
    """And nothing of it is left open."""
    local = LocalEnd(PoolRows(filled_pool(LAYOUT, 4, 1), LAYOUT), 3, SMALL)
    memory = SharedMemory(8 * LAYOUT.block_bytes)
    open_before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(PairBroken, match=fault):
        mapped_window(local, hello(**wrong), [os.dup(memory.descriptor)])
    unsealed = os.memfd_create("b", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, memory.bytes)
    with pytest.raises(PairBroken, match="sealed"):
        mapped_window(local, hello(), [unsealed])
    with pytest.raises(PairBroken, match="descriptors"):
        mapped_window(local, hello(), [os.dup(memory.descriptor), os.dup(memory.descriptor)])
    assert len(os.listdir("/proc/self/fd")) == open_before
    assert mapped_window(local, hello(), [os.dup(memory.descriptor)]).sub_blocks == 8
    memory.close()


def test_another_user_is_refused(monkeypatch):
    """A process of another user is refused at both ends of the socket."""
    credentials = struct.Struct("iII")
    theirs = credentials.pack(os.getpid(), os.geteuid() + 1, os.getegid())

    class Foreign(socket.socket):
        def getsockopt(self, level: int, option: int, *rest: int) -> object:  # type: ignore[override]
            return theirs if option == socket.SO_PEERCRED else super().getsockopt(level, option, *rest)

    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    assert shm_socket.is_ours(one)
    assert not shm_socket.is_ours(Foreign(fileno=other.detach()))
    one.close()
    rendezvous_listener = UnixListener()
    monkeypatch.setattr(shm_socket, "is_ours", lambda connected: False)
    with pytest.raises(PairBroken, match="another user"):
        connect(rendezvous_listener.name, 1000)
    with pytest.raises(PairBroken, match="did not come"):
        rendezvous_listener.accept(100)


def test_sender_waits_for_slow_receiver(monkeypatch):
    """However many segments: no more are granted than the receiver has room to hear of."""
    plain = ShmReceives._land
    monkeypatch.setattr(ShmReceives, "_land", lambda *arguments: time.sleep(0.002) or plain(*arguments))

    async def test(ends: Ends) -> None:
        ends.transfer("r", shuffled(600, 600, 1))
        await ends.ended(1)
        assert isinstance(ends.results[0], KvSent) and ends.sender.counters["segments"] == 600

    with_ends(test, blocks=600, settings=replace(SMALL, segment_bytes=LAYOUT.block_bytes))


@given(st.lists(st.none() | st.integers(0, (1 << 32) - 2), min_size=1, max_size=WINDOW_SEGMENTS_MAX))
def test_grant_places_round_trip(places):
    """Places in a grant are read as they were packed."""
    assert unpack_places(pack_places(places)) == places


@pytest.mark.parametrize("payload", [b"", b"abc", bytes(5), bytes(4 * (WINDOW_SEGMENTS_MAX + 1))])
def test_malformed_grant_is_refused(payload):
    """A grant of an impossible length is refused."""
    with pytest.raises(PairBroken, match="a grant of"):
        unpack_places(payload)


@pytest.mark.parametrize("words", [(64,), ((1 << 32) - 2,), (5, 5), (0,) * (WINDOW_SEGMENTS_MAX + 1), ()])
def test_invalid_grant_breaks_the_pair(words, monkeypatch):
    """A grant outside the window or for no announced segment breaks the pair, and nothing is written."""
    plain, payload = UnixConnection.send, struct.pack(f"<{len(words)}I", *words)

    def send(self: UnixConnection, kind: int, sequence: int, given: bytes = b"") -> bool:
        return plain(self, kind, sequence + (words == (5, 5)), payload if kind == GRANT else given)

    monkeypatch.setattr(UnixConnection, "send", send)
    monkeypatch.setattr(shm, "window_sub_blocks", lambda local: 6)

    async def test(ends: Ends) -> None:
        before = ends.target.clone()
        ends.transfer("r", [5])
        await ends.ended(1)
        assert isinstance(ends.results[0], KvFailed) and "the receiver" in ends.results[0].reason
        assert same_bytes(ends.target, before)

    with_ends(test)


def test_endless_grants_break_the_pair():
    """A receiver that grants more segments than may be open at once breaks the pair."""
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    receiver, sender = UnixConnection(one), UnixConnection(other)
    rows = PoolRows(filled_pool(LAYOUT, 4, 1), LAYOUT)
    writes, handful = ShmWriter(LocalEnd(rows, 3, SMALL), sender, rows), pack_places([None] * WINDOW_SEGMENTS_MAX)
    assert receiver.send(GRANT, 0, handful)
    writes._hear(grants := deque())
    assert len(grants) == WINDOW_SEGMENTS_MAX
    assert receiver.send(GRANT, WINDOW_SEGMENTS_MAX, handful)
    with pytest.raises(PairBroken, match="segments at once"):
        writes._hear(grants)
    receiver.close()
    sender.close()


def test_sender_maps_only_its_window(monkeypatch):
    """Not even the blocks of its own sessions: what it could write to is tens of MiB beside the pool."""
    mapped: list[PoolRows] = []
    plain = shm.mapped_window

    def watch(local: LocalEnd, message: bytes, descriptors: list[int]) -> PoolRows:
        mapped.append(plain(local, message, descriptors))
        return mapped[-1]

    monkeypatch.setattr(shm, "mapped_window", watch)

    async def test(ends: Ends) -> None:
        ends.transfer("mine", shuffled(64, 20, 1))
        await ends.ended(1)
        (window,) = mapped
        committed = ends.target.clone()
        assert window.sub_blocks * LAYOUT.block_bytes <= ends.settings.shm_window_bytes
        for sub_block in range(window.sub_blocks):
            window.run(sub_block, 1).fill_(0x5A)
        assert same_bytes(ends.target, committed)
        assert open_things()[2] == 2, "the window, once for each end of it in this process"

    with_ends(test)


def test_full_backlog_times_out() -> None:
    """A sender gives up after its time limit when strangers fill the receiver's backlog."""
    rendezvous_listener = UnixListener()
    strangers = []
    try:
        while True:
            stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            strangers.append(stranger)
            stranger.setblocking(False)
            try:
                stranger.connect(shm_socket._address(rendezvous_listener.name))
            except BlockingIOError:
                break
        with pytest.raises(PairBroken, match="did not accept in time"):
            connect(rendezvous_listener.name, 50)
    finally:
        for each in (*strangers, rendezvous_listener._socket):
            each.close()
