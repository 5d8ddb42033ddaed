"""What is particular to `shm`: memory that leaves nothing behind, peers that are not believed, and ways out when it fails."""

import asyncio
import ctypes
import errno
import gc
import os
import queue
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.memory.copying import PIECE_BYTES, Copier
from kvtransfer.memory.digests import Digester
from kvtransfer.memory.layout import KvLayout
from kvtransfer.memory.pool import PoolRows
from kvtransfer.memory.shared import SharedMemory
from kvtransfer.session.limits import AUTO, WINDOW_SEGMENTS_MAX
from kvtransfer.session.session import KvFailed, KvSent
from kvtransfer.transports import registry as transports
from kvtransfer.transports import shm
from kvtransfer.transports import unix_rendezvous as shm_meeting
from kvtransfer.transports import unix_socket as shm_socket
from kvtransfer.transports.shm import _HELLO, _MAGIC, Receives, RemoteWriter, mapped_window, pack_places, unpack_places
from kvtransfer.transports.transport import MAX_QUEUED_SEGMENTS, Inbox, Local, PairBroken, SegmentJob
from kvtransfer.transports.unix_socket import DONE, GRANT, READY, SKIPPED, Connection, RendezvousListener, connect
from proto.kv import PairListen, PairOpen
from proto.messages import Message
from tests.kvtransfer import ends as ends_module
from tests.kvtransfer.ends import LAYOUT, SMALL, Ends, filled_pool, same_bytes, shuffled, with_ends

ROOT = Path(__file__).parents[2]


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


def hello(**wrong: int) -> bytes:
    fields = {"cells": 8, "cell": LAYOUT.block_bytes} | wrong
    return _HELLO.pack(_MAGIC, *fields.values())


def test_a_hello_that_cannot_be_made_leaves_no_descriptor(monkeypatch):
    def no_more(*_: object) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with one, other:
        lifeline, theirs = os.pipe()
        monkeypatch.setattr(os, "memfd_create", no_more)
        with pytest.raises(OSError, match="too many"):
            shm_meeting.send_hello(one, b"", [], theirs)
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
def test_what_a_receiver_says_of_its_window_is_checked(wrong: dict[str, int], fault: str) -> None:
    """And nothing of it is left open."""
    local = Local(PoolRows(filled_pool(LAYOUT, 4, 1), LAYOUT), 3, SMALL)
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
    rendezvous_listener = RendezvousListener()
    monkeypatch.setattr(shm_socket, "is_ours", lambda connected: False)
    with pytest.raises(PairBroken, match="another user"):
        connect(rendezvous_listener.name)
    with pytest.raises(PairBroken, match="did not come"):
        rendezvous_listener.accept(100)


def test_a_sender_does_not_outrun_a_receiver_that_copies_slowly(monkeypatch):
    """However many segments: no more are granted than the receiver has room to hear of."""
    plain = Receives._land
    monkeypatch.setattr(Receives, "_land", lambda *arguments: time.sleep(0.002) or plain(*arguments))

    async def test(ends: Ends) -> None:
        ends.transfer("r", shuffled(600, 600, 1))
        await ends.ended(1)
        assert isinstance(ends.results[0], KvSent) and ends.sender.counters["segments"] == 600

    with_ends(test, blocks=600, settings=replace(SMALL, segment_bytes=LAYOUT.block_bytes))


@given(st.lists(st.none() | st.integers(0, (1 << 32) - 2), min_size=1, max_size=WINDOW_SEGMENTS_MAX))
def test_places_are_read_as_they_were_given(places):
    assert unpack_places(pack_places(places)) == places


@pytest.mark.parametrize("payload", [b"", b"abc", bytes(5), bytes(4 * (WINDOW_SEGMENTS_MAX + 1))])
def test_what_is_no_grant_is_refused(payload):
    with pytest.raises(PairBroken, match="a grant of"):
        unpack_places(payload)


