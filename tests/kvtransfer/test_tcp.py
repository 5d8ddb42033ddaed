"""`tcp` among strangers and impostors: what they can do to transfers, which is nothing, and what they can read of them."""

import asyncio
import multiprocessing
import os
import random
import resource
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection as Pipe
from typing import Any

import msgspec
import pytest

from kvtransfer.memory.pool import PoolRows
from kvtransfer.session.session import KvFailed, KvSent
from kvtransfer.transports.registry import TRANSPORTS, WrongTransport, allowed_on
from kvtransfer.transports.tcp import listener as tcp_listener
from kvtransfer.transports.tcp.handshake import HELLO_BYTES
from kvtransfer.transports.tcp.listener import TcpListener
from kvtransfer.transports.tcp.stream import HEADER_BYTES, Connection, RecordWriter
from kvtransfer.transports.tcp.transport import Receiving, Tcp
from kvtransfer.transports.transport import Inbox, Local, PairBroken, Rendezvous, SegmentJob
from proto.kv import PairListen
from proto.messages import Message
from tests.kvtransfer import ends as ends_module
from tests.kvtransfer.ends import LAYOUT, SMALL, WAIT_S, Ends, filled_pool, same_bytes, shuffled, with_ends
from tests.kvtransfer.strangers import Strangers, open_descriptors, stranger

RECORD_KEY = bytes(range(32))


@pytest.fixture(autouse=True)
def _tcp(monkeypatch):
    monkeypatch.setattr(ends_module, "TRANSPORT", "tcp")


def meeting_of(ends: Ends) -> asyncio.Future[PairListen]:
    """The next one that the receiver tells of."""
    found: asyncio.Future[PairListen] = ends.loop.create_future()

    def watch(message: Message) -> bool:
        if isinstance(message, PairListen) and not found.done():
            found.set_result(message)
        return True

    ends.to_sender = watch
    return found


async def transfer(ends: Ends, name: str, count: int = 10) -> None:
    """One that must arrive."""
    before = len(ends.results)
    ends.transfer(name, shuffled(64, count, seed=len(name)))
    await ends.until(lambda: len(ends.results) > before and len(ends.committed) > before)
    assert isinstance(ends.results[-1], KvSent), ends.results[-1]


# --- strangers at the port ---


@pytest.mark.parametrize(
    "count",
    [300, pytest.param(10_000, marks=[pytest.mark.long, pytest.mark.timeout(600)])],
)
def test_strangers_at_the_port_cost_no_transfer(count: int) -> None:
    """Transfers go on, new pairs meet, every stranger is counted, and nothing of them stays."""

    async def test(ends: Ends) -> None:
        meeting = meeting_of(ends)
        await transfer(ends, "first")
        listening = await meeting
        ends.receiver._on_stranger = lambda reason: ends.loop.call_soon_threadsafe(ends.changed.set)
        descriptors, threads = open_descriptors(), threading.active_count()
        strangers = Strangers((listening.host, listening.port), count)
        number = 0
        while strangers.are_there:
            number += 1
            if number % 5 == 0:  # the next one has to meet again
                ends.sender.peer_lost(2, "for a new pair")
                ends.receiver.peer_lost(1, "for a new pair")
            await transfer(ends, f"r{number}")
        strangers.join()
        listener = ends.receiver._tcp_listener
        assert listener is not None
        await ends.until(lambda: ends.receiver.counters["strangers"] == count)
        await transfer(ends, "last")
        assert not listener._said and not len(listener._pending)
        assert ends.sender.counters["sessions_failed"] == 0 and ends.receiver.counters["sessions_failed"] == 0
        assert open_descriptors() <= descriptors + 8 and threading.active_count() <= threads + 2

    with_ends(test)


def _worker_with_few_descriptors(pipe: Pipe) -> None:
    """A process that may have 64 descriptors receives KV while strangers hold what they can."""

    async def test(ends: Ends) -> None:
        meeting = meeting_of(ends)
        await transfer(ends, "first")
        listening = await meeting
        pipe.send((listening.host, listening.port))
        assert await asyncio.to_thread(pipe.recv) == "strangers are there"
        for number in range(10):
            ends.sender.peer_lost(2, "for a new pair")
            ends.receiver.peer_lost(1, "for a new pair")
            await transfer(ends, f"r{number}")
        pipe.send(ends.receiver.counters["strangers"])

    ends_module.TRANSPORT = "tcp"
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    with_ends(test)


