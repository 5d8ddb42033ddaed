"""How two processes come to share a process group of two, without a default group and without an open port for longer.

The receiver binds a socket to its fabric address only and serves a TCPStore from it: a store given a host and port would
listen on every interface. The store knows no passwords, and any process that connects can list and change it. So nothing in
it may be a secret. The prefix of its keys keeps two meetings apart, not strangers out. A group of NCCL keeps the store for
as long as it lives. Everything here blocks, up to `timeout_s`, and belongs to a pair's own thread; it raises `RuntimeError`
(torch's errors are such) or `OSError`.
"""

import contextlib
import secrets
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from torch import distributed

_c10d: Any = distributed  # torch's own stubs do not export the names used here

RECEIVER_RANK = 0
SENDER_RANK = 1

_ARRIVED = "sender"
_HERE = "here"  # the sender needs the store no more
_ABANDONED = "abandoned"
_REACH_SHARE = 0.2  # of the timeout, for a first connection; the TCPStore's retries take up to thrice as long


Met = TypeVar("Met")
Make = Callable[[Any, int, str, float], Met]
"""Makes what the two share, of (store, own rank, own address, timeout_s). The store is theirs alone, and both are there."""


class StoreListener:
    """The receiver's end: listens from the start, on `host`, until `meet` returns or the listener is dropped."""

    def __init__(self, host: str, timeout_s: float) -> None:
        self.secret = secrets.token_hex(16)
        self._host = host
        self._timeout_s = timeout_s
        timeout = timedelta(seconds=timeout_s)
        family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family, socket.SOCK_STREAM) as listening:
            listening.bind((host, 0))
            listening.listen(8)
            self.port: int = listening.getsockname()[1]
            descriptor = listening.detach()
        store = _c10d.TCPStore(
            host, self.port, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=descriptor
        )
        self._store: Any = _c10d.PrefixStore(self.secret, store)
        # A second connection, since a store that waits in one thread cannot be used from another.
        waker = _c10d.TCPStore(host, self.port, is_master=False, timeout=timeout)
        self._waker: Any = _c10d.PrefixStore(self.secret, waker)

    def meet(self, make: "Make[Met]") -> Met:
        """Wait for the sender, then make what the two share. Called once."""
        store, self._store = self._store, None
        assert store is not None, "a listener meets once"
        try:
            if store.get(_ARRIVED) != _HERE.encode():
                raise RuntimeError("the rendezvous was abandoned")
            return make(store, RECEIVER_RANK, self._host, self._timeout_s)
        finally:
            self._waker = None

    def abandon(self) -> None:
        """Wake `meet` if it still waits for the sender. From any thread."""
        waker = self._waker
        if waker is not None:
            with contextlib.suppress(RuntimeError):  # `meet` ended in this moment, and its store with it
                waker.set(_ARRIVED, _ABANDONED)


def connect(make: "Make[Met]", host: str, port: int, secret: str, timeout_s: float) -> Met:
    """The sender's end: join the receiver that listens at `host`:`port`. The receiver listens before it sends its address. So
    a refused connection shows at once that it is gone; a TCPStore alone would retry for up to three times its timeout."""
    reach_s = timeout_s * _REACH_SHARE
    with socket.create_connection((host, port), timeout=reach_s):
        pass
    server = _c10d.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=reach_s))
    server.set_timeout(timedelta(seconds=timeout_s))
    store = _c10d.PrefixStore(secret, server)
    store.set(_ARRIVED, _HERE)
    return make(store, SENDER_RANK, _address_towards(host, port), timeout_s)


def _address_towards(host: str, port: int) -> str:
    """Our own address on the route to a peer. Connecting a datagram socket sends nothing."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        name: str = probe.getsockname()[0]
        return name
