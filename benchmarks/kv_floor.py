"""The limits of this machine, for `python -m benchmarks kv`: the same bytes between the same two processes, without crossdock.
Both ends of each measurement: `Near` receives, the functions below it run in the sending process (`bench_kv_far`) and return
seconds.
"""

import asyncio
import mmap
import os
import socket
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import xxhash

from benchmarks.remote_peer import Far
from kvtransfer.memory.shared import SharedMemory, map_shared
from launcher.http.streams import BenchFailed

_PIECE_BYTES = 4 << 20  # bytes that a bare copy announces at once: so few that digesting the last ones does not matter
_ROUND_TRIPS, _TIMEOUT_S, _WAIT_S = 5, 30.0, 120.0


class Near:
    """The receiving ends. Sizes are in bytes; `starts` has the places of pieces in the sender's memory."""

    def __init__(self, memory: SharedMemory, pool: torch.Tensor, far: Far) -> None:
        self._memory, self._pool, self._far = memory, pool, far
        self._staging = torch.empty(64 << 20, dtype=torch.uint8).fill_(1)

    async def tcp(self, size: int, starts: list[int]) -> float:
        """Seconds, into one buffer."""
        buffer: Any = self._staging[:size].numpy()

        def serve(connection: socket.socket) -> None:
            connection.settimeout(None)  # as simple as possible: with a timeout, each call polls first
            connection.sendall(b"!")
            for _ in starts:
                got = 0
                while got < size:
                    got += _some(connection.recv_into(buffer[got:]))
            connection.sendall(b"!")

        return await self._with_socket(serve, "bare_tcp", size=size, starts=starts)

    async def round_trip(self) -> float:
        """Returns the seconds of a round trip of one byte over TCP, with one thread and no event loop at each end."""

        def serve(connection: socket.socket) -> None:
            while byte := connection.recv(1):
                connection.sendall(byte)

        return await self._with_socket(serve, "bare_round_trip")

    async def shm(self, size: int, block_bytes: int, starts: list[int], targets: list[int]) -> float:
        """Returns the seconds in which the sender copies into the pool and this process digests the copied pieces."""
        raw: Any = self._pool.numpy()
        pool = memoryview(raw)
        pieces = [piece for target in targets for piece in _pieces(target, size)]

        def serve(connection: socket.socket) -> None:
            done = 0
            connection.sendall(b"!")
            while done < len(pieces):
                told = _some(len(connection.recv(1024)))
                for start, count in pieces[done : done + told]:
                    for at in range(start, start + count, block_bytes):
                        xxhash.xxh3_64_digest(pool[at : min(at + block_bytes, start + count)])
                done += told
            connection.sendall(b"!")

        file = f"/proc/{os.getpid()}/fd/{self._memory.descriptor}"
        return await self._with_socket(serve, "bare_shm", file=file, size=size, starts=starts, targets=targets)

    async def _with_socket(self, serve: Callable[[socket.socket], None], order: str, **fields: Any) -> float:
        def accept(listening: socket.socket) -> None:
            connection, _ = listening.accept()
            with connection:
                connection.settimeout(_WAIT_S)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                serve(connection)

        with socket.create_server(("127.0.0.1", 0)) as listening:
            listening.settimeout(_WAIT_S)
            serving = asyncio.get_running_loop().run_in_executor(None, accept, listening)
            took = await self._far.order(order, port=listening.getsockname()[1], **fields)
            await serving
        return float(took)


def _some(read: int) -> int:
    if not read:
        raise BenchFailed("the other process has left")
    return read


def _pieces(start: int, size: int) -> list[tuple[int, int]]:
    """Returns (start, bytes) of the pieces that are announced at once."""
    return [(start + at, min(_PIECE_BYTES, size - at)) for at in range(0, size, _PIECE_BYTES)]


# --- in the sending process ---


def _connected(port: int) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=_TIMEOUT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def over_tcp(memory: torch.Tensor, port: int, size: int, starts: list[int]) -> float:
    """Sends with Python's plain socket calls from the pool into the other end's buffer. Returns the seconds until the last
    byte has arrived there."""
    raw: Any = memory.numpy()
    with _connected(port) as connection:
        connection.settimeout(None)
        connection.recv(1)
        began = time.perf_counter()
        for start in starts:
            connection.sendall(raw[start : start + size])
        connection.recv(1)
        return time.perf_counter() - began


def round_trip(port: int) -> float:
    """The median of some."""
    with _connected(port) as connection:
        took = []
        for _ in range(_ROUND_TRIPS):
            began = time.perf_counter()
            connection.sendall(b"!")
            connection.recv(1)
            took.append(time.perf_counter() - began)
    return statistics.median(took)


class IntoPool:
    """Copies into the memory of the other process, which stays mapped between measurements."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._source = memory.numpy()
        self._mapped: dict[str, Any] = {}

    def copy(self, port: int, file: str, size: int, starts: list[int], targets: list[int]) -> float:
        if file not in self._mapped:
            descriptor = os.open(file, os.O_RDWR | os.O_CLOEXEC)
            file_bytes = os.fstat(descriptor).st_size
            mapped = map_shared(descriptor, file_bytes)
            os.close(descriptor)
            self._mapped[file] = np.frombuffer(mapped, dtype=np.uint8)
            self._mapped[file][:: mmap.PAGESIZE] += 0  # maps all its pages
        target_bytes = self._mapped[file]
        with _connected(port) as connection:
            connection.recv(1)
            began = time.perf_counter()
            for start, target in zip(starts, targets, strict=True):
                for (from_, count), (to, _) in zip(_pieces(start, size), _pieces(target, size), strict=True):
                    np.copyto(target_bytes[to : to + count], self._source[from_ : from_ + count])
                    connection.sendall(b"!")
            connection.recv(1)
            return time.perf_counter() - began
