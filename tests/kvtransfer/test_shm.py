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
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer import shm, shm_socket, transports
from kvtransfer.copying import PIECE_BYTES, Copier
from kvtransfer.digests import Digester
from kvtransfer.layout import KvLayout
from kvtransfer.memory import SharedMemory
from kvtransfer.pool import PoolRows
from kvtransfer.session import KvFailed, KvSent
from kvtransfer.settings import AUTO, WINDOW_SEGMENTS_MAX
from kvtransfer.shm import _HELLO, _MAGIC, Grants, Writes, _mapped
from kvtransfer.shm_socket import DONE, GRANT, READY, WRITTEN, Connection, Door, knock, pack_grants, unpack_grants
from kvtransfer.transport import Local, PairBroken, SegmentJob
from proto.kv import PairListen, PairOpen
from proto.messages import Message
from tests.kvtransfer import ends as ends_module
from tests.kvtransfer.ends import LAYOUT, SMALL, WAIT_S, Ends, filled_pool, same_bytes, shared_pool, shuffled, with_ends


@pytest.fixture(autouse=True)
def only_shm(monkeypatch):
    monkeypatch.setattr(ends_module, "TRANSPORT", "shm")


@pytest.fixture
def both(monkeypatch):
    monkeypatch.setattr(ends_module, "TRANSPORT", "")