@pytest.mark.parametrize("words", [(64,), ((1 << 32) - 2,), (5, 5), (0,) * (WINDOW_SEGMENTS_MAX + 1), ()])
def test_a_grant_outside_the_window_or_that_nobody_asked_for_breaks_the_pair(words, monkeypatch):
    plain, payload = Connection.send, struct.pack(f"<{len(words)}I", *words)

    def send(self: Connection, kind: int, sequence: int, given: bytes = b"") -> bool:
        return plain(self, kind, sequence + (words == (5, 5)), payload if kind == GRANT else given)

    monkeypatch.setattr(Connection, "send", send)
    monkeypatch.setattr(shm, "window_sub_blocks", lambda local: 6)

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
    rows = PoolRows(filled_pool(LAYOUT, 4, 1), LAYOUT)
    writes, handful = RemoteWriter(Local(rows, 3, SMALL), sender, rows), pack_places([None] * WINDOW_SEGMENTS_MAX)
    assert receiver.send(GRANT, 0, handful)
    writes._hear(grants := deque())
    assert len(grants) == WINDOW_SEGMENTS_MAX
    assert receiver.send(GRANT, WINDOW_SEGMENTS_MAX, handful)
    with pytest.raises(PairBroken, match="segments at once"):
        writes._hear(grants)
    receiver.close()
    sender.close()


class OneEnd:
    """The receiver's channel in a thread of its own, and a sender played by the test, who does what it likes."""

    def __init__(self, sub_block_tokens: int = LAYOUT.block_size) -> None:
        one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sender = Connection(other)
        self.pool = filled_pool(LAYOUT, 16, seed=2)
        self.rows = PoolRows(self.pool, LAYOUT, sub_block_tokens)
        self.sub_block_bytes = self.rows.layout.block_bytes
        self.memory = SharedMemory(4 * self.sub_block_bytes)
        self.channel = Receives(Local(self.rows, 2, SMALL), Connection(one), self.memory)
        self.inbox = Inbox()
        self.answers: queue.SimpleQueue[tuple[SegmentJob, bytes]] = queue.SimpleQueue()
        self.fault = ""
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.channel.work(self.inbox, lambda job, segment_digest: self.answers.put((job, segment_digest)))
        except PairBroken as error:
            self.fault = str(error)
        self.channel.settle(self.inbox, lambda job, segment_digest: None)

    def announce(self, first: int, *segments: tuple[int, ...]) -> list[SegmentJob]:
        """Segments from this sequence on, by their target blocks; all are there before the thread looks."""
        jobs = [SegmentJob("session", at, at, len(blocks), blocks) for at, blocks in enumerate(segments, first)]
        self.inbox.put(*jobs)
        return jobs

    def granted(self) -> tuple[int, list[int | None]]:
        kind, sequence, payload = self.sender.wait(20_000)
        assert kind == GRANT
        return sequence, unpack_places(payload)

    def write(self, place: int, blocks: torch.Tensor) -> None:
        raw = blocks.contiguous().view(torch.uint8).view(-1)
        self.memory.tensor[place * self.sub_block_bytes :][: raw.numel()] = raw

    def close(self) -> None:
        self.inbox.close(None)
        self.thread.join(20)
        assert not self.thread.is_alive()
        self.inbox.release()
        self.sender.close()
        self.memory.close()


@pytest.fixture
def receiving() -> Iterator[OneEnd]:
    one = OneEnd()
    yield one
    one.close()


