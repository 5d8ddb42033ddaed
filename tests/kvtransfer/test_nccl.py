"""The two ends of a `nccl` pair, over real sockets; the communicator is played by host memory."""

import queue
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch

from kvtransfer.memory.device_thread import DeviceThread, Operation
from kvtransfer.memory.layout import KvLayout
from kvtransfer.memory.pool import PoolRows
from kvtransfer.session.limits import KvSettings
from kvtransfer.transports import nccl, nccl_communicator
from kvtransfer.transports.side_channel import Line
from kvtransfer.transports.tcp.listener import TcpListener
from kvtransfer.transports.transport import UNWANTED, Channel, Inbox, LocalEnd, PairBroken, SegmentJob
from tests.kvtransfer.ends import filled_pool, same_bytes

LAYOUT = KvLayout(layers=2, kv_heads=2, head_dim=8, block_size=4, dtype="float32")
SETTINGS = KvSettings(segment_timeout_ms=400, rendezvous_timeout_ms=20_000)


class Wire:
    """What one sends lands at the other, when both have begun."""

    def __init__(self) -> None:
        self.posted: list[torch.Tensor] = []
        self.crossed = 0
        self.stuck = False
        self.aborted: set[bool] = set()


class Played:
    def __init__(self, wire: Wire) -> None:
        self.wire = wire

    def begin(self, tensor: torch.Tensor, sending: bool) -> None:
        self.sending = sending
        if sending:
            assert self.wire.posted, "sent before the receiver had posted"
            if not self.wire.stuck:
                self.wire.posted.pop().copy_(tensor)
                self.wire.crossed += 1
            self.waits_for = self.wire.crossed + (1 if self.wire.stuck else 0)
        else:
            self.wire.posted.append(tensor)
            self.waits_for = self.wire.crossed + 1

    def has_ended(self, now: float) -> bool:
        return self.wire.crossed >= self.waits_for

    def abort(self) -> None:
        self.wire.aborted.add(getattr(self, "sending", False))


class End:
    """A channel at work on a thread of its own, as in a pair."""

    def __init__(self, channel: Channel) -> None:
        self.inbox = Inbox()
        self.answers: list[tuple[int, bytes]] = []
        self.fault = ""
        self._changed = threading.Condition()
        self._channel = channel
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._channel.work(self.inbox, self._answer)
        except PairBroken as error:
            with self._changed:
                self.fault = str(error)
                self._changed.notify_all()
        self._channel.settle(self.inbox, self._answer)

    def _answer(self, job: SegmentJob, digest: bytes) -> None:
        with self._changed:
            self.answers.append((job.sequence, digest))
            self._changed.notify_all()

    def until(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: condition() or bool(self.fault), 30)
        assert condition(), self.fault

    def breaks_within(self, seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: bool(self.fault), seconds)

    def join(self) -> None:
        self._thread.join(30)
        assert not self._thread.is_alive()


def connected() -> tuple[Line, Line]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        ours = socket.create_connection(listening.getsockname(), 20)
        return Line(ours), Line(listening.accept()[0])


