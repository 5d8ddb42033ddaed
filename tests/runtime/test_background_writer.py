"""Writing on a thread: in order, bounded, counted, and never waited for."""

import fcntl
import os
import subprocess
import sys
import threading
from pathlib import Path

from runtime.storage import background_writer
from runtime.storage.background_writer import BackgroundWriter

ROOT = Path(__file__).parents[2]


class _Gate:
    """A sink that takes nothing until it is opened."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.began = threading.Event()
        self.got: list[bytes] = []

    def __call__(self, piece: bytes) -> None:
        self.began.set()
        assert self.opened.wait(30)
        self.got.append(piece)


def test_stalled_sink_drops_and_counts() -> None:
    """While a sink takes nothing, the newest pieces wait; the others are counted, and a note stands in their place."""
    gate, before = _Gate(), BackgroundWriter.dropped_lines
    writer = BackgroundWriter(gate, note=lambda count: b"dropped %d" % count)
    piece = bytes(background_writer.WAITING_BYTES_MAX // 4)
    writer.put(b"first")
    assert gate.began.wait(30)
    for _ in range(9):
        writer.put(piece)
    writer.put(b"last")
    assert not writer.flush(), "it does not wait for long"
    gate.opened.set()
    assert writer.close()
    assert gate.got == [b"first", b"dropped 6", *[piece] * 3, b"last"]
    assert BackgroundWriter.dropped_lines - before == 6


def test_failing_sink_ends_no_thread() -> None:
    """After a write that failed the next ones are tried."""
    got: list[bytes] = []

    def write(piece: bytes) -> None:
        if piece == b"bad":
            raise OSError("the disk is full")
        got.append(piece)

    writer = BackgroundWriter(write)
    for piece in (b"bad", b"good"):
        writer.put(piece)
    assert writer.close() and got == [b"good"]


CHILD = """
import asyncio, os, sys
from runtime.process import log
from runtime.process.driver import run_process
logger = log.configure(level="info", fmt="json", process="p")
async def main(stop):
    for number in range(60_000):
        logger.info("a line of some length, many times " * 4, number=number)
        if number % 1000 == 0:
            await asyncio.sleep(0)
    os.write(1, b"serves\\n")
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    logger.warning("last words")
    raise RuntimeError("bug")
sys.exit(run_process(main))
"""


def test_full_log_pipe_blocks_nothing() -> None:
    """A process whose log nobody reads goes on; read again, the log says what it lacks, and ends with the traceback."""
    command = [sys.executable, "-c", CHILD]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, **pipes) as child:  # type: ignore[call-overload]
        fcntl.fcntl(child.stderr, fcntl.F_SETPIPE_SZ, 4096)
        timer = threading.Timer(100, child.kill)
        timer.start()
        try:
            assert child.stdout.readline() == b"serves\n"
            assert os.get_blocking(child.stderr.fileno())
            reading = threading.Thread(target=lambda: said.append(child.stderr.read()))
            said: list[bytes] = []
            child.stdin.write(b"\n")
            child.stdin.close()
            reading.start()
            reading.join(60)
            assert child.wait(30) != 0
        finally:
            timer.cancel()
    (text,) = said
    dropped, last = text.index(b"log lines were dropped"), text.index(b"last words")
    assert dropped < last and b"RuntimeError: bug" in text