def test_what_a_sender_writes_after_it_is_done_changes_nothing(receiving, monkeypatch):
    """It rewrites its window at the worst moments: as soon as a piece was copied, and after the digest. What is digested is
    what lies in the pool."""
    kv, other = filled_pool(LAYOUT, 2, seed=5), filled_pool(LAYOUT, 2, seed=6)
    memmove = ctypes.memmove

    def move_and_rewrite(target: int, source: int, size: int) -> None:
        memmove(target, source, size)
        receiving.write(0, other)

    receiving.announce(0, (7, 3))
    assert receiving.granted() == (0, [0])
    receiving.write(0, kv)
    monkeypatch.setattr("kvtransfer.memory.digests.ctypes.memmove", move_and_rewrite)
    receiving.sender.send(DONE, 0)
    _, segment_digest = receiving.answers.get(timeout=20)
    kept = receiving.pool[[7, 3]].clone()
    receiving.write(0, filled_pool(LAYOUT, 2, seed=8))
    assert segment_digest == Digester(PoolRows(receiving.pool, LAYOUT)).digest([7, 3])
    assert same_bytes(receiving.pool[[7, 3]], kept)
    assert same_bytes(kept[0], kv[0]) and not same_bytes(kept[1], kv[1]), "or nothing was rewritten in between"