def test_a_process_that_runs_out_of_descriptors_goes_on() -> None:
    """gloo's listener ends its process in this place."""
    spawn = multiprocessing.get_context("spawn")
    pipe, theirs = spawn.Pipe()
    process = spawn.Process(target=_worker_with_few_descriptors, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    try:
        address = pipe.recv()
        dice = random.Random(3)
        held = [stranger(address, "silent", dice) for _ in range(100)]
        held += [stranger(address, kind, dice) for kind in ("garbage", "a flood of bytes", "another key") * 10]
        pipe.send("strangers are there")
        assert pipe.poll(WAIT_S) and pipe.recv() >= 100
        process.join(WAIT_S)
        assert process.exitcode == 0
    finally:
        process.kill()
        process.join(10)
        for one in held:
            one.close()


def test_without_any_descriptor_the_listener_waits_and_goes_on(monkeypatch) -> None:
    """Also where there is no stranger to close for another one."""

    async def test(ends: Ends) -> None:
        await transfer(ends, "first")
        listener = ends.receiver._tcp_listener
        assert listener is not None and listener._socket is not None
        plain, left = socket.socket.accept, [5]

        def none_left(self: socket.socket) -> Any:
            if left[0]:
                left[0] -= 1
                raise OSError(24, "Too many open files")
            return plain(self)

        monkeypatch.setattr(socket.socket, "accept", none_left)
        monkeypatch.setattr(tcp_listener, "_PAUSE_S", 0.01)
        ends.sender.peer_lost(2, "for a new pair")
        ends.receiver.peer_lost(1, "for a new pair")
        await transfer(ends, "second")
        assert not left[0]

    with_ends(test)


def test_a_listener_is_closed_once_and_leaves_nothing() -> None:
    descriptors = open_descriptors()
    listener = TcpListener("127.0.0.1", lambda reason: None)
    expected, port = listener.expect()
    assert listener.expect()[1] == port
    listener.close()
    listener.close()
    assert open_descriptors() == descriptors
    with pytest.raises(OSError, match="closed"):
        listener.expect()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)
    expected.abandon()
    with pytest.raises(PairBroken, match="abandoned"):
        expected.wait(WAIT_S)


def test_a_listener_that_cannot_listen_says_so_and_leaves_nothing() -> None:
    descriptors = open_descriptors()
    listener = TcpListener("192.0.2.1", lambda reason: None)
    with pytest.raises(OSError, match="assign"):
        listener.expect()
    listener.close()
    assert open_descriptors() == descriptors


def test_who_says_nothing_is_closed_in_time(monkeypatch) -> None:
    monkeypatch.setattr(tcp_listener, "HELLO_TIMEOUT_S", 0.05)

    async def test(ends: Ends) -> None:
        meeting = meeting_of(ends)
        await transfer(ends, "first")
        listening = await meeting
        silent = socket.create_connection((listening.host, listening.port), timeout=WAIT_S)
        assert await asyncio.to_thread(silent.recv, 1) == b""
        silent.close()

    with_ends(test)


# --- in the middle ---


class Relay:
    """Passes bytes on from a sender to a receiver, and keeps them. `change` may change what passes."""

    def __init__(self, to: tuple[str, int], change: Callable[[bytes], bytes] = lambda data: data) -> None:
        self.seen = bytearray()
        self._to, self._change = to, change
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self._sockets = [self._listening]
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        sender, _ = self._listening.accept()
        receiver = socket.create_connection(self._to)
        self._sockets += [sender, receiver]
        threading.Thread(target=self._pass_on, args=(receiver, sender, bytes), daemon=True).start()
        self._pass_on(sender, receiver, self._kept)

    def _kept(self, data: bytes) -> bytes:
        self.seen += data
        return self._change(data)

    def _pass_on(self, source: socket.socket, target: socket.socket, change: Callable[[bytes], bytes]) -> None:
        try:
            while data := source.recv(1 << 16):
                target.sendall(change(data))
            target.shutdown(socket.SHUT_WR)
        except OSError:
            return

    def close(self) -> None:
        for one in self._sockets:
            one.close()


def with_relay(
    test: Callable[[Ends, Relay], Any], change: Callable[[bytes], bytes] = lambda data: data, **options: Any
) -> None:
    """The first pair meets through a relay."""
    relays: list[Relay] = []

    async def body(ends: Ends) -> None:
        plain = ends._send_to_sender

        def send(incarnation: int, message: Message, blob: bytes) -> None:
            if isinstance(message, PairListen) and not relays:
                relays.append(Relay((message.host, message.port), change))
                message = msgspec.structs.replace(message, port=relays[0].port)
            plain(incarnation, message, blob)

        ends.receiver._send = send
        ends.transfer("r", shuffled(64, 20, 1))
        await ends.ended(1)
        await test(ends, relays[0])
        relays[0].close()

    with_ends(body, **options)