def open_things() -> tuple[int, int, int]:
    """Descriptors, threads of pairs, mappings of pools."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text(encoding="ascii").count("crossdock-kv")
    return len(os.listdir("/proc/self/fd")), sum(t.name.startswith("kv-") for t in threading.enumerate()), maps


def test_pairs_leave_no_descriptor_no_thread_and_no_mapping():
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


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([64, 4096, 40_000, PIECE_BYTES, PIECE_BYTES + 64]),
    st.integers(1, 12),
    st.integers(0, 1 << 20),
    st.booleans(),
)
def test_copies_and_their_digests(block_bytes: int, count: int, seed: int, contiguous: bool) -> None:
    layout = KvLayout(layers=1, kv_heads=1, head_dim=block_bytes // 8, block_size=1, dtype="float32")
    source, target = filled_pool(layout, 16, seed), filled_pool(layout, 16, seed + 1)
    before = target.clone()
    from_, to = (
        (list(range(2, 2 + count)), list(range(count))) if contiguous else (shuffled(16, count, n) for n in (seed, 1))
    )
    rows = PoolRows(source, layout)
    copier = Copier(rows, PoolRows(target, layout), Digester(rows))
    assert copier.copy(from_, to, lambda copied: True) == Digester(PoolRows(target, layout)).digest(to)
    assert same_bytes(target[to], source[from_])
    rest = sorted(set(range(16)) - set(to))
    assert same_bytes(target[rest], before[rest])


def test_a_copy_that_is_not_wanted_any_more_stops_at_the_next_piece():
    layout = KvLayout(layers=1, kv_heads=1, head_dim=PIECE_BYTES // 8, block_size=1, dtype="float32")
    source, target = filled_pool(layout, 4, 1), filled_pool(layout, 4, 2)
    before = target.clone()
    asked = iter([True, True, False])
    rows = PoolRows(source, layout)
    copier = Copier(rows, PoolRows(target, layout), Digester(rows))
    assert copier.copy([0, 1, 2, 3], [0, 1, 2, 3], lambda copied: next(asked)) == b""
    assert same_bytes(target[:2], source[:2]) and same_bytes(target[2:], before[2:])


def hello(memory: SharedMemory, **wrong: int) -> bytes:
    fields = {"size": memory.bytes, "blocks": 8, "ratio": 1, "cell": LAYOUT.block_bytes} | wrong
    return _HELLO.pack(_MAGIC, *fields.values())


def test_a_hello_that_cannot_be_made_leaves_no_descriptor(monkeypatch):
    def no_more(*_: object) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with one, other:
        lifeline, theirs = os.pipe()
        monkeypatch.setattr(os, "memfd_create", no_more)
        with pytest.raises(OSError, match="too many"):
            shm.send_hello(one, b"", [], theirs)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(theirs)
        os.close(lifeline)


@pytest.mark.parametrize(
    ("wrong", "fault"),
    [
        ({"size": 1 << 40}, "not of the size it says"),
        ({"blocks": 9}, "do not fit"),
        ({"blocks": 0}, "do not fit"),
        ({"ratio": 0}, "do not fit"),
        ({"ratio": 1 << 60}, "do not fit"),
        ({"cell": LAYOUT.block_bytes // 2}, "ours"),
    ],
)
def test_what_a_receiver_says_of_its_memory_is_checked(wrong: dict[str, int], fault: str) -> None:
    memory = SharedMemory()
    shared_pool(LAYOUT, 8, 1, memory)
    local = Local(PoolRows(filled_pool(LAYOUT, 4, 1), LAYOUT), 3, SMALL)
    board = os.memfd_create("b", os.MFD_ALLOW_SEALING)
    descriptors = [memory.descriptor, board, board]
    with pytest.raises(PairBroken, match=fault):
        _mapped(local, hello(memory, **wrong), descriptors)
    with pytest.raises(PairBroken, match="sealed"):
        _mapped(local, hello(memory), descriptors)
    with pytest.raises(PairBroken, match="descriptors"):
        _mapped(local, hello(memory), descriptors[:1])
    os.close(board)
    memory.close()


def test_another_user_is_not_let_in(monkeypatch):
    credentials = struct.Struct("iII")
    theirs = credentials.pack(os.getpid(), os.geteuid() + 1, os.getegid())

    class Foreign(socket.socket):
        def getsockopt(self, level: int, option: int, *rest: int) -> object:
            return theirs if option == socket.SO_PEERCRED else super().getsockopt(level, option, *rest)

    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    assert shm_socket.is_ours(one)
    assert not shm_socket.is_ours(Foreign(fileno=other.detach()))
    one.close()
    door = Door()
    monkeypatch.setattr(shm_socket, "is_ours", lambda connected: False)
    with pytest.raises(PairBroken, match="another user"):
        knock(door.name)
    with pytest.raises(PairBroken, match="did not come"):
        door.accept(100)


def test_a_sender_does_not_outrun_a_receiver_that_digests_slowly(monkeypatch):
    """However many segments: no more are granted than the receiver has room to hear of."""
    plain = Digester.digest
    monkeypatch.setattr(Digester, "digest", lambda *arguments: time.sleep(0.002) or plain(*arguments))

    async def test(ends: Ends) -> None:
        ends.transfer("r", shuffled(600, 600, 1))
        await ends.ended(1)
        assert isinstance(ends.results[0], KvSent) and ends.sender.counters["segments"] == 600

    with_ends(test, blocks=600, settings=replace(SMALL, segment_bytes=LAYOUT.block_bytes))


@given(st.lists(st.lists(st.integers(0, 999), max_size=9), min_size=1, max_size=64), st.integers(1, 1000))
def test_grants_are_read_as_they_were_given_or_refused(targets, cells):
    if all(block < cells for block_ids in targets for block in block_ids):
        assert unpack_grants(pack_grants(targets), cells) == targets
    else:
        with pytest.raises(PairBroken):
            unpack_grants(pack_grants(targets), cells)


@given(
    st.binary(max_size=64)
    | st.lists(st.integers(0, 70), max_size=90).map(lambda words: struct.pack(f"<{len(words)}I", *words))
)
def test_of_any_bytes_for_a_grant_only_a_whole_one_is_taken(payload):
    try:
        targets = unpack_grants(payload, 64)
    except PairBroken:
        return
    assert pack_grants(targets) == payload and 1 <= len(targets) <= WINDOW_SEGMENTS_MAX
    assert all(0 <= block < 64 for block_ids in targets for block in block_ids)


TOO_MANY = (1 + WINDOW_SEGMENTS_MAX, *[1] * 2 * (1 + WINDOW_SEGMENTS_MAX))


@pytest.mark.parametrize(
    "words",
    [
        (1, 1, 64),
        (1, 2, 1, 2),
        (1, 1),
        (0,),
        (2, 1, 0),
        ((1 << 32) - 1, 1, 5),
        TOO_MANY,
    ],
)
def test_a_grant_outside_the_pool_or_of_another_size_breaks_the_pair(words, monkeypatch):
    plain, payload = Connection.send, struct.pack(f"<{len(words)}I", *words)

    def send(self: Connection, kind: int, sequence: int, given: bytes = b"") -> bool:
        return plain(self, kind, sequence, payload if kind == GRANT else given)

    monkeypatch.setattr(Connection, "send", send)

    async def test(ends: Ends) -> None:
        before = ends.target.clone()
        ends.transfer("r", [5])
        await ends.ended(1)
        assert isinstance(ends.results[0], KvFailed) and "the receiver" in ends.results[0].reason
        assert same_bytes(ends.target, before)

    with_ends(test)


def test_a_receiver_that_grants_without_end_breaks_the_pair():
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    receiver, sender = Connection(one), Connection(other)
    local = Local(PoolRows(filled_pool(LAYOUT, 4, 1), LAYOUT), 3, SMALL)
    writes, handful = Writes(local, sender, None, 8, None, -1), pack_grants([()] * WINDOW_SEGMENTS_MAX)  # type: ignore[arg-type]
    assert receiver.send(GRANT, 0, handful)
    writes._hear(grants := deque())
    assert len(grants) == WINDOW_SEGMENTS_MAX
    assert receiver.send(GRANT, WINDOW_SEGMENTS_MAX, handful)
    with pytest.raises(PairBroken, match="segments at once"):
        writes._hear(grants)
    receiver.close()
    sender.close()


def test_a_pair_that_cannot_meet_by_shm_meets_by_gloo(both, monkeypatch):
    """The sessions, offered before, need not know."""
    monkeypatch.setattr(
        "kvtransfer.shm.knock", lambda name: (_ for _ in ()).throw(ConnectionRefusedError(111, "refused"))
    )

    async def test(ends: Ends) -> None:
        ends.transfer("r", shuffled(64, 20, 1))
        await ends.ended(1)
        assert isinstance(ends.results[0], KvSent)
        assert [frame.transports for frame in ends.frames if isinstance(frame, PairOpen)] == [
            ("shm", "gloo"),
            ("gloo",),
        ]
        assert ends.sender.counters["bytes_gloo"] == ends.sender.counters["bytes"] > 0
        (state,) = ends.sender.transports()
        assert state.transport == "gloo" and "refused" in state.why

    with_ends(test)


def test_another_host_is_served_by_gloo(both, monkeypatch):
    monkeypatch.setattr("kvtransfer.driver.host_id", lambda: os.urandom(4).hex())

    async def test(ends: Ends) -> None:
        ends.transfer("r", [1, 2, 3])
        await ends.ended(1)
        (state,) = ends.sender.transports()
        assert isinstance(ends.results[0], KvSent) and state.transport == "gloo" and "shm: another host" in state.why

    with_ends(test)


def test_a_broken_transport_is_left_out_and_tried_again(both):
    def no_grant(self: Connection, kind: int, sequence: int, payload: bytes = b"") -> bool:
        return True if broken and kind not in (READY,) else plain(self, kind, sequence, payload)

    plain, broken = Connection.send, [True]
    listened: list[str] = []

    def watch(message: Message) -> bool:
        if isinstance(message, PairListen):
            listened.append(message.transport)
        return True

    async def test(ends: Ends) -> None:
        ends.transfer("r0", [1, 2])
        await ends.ended(1)
        assert isinstance(ends.results[0], KvFailed) and "shm" in ends.results[0].reason
        ends.transfer("r1", [1, 2])
        await ends.ended(2)
        broken.clear()
        ends.sender._choice._records[2]["shm"].until = 0.0  # as if that time had passed
        ends.transfer("r2", [1, 2])
        await ends.ended(3)
        assert [type(result) for result in ends.results[1:]] == [KvSent, KvSent]
        assert listened == ["shm", "gloo", "shm"]
        assert ends.sender.counters["broken_shm"] + ends.receiver.counters["broken_shm"] >= 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Connection, "send", no_grant)
        quick = replace(SMALL, segment_timeout_ms=400)
        with_ends(test, to_sender=watch, settings=quick)


def test_the_host_is_the_same_for_this_host_only():
    assert transports.host_id() == transports.host_id()
    assert set(transports.TRANSPORTS) == set(AUTO)


def test_a_large_segment_is_digested_while_it_is_written(monkeypatch):
    """Also where a part is no whole number of pieces, and where blocks are scattered. The sender goes on when the part is
    digested, so that none is when all is written."""
    layout = KvLayout(layers=1, kv_heads=1, head_dim=300_000 // 8, block_size=1, dtype="float32")
    begun: list[int] = []
    plain, send, begin, has_begun = Digester.digest, Connection.send, Grants._begin_to_digest, threading.Semaphore(0)

    def digest(self: Digester, block_ids: list[int], early: Sequence[bytes] = ()) -> bytes:
        begun.append(len(early))
        return plain(self, block_ids, early)

    def begin_to_digest(self: Grants, job: SegmentJob, written: int) -> None:
        begin(self, job, written)
        has_begun.release()

    def send_and_wait(self: Connection, kind: int, sequence: int, payload: bytes = b"") -> bool:
        sent = send(self, kind, sequence, payload)
        assert kind != WRITTEN or has_begun.acquire(timeout=WAIT_S)
        return sent

    monkeypatch.setattr(shm, "PART_BYTES", 4 << 20)
    monkeypatch.setattr(Digester, "digest", digest)
    monkeypatch.setattr(Grants, "_begin_to_digest", begin_to_digest)
    monkeypatch.setattr(Connection, "send", send_and_wait)

    async def test(ends: Ends) -> None:
        ends.sender.digest(range(64))
        for number, blocks in enumerate((list(range(5, 64)), shuffled(64, 50, 3), list(range(4)))):
            ends.transfer(f"r{number}", blocks)
            await ends.ended(number + 1)
            assert isinstance(ends.results[number], KvSent), ends.results
            assert same_bytes(ends.target[ends.committed[number][1]], ends.source[blocks])
        assert begun[0] >= 39 and begun[1] >= 39 and begun[2] == 0

    with_ends(test, layout=layout, settings=replace(SMALL, segment_bytes=64 << 20))


@pytest.mark.parametrize("count", [65, 1 << 31])
def test_more_written_than_there_is_breaks_the_pair(count, monkeypatch):
    plain = Connection.send

    def send(self: Connection, kind: int, sequence: int, given: bytes = b"") -> bool:
        if kind == DONE:
            plain(self, WRITTEN, sequence, count.to_bytes(4, "little"))
        return plain(self, kind, sequence, given)

    monkeypatch.setattr(Connection, "send", send)

    async def test(ends: Ends) -> None:
        ends.transfer("r", list(range(4)))
        await ends.ended(1)
        assert isinstance(ends.results[0], KvFailed) and "blocks are written" in ends.failed[0][3]

    with_ends(test)
