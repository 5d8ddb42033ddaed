"""A process that has run out of descriptors or threads: it refuses what needs more of them, and goes on."""

import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from kvtransfer.session.session import KvFailed, KvSent
from proto.kv import PairClosed
from tests.kvtransfer.ends import SMALL, Ends, with_ends

ROOT = Path(__file__).parents[2]
CHILD_S = 90.0


@pytest.mark.parametrize("transport", ["shm", "gloo", "tcp"])
def test_pair_without_resources_is_refused(transport, monkeypatch):
    """On either end: the session fails, is counted, and the transport is not blamed."""

    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    def no_descriptor(*_: int) -> int:
        raise OSError(24, "Too many open files")

    async def test(ends: Ends) -> None:
        faults = (("threading.Thread.start", no_thread), ("os.eventfd", no_descriptor))
        for number, (what, fault) in enumerate(faults):
            with monkeypatch.context() as patch:
                patch.setattr(what, fault)
                ends.transfer(f"without-{number}", [1, 2, 3])
                await ends.until(lambda number=number: len(ends.results) == number + 1)  # type: ignore[misc]
        assert ends.receiver.counters["refused_pairs"] == 2 and not ends.receiver.counters["pairs"]
        for result in ends.results:
            assert isinstance(result, KvFailed) and "is left for another pair" in result.reason
        ends.transfer("with", [1, 2, 3])
        await ends.until(lambda: len(ends.results) == 3)
        assert isinstance(ends.results[2], KvSent)
        assert not ends.sender.counters[f"broken_{transport}"]

    with_ends(test, settings=replace(SMALL, transports=(transport,)))


def test_threadless_sender_tells_receiver(monkeypatch):
    """A sender that cannot start its pair's thread closes the pair, and the receiver's session fails."""
    start = threading.Thread.start

    def senders_fails(thread: threading.Thread) -> None:
        if thread.name.startswith("kv-0001-"):  # that of the sender's pair
            raise RuntimeError("can't start new thread")
        start(thread)

    async def test(ends: Ends) -> None:
        monkeypatch.setattr(threading.Thread, "start", senders_fails)
        ends.transfer("r", [1, 2])
        await ends.until(lambda: bool(ends.results))
        assert ends.sender.counters["refused_pairs"] == 1
        await ends.until(lambda: any(isinstance(frame, PairClosed) for frame in ends.frames))
        await ends.until(lambda: bool(ends.failed))

    with_ends(test)


EXHAUSTED = """
import asyncio, os, resource, socket, sys, time
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 160))
from proto.limits import PROTOCOL_VERSION
from proto.messages import Hello, Role
from runtime.process.driver import run_process
from runtime.link.server import LinkServer, LinkSettings
from runtime.link.client import LinkClient
from runtime.metrics.server import MetricsServer

FAST = LinkSettings(heartbeat_ms=50, reconnect_ms=5, reconnect_ms_max=10, handshake_timeout_ms=2_000)

def hello(incarnation):
    return Hello(PROTOCOL_VERSION, Role.PREFILL, incarnation, "x")

async def main(stop):
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 160
    changed = asyncio.Event()
    up = []
    server = LinkServer(
        bind="tcp://127.0.0.1:*", hello=hello(7), accept=lambda _: None, on_up=lambda peer: None,
        on_message=lambda *_: None, on_down=lambda *_: None, settings=FAST,
    )
    address = await server.start()
    observed = MetricsServer("127.0.0.1:0")
    await observed.start()

    def client():
        return LinkClient(
            address=address, hello=hello(9), on_up=lambda peer, _: up.append(peer), on_message=lambda *_: None,
            on_down=lambda *_: None, settings=FAST,
        )

    async def until(condition):
        async with asyncio.timeout(60):
            while not condition():
                await asyncio.sleep(0.01)

    first = client()
    await first.start()
    await until(lambda: len(up) == 1)
    waiting = [socket.socket() for _ in range(4)]
    taken = []
    try:
        while True:
            taken.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        pass
    second = client()
    await second.start()
    link_port, metrics_port = int(address.rpartition(":")[2]), int(observed.address.rpartition(":")[2])
    for one, port in zip(waiting, (link_port, metrics_port) * 2):
        one.connect(("127.0.0.1", port))
    await until(lambda: "Too many open files" in second.last_error)
    await asyncio.sleep(0.3)
    assert len(up) == 1
    for one in taken:
        os.close(one)
    await until(lambda: len(up) == 2)
    reader, writer = await asyncio.open_connection("127.0.0.1", metrics_port)
    writer.write(b"GET /health HTTP/1.0\\r\\n\\r\\n")
    assert b"200" in await asyncio.wait_for(reader.readline(), 60)
    await first.close()
    await second.close()
    await server.close()
    print("served")
    return 0

sys.exit(run_process(main))
"""


def test_exhausted_process_serves_again():
    """Links that cannot be opened are tried again, and strangers at its ports end nothing."""
    child = subprocess.run(
        [sys.executable, "-c", EXHAUSTED], cwd=ROOT, capture_output=True, text=True, timeout=CHILD_S, check=False
    )
    assert (child.returncode, child.stdout.splitlines()[-1:]) == (0, ["served"]), child.stdout + child.stderr