def test_neither_does_it_where_blocks_are_of_another_size(monkeypatch):
    """There copy and digest are not made piece by piece, so what both are made of is a copy of its own."""
    spread, one = PoolRows.spread, OneEnd(sub_block_tokens=LAYOUT.block_size // 2)

    def spread_and_rewrite(rows: PoolRows, block_ids: list[int], packed: torch.Tensor) -> None:
        spread(rows, block_ids, packed)
        one.memory.tensor.fill_(0x5A)

    monkeypatch.setattr(PoolRows, "spread", spread_and_rewrite)
    try:
        one.announce(0, (5, 8))
        assert one.granted() == (0, [0])
        one.write(0, filled_pool(LAYOUT, 1, seed=5))
        one.sender.send(DONE, 0)
        _, segment_digest = one.answers.get(timeout=20)
        assert segment_digest == Digester(one.rows).digest([5, 8])
    finally:
        one.close()


def test_a_sender_maps_its_window_and_nothing_of_the_pool(monkeypatch):
    """Not even the blocks of its own sessions: what it could write to is tens of MiB beside the pool."""
    mapped: list[PoolRows] = []
    plain = shm.mapped_window

    def watch(local: Local, message: bytes, descriptors: list[int]) -> PoolRows:
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


def test_a_segment_given_up_is_answered_at_once_and_its_place_is_used_again_when_the_sender_is_done(receiving):
    jobs = receiving.announce(0, (1, 2), (3, 4), (5, 6))
    assert receiving.granted() == (0, [0, 2])
    before = receiving.pool.clone()
    for job in jobs:
        job.block_ids = None
        receiving.channel.revoke(job)
    assert {id(receiving.answers.get(timeout=20)[0]) for _ in jobs} == {id(job) for job in jobs}
    receiving.announce(3, (9, 10))
    receiving.write(0, filled_pool(LAYOUT, 4, seed=5))
    assert receiving.granted() == (2, [None])
    assert receiving.sender.send(DONE, 0)
    assert receiving.granted() == (3, [0])
    for kind, sequence in ((DONE, 1), (SKIPPED, 2), (DONE, 3)):
        assert receiving.sender.send(kind, sequence)
    job, segment_digest = receiving.answers.get(timeout=20)
    assert job.sequence == 3 and segment_digest
    changed = [block for block in range(16) if not same_bytes(receiving.pool[block], before[block])]
    assert changed == [9, 10]


def test_no_more_is_granted_than_the_window_has_room_for(receiving):
    receiving.announce(0, (0, 1), (2, 3), (4, 5), (6, 7), (8, 9))
    assert receiving.granted() == (0, [0, 2])
    for sequence, place in enumerate((0, 2, 0)):
        receiving.sender.send(DONE, sequence)
        assert receiving.granted() == (sequence + 2, [place])


@pytest.mark.parametrize("word", [(DONE, 1), (SKIPPED, 0), (READY, 0), (GRANT, 0), (77, 0)])
def test_a_sender_that_says_what_no_sender_says_is_left(word, receiving):
    receiving.announce(0, (1,))
    receiving.granted()
    receiving.sender.send(*word)
    receiving.thread.join(20)
    assert "the sender broke the protocol" in receiving.fault


def test_more_announced_than_a_sender_may_breaks_the_pair(receiving):
    """Also where most were given up: a sender that never answers must not fill our memory."""
    for first in range(0, 2 * MAX_QUEUED_SEGMENTS, 64):
        jobs = receiving.announce(first, *[(1,)] * 64)
        for job in jobs:
            job.block_ids = None
        receiving.channel.revoke(jobs[0])
    receiving.thread.join(20)
    assert "announced at once" in receiving.fault


GUARDED = """
import torch
from kvtransfer.memory.copying import Copier
from kvtransfer.memory.digests import Digester, land
from kvtransfer.memory.layout import KvLayout
from kvtransfer.memory.pool import OutsidePool, PoolRows
assert False, "this runs under -O"
layout = KvLayout(layers=1, kv_heads=1, head_dim=8, block_size=1, dtype="float32")
rows = PoolRows(torch.zeros(layout.shape(4)), layout)
for ids in ([4], [0, -1], [1 << 40]):
    for move in (
        lambda: Copier(rows, rows, Digester(rows)).copy([0] * len(ids), ids, lambda copied: True),
        lambda: Copier(rows, rows, Digester(rows)).copy(ids, [0] * len(ids), lambda copied: True),
        lambda: land(torch.zeros((len(ids), 8), dtype=torch.int64), rows, ids),
    ):
        try:
            move()
        except OutsidePool:
            continue
        raise SystemExit(f"{ids} was copied")
print("guarded")
"""


def test_no_block_outside_a_pool_is_copied_also_where_assertions_are_off():
    child = subprocess.run(
        [sys.executable, "-O", "-c", GUARDED], cwd=ROOT, capture_output=True, text=True, timeout=90, check=False
    )
    assert (child.returncode, child.stdout) == (0, "guarded\n"), child.stderr


def test_a_pair_that_cannot_meet_by_shm_meets_by_tcp(both, monkeypatch):
    """The sessions, offered before, need not know."""
    monkeypatch.setattr(
        "kvtransfer.transports.shm.knock", lambda name: (_ for _ in ()).throw(ConnectionRefusedError(111, "refused"))
    )

    async def test(ends: Ends) -> None:
        ends.transfer("r", shuffled(64, 20, 1))
        await ends.ended(1)
        assert isinstance(ends.results[0], KvSent)
        assert [frame.transports for frame in ends.frames if isinstance(frame, PairOpen)] == [
            ("shm", "tcp"),
            ("tcp",),
        ]
        assert ends.sender.counters["bytes_tcp"] == ends.sender.counters["bytes"] > 0
        (state,) = ends.sender.transports()
        assert state.transport == "tcp" and "refused" in state.why

    with_ends(test)


def test_another_host_is_served_by_tcp(both, monkeypatch):
    monkeypatch.setattr("kvtransfer.driver.host_id", lambda: os.urandom(4).hex())

    async def test(ends: Ends) -> None:
        ends.transfer("r", [1, 2, 3])
        await ends.ended(1)
        (state,) = ends.sender.transports()
        assert isinstance(ends.results[0], KvSent) and state.transport == "tcp" and "shm: another host" in state.why

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
        assert listened == ["shm", "tcp", "shm"]
        assert ends.sender.counters["broken_shm"] + ends.receiver.counters["broken_shm"] >= 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Connection, "send", no_grant)
        quick = replace(SMALL, segment_timeout_ms=400)
        with_ends(test, to_sender=watch, settings=quick)


def test_the_host_is_the_same_for_this_host_only():
    assert transports.host_id() == transports.host_id()
    assert set(transports.TRANSPORTS) == {*AUTO, "gloo"}