@pytest.mark.parametrize("transport", ["tcp", "tcp-plain"])
def test_what_crosses_can_be_read_only_without_encryption(transport: str, monkeypatch) -> None:
    monkeypatch.setattr(ends_module, "TRANSPORT", transport)

    async def test(ends: Ends, relay: Relay) -> None:
        assert isinstance(ends.results[0], KvSent)
        blocks = [bytes(ends.source[block].view(-1).numpy().tobytes()) for block in shuffled(64, 20, 1)]
        readable = [block[:64] in relay.seen for block in blocks]
        assert readable == [transport == "tcp-plain"] * 20
        assert len(relay.seen) > 20 * LAYOUT.block_bytes

    with_relay(test)


def test_a_byte_changed_on_its_way_ends_the_pair_and_is_not_committed() -> None:
    left = [HELLO_BYTES + HEADER_BYTES + 100]

    def flip(data: bytes) -> bytes:
        at, left[0] = left[0], left[0] - len(data)
        return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] if 0 <= at < len(data) else data

    async def test(ends: Ends, relay: Relay) -> None:
        assert isinstance(ends.results[0], KvFailed) and not ends.committed and len(ends.failed) == 1
        ends.results.clear()
        ends.failed.clear()
        await transfer(ends, "next")

    with_relay(test, flip)


def test_a_hello_that_was_overheard_is_good_for_nothing() -> None:
    async def test(ends: Ends, relay: Relay) -> None:
        overheard = bytes(relay.seen[:HELLO_BYTES])
        with socket.create_connection(relay._to, timeout=WAIT_S) as again:
            again.sendall(overheard)
            assert await asyncio.to_thread(again.recv, 1) == b""
        await transfer(ends, "next")
        assert ends.receiver.counters["strangers"] == 1

    with_relay(test)


def test_who_listens_without_the_key_is_given_nothing() -> None:
    """Between what the control link tells and the connection, another process may have taken the port."""
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        heard: list[bytes] = []

        def answer() -> None:
            connected, _ = impostor.accept()
            with connected:
                heard.append(connected.recv(HELLO_BYTES, socket.MSG_WAITALL))
                connected.sendall(heard[0][-48:])
                heard.append(connected.recv(1))

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        meeting = Rendezvous("tcp", *impostor.getsockname(), "", token=b"t" * 16, key=b"k" * 32, encrypted=False)
        with pytest.raises(PairBroken, match="does not know the key"):
            Tcp().connect(Local(PoolRows(filled_pool(LAYOUT, 4, 1), LAYOUT), 1, SMALL), meeting)
        thread.join(WAIT_S)
        assert len(heard[0]) == HELLO_BYTES and heard[1] == b"" and b"k" * 32 not in heard[0]


@pytest.mark.parametrize(("sender", "receiver"), [(True, False), (False, True), (True, True), (False, False)])
def test_either_end_has_it_encrypted(sender: bool, receiver: bool) -> None:
    async def test(ends: Ends) -> None:
        meeting = meeting_of(ends)
        await transfer(ends, "r")
        assert (await meeting).encrypted is (sender or receiver)

    base = replace(SMALL, transports=("tcp",))
    with_ends(test, settings=replace(base, encrypt=sender), receiver_settings=replace(base, encrypt=receiver))


def test_a_sender_that_encrypts_does_not_send_in_the_clear() -> None:
    local = Local(PoolRows(filled_pool(LAYOUT, 4, 1), LAYOUT), 1, SMALL, encrypt=True)
    with pytest.raises(PairBroken, match="unencrypted"):
        Tcp().connect(local, Rendezvous("tcp", "127.0.0.1", 1, "", token=b"t" * 16, key=b"k" * 32, encrypted=False))


def test_what_must_not_cross_in_the_clear_is_refused_by_name() -> None:
    assert allowed_on("auto", "cpu", confidential=True) == ("shm", "tcp")
    assert allowed_on("auto", "cuda", confidential=True) == ("cuda_ipc", "tcp")
    with pytest.raises(WrongTransport, match="gloo sends KV in the clear"):
        allowed_on("gloo", "cpu", confidential=True)
    assert "gloo" not in allowed_on("auto", "cpu") and "gloo" in TRANSPORTS


# --- records ---


def connected_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        one = socket.create_connection(listening.getsockname())
        return one, listening.accept()[0]


