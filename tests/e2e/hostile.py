"""Hostile connections at one port, from a process of its own: idle ones, garbage, half handshakes, resets, slow drips and
oversize frames, all open at once.

    python -m tests.e2e.hostile HOST:PORT (zmq | curve | http) CONNECTIONS HOLD_S

Prints what became of them, as JSON. Bounded: CONNECTIONS are opened once, and all are closed after HOLD_S.
"""

import argparse
import asyncio
import contextlib
import json
import random
import resource
import socket
import struct
import sys
from collections import Counter

OPENED_EACH_TURN = 100  # connections opened before those that are open get their turn
DRIP_S = 0.25
KINDS = ("idle", "garbage", "half", "reset", "drip", "oversize")
SEED = 7
CONNECT_S = 10.0


def greeting(mechanism: bytes) -> bytes:
    """Of ZMTP 3.1, as a client."""
    return b"\xff" + 8 * b"\0" + b"\x7f\x03\x01" + mechanism.ljust(20, b"\0") + b"\0" + 31 * b"\0"


READY = b"\x04\x29\x05READY\x0bSocket-Type\0\0\0\x06DEALER\x08Identity\0\0\0\0"
HUGE_FRAME = b"\x02" + struct.pack(">Q", 1 << 62) + 4_096 * b"x"
HUGE_COMMAND = b"\x06" + struct.pack(">Q", 1 << 62) + 4_096 * b"x"
REQUEST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
WORDS: dict[str, dict[str, bytes]] = {
    "zmq": {
        "half": greeting(b"NULL")[:40],
        "drip": greeting(b"NULL") + READY,
        "oversize": greeting(b"NULL") + READY + HUGE_FRAME,
    },
    "curve": {
        "half": greeting(b"CURVE") + b"\x04\xc8\x05HELLO\x01\0" + 90 * b"\0",
        "drip": greeting(b"CURVE") + 200 * b"\0",
        "oversize": greeting(b"CURVE") + HUGE_COMMAND,
    },
    "http": {
        "half": REQUEST + b"Content-Le",
        "drip": REQUEST + b"X: " + 2_000 * b"y",
        "oversize": REQUEST + b"X: " + 100_000 * b"y",
    },
}


class Crowd:
    """The connections at one port, and what became of them."""

    def __init__(self, host: str, port: int, words: str, until: float) -> None:
        self.counts: Counter[str] = Counter()
        self._to = (host, port)
        self._words = WORDS[words]
        self._until = until
        self._random = random.Random(SEED)

    async def one(self, kind: str) -> None:
        loop = asyncio.get_running_loop()
        with socket.socket() as connection:
            connection.setblocking(False)
            try:
                async with asyncio.timeout(CONNECT_S):
                    await loop.sock_connect(connection, self._to)
                self.counts["connected"] += 1
                if kind == "reset":
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    return
                async with asyncio.timeout_at(self._until):
                    await self._say(kind, connection)
                    while await loop.sock_recv(connection, 65_536):
                        pass
                self.counts["closed there"] += 1
            except TimeoutError:
                self.counts["held to the end" if loop.time() >= self._until else "not connected"] += 1
            except OSError as error:
                self.counts[f"closed there: {type(error).__name__}"] += 1

    async def _say(self, kind: str, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        if kind == "garbage":
            await loop.sock_sendall(connection, self._random.randbytes(self._random.randrange(1, 400)))
        elif kind == "drip":
            for byte in self._words["drip"]:
                await loop.sock_sendall(connection, bytes([byte]))
                await asyncio.sleep(DRIP_S)
        elif kind != "idle":
            await loop.sock_sendall(connection, self._words[kind])


async def attack(host: str, port: int, words: str, connections: int, hold_s: float) -> Counter[str]:
    crowd = Crowd(host, port, words, asyncio.get_running_loop().time() + hold_s)
    tasks = []
    for number in range(connections):
        tasks.append(asyncio.create_task(crowd.one(KINDS[number % len(KINDS)])))
        if number % OPENED_EACH_TURN == 0:
            await asyncio.sleep(0)
    await asyncio.wait(tasks)
    for task in tasks:
        task.result()
    return crowd.counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address")
    parser.add_argument("words", choices=sorted(WORDS))
    parser.add_argument("connections", type=int)
    parser.add_argument("hold_s", type=float)
    asked = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    host, _, port = asked.address.rpartition(":")
    with contextlib.suppress(KeyboardInterrupt):
        counts = asyncio.run(attack(host, int(port), asked.words, asked.connections, asked.hold_s))
        sys.stdout.write(json.dumps(counts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