class Blocked(Operation):
    """Keeps a device's thread until it is let go of, as another pair's launch may."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()

    def launch(self) -> None:
        assert self.goes_on.wait(60)

    def is_done(self, now: float) -> bool:
        return True


class World:
    def __init__(self, every: int = 1, threads: tuple[DeviceThread, DeviceThread] | None = None) -> None:
        self.source, self.target = filled_pool(LAYOUT, 32, 1), filled_pool(LAYOUT, 32, 2)
        self.wire = Wire()
        self.lines = connected()
        self.threads = threads or (DeviceThread("nccl-test"), DeviceThread("nccl-test"))
        sends, receives = (
            kind(LocalEnd(PoolRows(pool, LAYOUT), 8, SETTINGS), line, Played(self.wire), thread, every)
            for kind, pool, line, thread in zip(
                (nccl.Sends, nccl.NcclReceives), (self.source, self.target), self.lines, self.threads, strict=True
            )
        )
        self.sender, self.receiver = End(sends), End(receives)

    def segment(self, sequence: int, from_: list[int], to: list[int] | None) -> None:
        self.receiver.inbox.put(SegmentJob(None, 0, sequence, len(from_), tuple(to) if to else None))
        self.sender.inbox.put(SegmentJob(None, 0, sequence, len(from_), tuple(from_)))


@contextmanager
def world(every: int = 1, threads: tuple[DeviceThread, DeviceThread] | None = None) -> Iterator[World]:
    one = World(every, threads)
    try:
        yield one
    finally:
        for end in (one.sender, one.receiver):
            end.inbox.close(None)
        for end in (one.sender, one.receiver):
            end.join()
            end.inbox.release()


def test_unwanted_segments_are_skipped():
    """Segments cross in order, and a segment that the receiver does not want is skipped."""
    with world() as w:
        w.segment(0, [3, 1, 7], [10, 11, 2])
        w.segment(1, [4, 5], None)
        w.segment(2, [8, 9, 10, 11], [20, 21, 22, 23])
        w.sender.until(lambda: len(w.sender.answers) == 3)
        w.receiver.until(lambda: len(w.receiver.answers) == 3)
        assert same_bytes(w.target[[10, 11, 2]], w.source[[3, 1, 7]])
        assert same_bytes(w.target[20:24], w.source[8:12])
        (_, first), skipped, (_, third) = w.sender.answers
        assert w.receiver.answers == [(0, first), (1, b""), (2, third)] and len({first, third}) == 2
        assert skipped == (1, UNWANTED) and w.wire.crossed == 2
        assert (
            w.sender.fault == w.receiver.fault == ""
        )  # while both work: the one that closes last may see the other go
    assert w.wire.aborted == {True, False}


def test_many_segment_sizes_cross():
    """Two hundred segments of many sizes cross with equal digests at both ends."""
    with world() as w:
        for sequence in range(200):
            count = sequence % 8 + 1
            wanted = None if sequence % 7 == 3 else [*range(8, 8 + count)]
            w.segment(sequence, [*range(count)], wanted)
            if sequence % 40 == 39:
                w.sender.until(lambda done=sequence + 1: len(w.sender.answers) == done)
                w.receiver.until(lambda done=sequence + 1: len(w.receiver.answers) == done)
        assert [digest for _, digest in w.receiver.answers if digest] == [
            digest for _, digest in w.sender.answers if digest != UNWANTED
        ]


def test_only_the_sampled_segments_are_digested():
    with world(every=2) as w:
        for sequence in range(3):
            w.segment(sequence, [sequence, 9], [sequence, 12])
        w.receiver.until(lambda: len(w.receiver.answers) == 3)
        w.sender.until(lambda: len(w.sender.answers) == 3)
        digests = [digest for _, digest in w.receiver.answers]
        assert w.sender.answers == w.receiver.answers
        assert [digest == nccl.UNSAMPLED for digest in digests] == [False, True, False]  # type: ignore[attr-defined]


def test_hanging_message_is_aborted():
    """A hanging message is aborted at both ends after the segment timeout, and its blocks are not touched."""
    with world() as w:
        before = w.target.clone()
        w.wire.stuck = True
        w.segment(0, [1, 2], [3, 4])
        w.sender.join()
        w.receiver.join()
        assert "0.4 s" in w.sender.fault or "0.4 s" in w.receiver.fault, (w.sender.fault, w.receiver.fault)
        assert w.wire.aborted == {True, False}
        assert w.sender.answers == w.receiver.answers == [] and same_bytes(w.target, before)


def test_silent_peer_is_waited_for():
    """A receiver waits longer than the segment timeout for a peer that has not begun to send."""
    with world() as w:
        w.receiver.inbox.put(SegmentJob(None, 0, 0, 2, (3, 4)))
        assert not w.receiver.breaks_within(1.5 * SETTINGS.segment_timeout_ms / 1e3), w.receiver.fault
        w.sender.inbox.put(SegmentJob(None, 0, 0, 2, (1, 2)))
        w.receiver.until(lambda: len(w.receiver.answers) == 1)
        assert same_bytes(w.target[[3, 4]], w.source[[1, 2]])


def test_delayed_send_costs_receiver_nothing():
    """The receive has begun long before: its time runs from the launch of the send."""
    with world() as w:
        blocked = Blocked()
        w.threads[0].submit(blocked, 60.0, lambda: None)
        w.segment(0, [1, 2], [3, 4])
        assert not w.receiver.breaks_within(2.0 * SETTINGS.segment_timeout_ms / 1e3), w.receiver.fault
        blocked.goes_on.set()
        w.receiver.until(lambda: len(w.receiver.answers) == 1)
        w.sender.until(lambda: len(w.sender.answers) == 1)
        assert same_bytes(w.target[[3, 4]], w.source[[1, 2]])


class HangsInSetUp:
    """In place of a communicator whose peer has died: setting it up takes its whole time, and fails."""

    def __init__(self, *_: object) -> None:
        self.wire = Wire()

    def zeros(self, words: int) -> torch.Tensor:
        return torch.zeros(words, dtype=torch.int64)

    def begin(self, tensor: torch.Tensor, sending: bool) -> None:
        hanging.put(threading.current_thread().name)
        assert goes_on.wait(60)
        raise RuntimeError("NCCL: timed out")

    def has_ended(self, now: float) -> bool:
        return False

    def abort(self) -> None:
        hanging.put("aborted")


hanging: "queue.Queue[str]" = queue.Queue()
goes_on = threading.Event()


def test_hanging_setup_delays_no_other_pair(monkeypatch):
    """All pairs of a process share one device thread at each end. The store, the line and the words are real."""
    threads = (DeviceThread("nccl-test-s"), DeviceThread("nccl-test-r"))
    monkeypatch.setattr(nccl_communicator, "NcclCommunicator", HangsInSetUp)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    for module in (nccl, nccl_communicator):
        monkeypatch.setattr(module, "device_index", lambda device: 0)
    door = TcpListener("127.0.0.1", lambda reason: None)
    local = LocalEnd(PoolRows(filled_pool(LAYOUT, 32, 1), LAYOUT), 8, SETTINGS, "127.0.0.1", listener=door)
    failed: list[str] = []

    def set_up(meet: Callable[[], Channel]) -> None:
        try:
            meet()
        except RuntimeError as error:
            failed.append(str(error))

    monkeypatch.setattr(nccl.Nccl, "unusable", lambda *_, **__: "")
    pairs = []
    for thread in threads:  # the receiver's end is in the process of the first, and then of the second
        monkeypatch.setattr(nccl_communicator, "device_thread", lambda index, thread=thread: thread)
        listener = nccl.Nccl().listen(local)
        for meet in (listener.meet, lambda listener=listener: nccl.Nccl().connect(local, listener.meeting)):
            pairs.append(threading.Thread(target=set_up, args=(meet,), daemon=True))
            pairs[-1].start()
        assert [hanging.get(timeout=30) for _ in range(2)]
    with world(threads=threads) as w:
        for sequence in range(20):
            w.segment(sequence, [1, 2], [3, 4])
        w.receiver.until(lambda: len(w.receiver.answers) == 20)
        w.sender.until(lambda: len(w.sender.answers) == 20)
        goes_on.set()
        for pair in pairs:
            pair.join(30)
        assert failed == ["NCCL: timed out"] * 4
        assert [hanging.get(timeout=30) for _ in range(4)] == ["aborted"] * 4


def test_closed_line_ends_pair_at_once():
    """A receiver ends the pair at once when the connection of its line ends."""
    with world() as w:
        w.receiver.inbox.put(SegmentJob(None, 0, 0, 2, (3, 4)))
        w.lines[0]._socket.shutdown(socket.SHUT_RDWR)
        w.receiver.join()
        assert w.receiver.fault == "the peer is gone: its connection has ended"


@pytest.mark.parametrize("word", [(nccl.POSTED, 0), (nccl.OFFERED, 5), (77, 0)])
def test_protocol_violation_breaks_pair(word):
    """A receiver breaks the pair when its sender says something that the protocol does not allow."""
    with world() as w:
        w.receiver.inbox.put(SegmentJob(None, 0, 0, 2, (3, 4)))
        w.lines[0].say(*word)
        w.receiver.join()
        assert "protocol" in w.receiver.fault or "offered segment 5" in w.receiver.fault


def test_nccl_needs_safe_settings():
    """NCCL is not used without a build of it, or where torch would end the process on an error."""
    assert "build" in nccl.cannot_run(False, "0")
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" in nccl.cannot_run(True, "")
    assert nccl.cannot_run(True, "0") == ""