class Played:
    """A receiving channel, and the other end of its connection, by which a test plays the sender."""

    def __init__(self, key: bytes | None) -> None:
        self.pool = filled_pool(LAYOUT, 8, 2)
        self.before = self.pool.clone()
        ours, self.theirs = connected_pair()
        self.theirs.settimeout(WAIT_S)
        local = Local(PoolRows(self.pool, LAYOUT), 3, replace(SMALL, segment_timeout_ms=300))
        self.channel = Receiving(local, Connection(ours), key)
        self.inbox = Inbox()
        self.inbox.put(SegmentJob(None, 0, 0, 3, (2, 3, 4)))
        self.answers: list[bytes] = []

    def write(self, key: bytes | None, payload: bytes, sequence: int = 0, number: int = 0) -> None:
        connection = Connection(self.theirs)
        connection.open(self.inbox)
        writer = RecordWriter(connection, key, max(len(payload), 1))
        writer.write(sequence, number, memoryview(payload), float("inf"))

    def breaks(self, why: str) -> None:
        """It ends with this, and nothing but the granted blocks has changed."""
        with pytest.raises(PairBroken, match=why):
            self.channel.work(self.inbox, lambda job, digest: self.answers.append(digest))
        self.channel.settle(self.inbox, lambda job, digest: None)
        self.theirs.close()
        assert not self.answers
        assert same_bytes(self.pool[[0, 1, 5, 6, 7]], self.before[[0, 1, 5, 6, 7]])


GOOD = os.urandom(3 * LAYOUT.block_bytes)


@pytest.mark.parametrize("key", [None, RECORD_KEY], ids=["plain", "encrypted"])
@pytest.mark.parametrize(
    ("header", "why"),
    [
        (struct.pack("<IIQ", 0, 0, 1 << 60), "another record"),
        (struct.pack("<IIQ", 0, 0, len(GOOD) + 1), "another record"),
        (struct.pack("<IIQ", 0, 0, len(GOOD) - 1), "another record"),
        (struct.pack("<IIQ", 0, 0, 0), "another record"),
        (struct.pack("<IIQ", 1, 0, len(GOOD)), "another record"),
        (struct.pack("<IIQ", 0, 1, len(GOOD)), "another record"),
        (b"\xff" * 16, "another record"),
        (b"\0" * 5, "ended"),
    ],
)
def test_a_record_that_was_not_agreed_on_ends_its_connection_only(key: bytes | None, header: bytes, why: str) -> None:
    played = Played(key)
    played.theirs.sendall(header + os.urandom(4 * LAYOUT.block_bytes) * (len(header) == HEADER_BYTES))
    if len(header) < HEADER_BYTES:
        played.theirs.shutdown(socket.SHUT_WR)
    played.breaks(why)


@pytest.mark.parametrize("key", [None, RECORD_KEY], ids=["plain", "encrypted"])
def test_a_record_that_ends_early_ends_the_pair(key: bytes | None) -> None:
    played = Played(key)
    played.theirs.sendall(struct.pack("<IIQ", 0, 0, len(GOOD)) + b"x" * 100)
    played.theirs.shutdown(socket.SHUT_WR)
    played.breaks("ended")


@pytest.mark.parametrize("key", [None, RECORD_KEY], ids=["plain", "encrypted"])
def test_a_record_that_does_not_go_on_ends_the_pair_in_time(key: bytes | None) -> None:
    played = Played(key)
    played.theirs.sendall(struct.pack("<IIQ", 0, 0, len(GOOD)) + b"x" * 100)
    played.breaks("in time")


def test_records_of_another_key_or_in_the_clear_are_refused() -> None:
    played = Played(RECORD_KEY)
    played.write(b"another" + bytes(25), GOOD)
    played.breaks("changed on its way")
    played = Played(RECORD_KEY)
    played.theirs.sendall(struct.pack("<IIQ", 0, 0, len(GOOD)) + GOOD + b"\0" * 16)
    played.breaks("changed on its way")


def test_a_record_said_twice_is_refused() -> None:
    """The same bytes again are another record by their count."""
    played = Played(RECORD_KEY)
    played.inbox.put(SegmentJob(None, 1, 0, 3, (2, 3, 4)))
    kept: list[bytes] = []
    one, other = connected_pair()
    connection = Connection(one)
    connection.open(played.inbox)
    RecordWriter(connection, RECORD_KEY, len(GOOD)).write(0, 0, memoryview(GOOD), float("inf"))
    one.close()
    while more := other.recv(1 << 16):
        kept.append(more)
    other.close()
    played.theirs.sendall(b"".join(kept) * 2)
    with pytest.raises(PairBroken, match="changed on its way"):
        played.channel.work(played.inbox, lambda job, digest: played.answers.append(digest))
    assert len(played.answers) == 1
    played.theirs.close()
