"""Connections of hosts that know no key, at the port of `tcp`."""

import itertools
import os
import random
import socket
import threading
from collections import deque

from kvtransfer.transports.tcp.handshake import HELLO_BYTES, KEY_BYTES, NONCE_BYTES, TOKEN_BYTES, hello

KINDS = ("silent", "closed at once", "garbage", "half a hello", "another key", "a flood of bytes", "reset")
HELD = 100  # kept open at once by the one who makes them


def stranger(address: tuple[str, int], kind: str, dice: random.Random) -> socket.socket:
    """A connection that has said what strangers of this kind say. Raises `OSError`."""
    connected = socket.create_connection(address, timeout=60.0)
    foreign = hello(dice.randbytes(TOKEN_BYTES), dice.randbytes(KEY_BYTES), dice.randbytes(NONCE_BYTES))
    words = {
        "garbage": dice.randbytes(HELLO_BYTES),
        "half a hello": foreign[: HELLO_BYTES // 2],
        "another key": foreign,
        "a flood of bytes": dice.randbytes(1 << 16),
    }
    try:
        connected.sendall(words.get(kind, b""))
    except OSError:
        pass  # it was turned away amid the words
    if kind == "reset":
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    if kind in ("closed at once", "reset"):
        connected.close()
    return connected


class Strangers:
    """`count` connections of all kinds, made by a thread of their own."""

    def __init__(self, address: tuple[str, int], count: int, seed: int = 1) -> None:
        self.made = 0
        self._address, self._count = address, count
        self._dice = random.Random(seed)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        held: deque[socket.socket] = deque()
        for kind in itertools.islice(itertools.cycle(KINDS), self._count):
            held.append(stranger(self._address, kind, self._dice))
            self.made += 1
            if len(held) > HELD:
                held.popleft().close()
        for one in held:
            one.close()

    @property
    def are_there(self) -> bool:
        return self._thread.is_alive()

    def join(self) -> None:
        self._thread.join(60)
        assert self.made == self._count, "a stranger could not connect"


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
