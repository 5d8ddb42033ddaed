"""`tcp` with strangers at its port: they cost no transfer, and nothing of them stays."""

import asyncio
import multiprocessing
import random
import resource
import socket
import threading
from multiprocessing.connection import Connection as Pipe
from typing import Any

import pytest

from kvtransfer.transports.tcp import listener as tcp_listener
from kvtransfer.transports.tcp.listener import TcpListener
from kvtransfer.transports.transport import PairBroken
from tests.kvtransfer import ends as ends_module
from tests.kvtransfer.ends import WAIT_S, Ends, meeting_of, transfer, with_ends
from tests.kvtransfer.strangers import Strangers, open_descriptors, stranger


@pytest.fixture(autouse=True)
def _tcp(monkeypatch):
    monkeypatch.setattr(ends_module, "TRANSPORT", "tcp")


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=[pytest.mark.long, pytest.mark.timeout(600)])])
def test_strangers_cost_no_transfer(count: int) -> None:
    """Transfers go on, new pairs meet, every stranger is counted, and nothing of them stays."""

    async def test(ends: Ends) -> None:
        meeting = meeting_of(ends)
        await transfer(ends, "first")
        listening = await meeting
        ends.receiver_side.turned_away = lambda reason: ends.loop.call_soon_threadsafe(ends.changed.set)  # type: ignore[assignment]
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
        assert not listener._pending
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


def test_descriptor_shortage_is_survived() -> None:
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


def test_listener_waits_for_descriptors(monkeypatch) -> None:
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


def test_listener_closes_once_cleanly() -> None:
    """A closed listener leaves no descriptor, refuses connections and fails those that wait for one."""
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
    with pytest.raises(PairBroken, match="the listener is closed"):
        expected.wait(WAIT_S)
    expected.abandon()
    with pytest.raises(PairBroken, match="abandoned"):
        expected.wait(WAIT_S)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_failed_listener_starts_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A listener that failed unexpectedly fails its waiters and listens again for the next pair."""
    descriptors = open_descriptors()
    listener = TcpListener("127.0.0.1", lambda reason: None)
    expected, port = listener.expect()
    thread = listener._thread
    with monkeypatch.context() as patched:
        patched.setattr(tcp_listener, "_ACCEPTED_AT_ONCE", None)
        with socket.socket() as stranger:
            stranger.settimeout(WAIT_S)
            stranger.connect_ex(("127.0.0.1", port))  # the listener may end before it has connected
            with pytest.raises(PairBroken, match="the listener failed: TypeError"):
                expected.wait(WAIT_S)
        assert thread is not None
        thread.join(WAIT_S)
    again, port = listener.expect()
    with socket.create_connection(("127.0.0.1", port), timeout=WAIT_S):
        pass
    listener.forget(again)
    listener.close()
    assert open_descriptors() == descriptors


def test_unusable_address_is_reported() -> None:
    """A listener that cannot bind its address says so and leaves no descriptor."""
    descriptors = open_descriptors()
    listener = TcpListener("192.0.2.1", lambda reason: None)
    with pytest.raises(OSError, match="assign"):
        listener.expect()
    listener.close()
    assert open_descriptors() == descriptors


def test_silent_stranger_is_closed(monkeypatch) -> None:
    """A stranger that says nothing is disconnected after the hello timeout."""
    monkeypatch.setattr(tcp_listener, "HELLO_TIMEOUT_S", 0.05)

    async def test(ends: Ends) -> None:
        meeting = meeting_of(ends)
        await transfer(ends, "first")
        listening = await meeting
        silent = socket.create_connection((listening.host, listening.port), timeout=WAIT_S)
        assert await asyncio.to_thread(silent.recv, 1) == b""
        silent.close()

    with_ends(test)
