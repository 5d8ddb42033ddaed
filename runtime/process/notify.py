"""Tells the supervisor of this process how it fares, in the protocol of systemd's sd_notify(3): ready, stopping, and a watchdog
fed by progress. `crossdock serve` and `up` listen in the same way. Without NOTIFY_SOCKET in the environment nothing is said.

The event loop feeds the watchdog, so a loop that hangs does not feed it. It feeds only while every check given to `only_while`
reports progress, so that a running loop beside a dead thread does not count as alive.
"""

import asyncio
import os
import socket
from collections.abc import Callable
from concurrent.futures import Executor, Future

_SEND_S = 1.0
_FEEDS_PER_TIMEOUT = 3
_checks: list[Callable[[], bool]] = []


def say(*lines: str, within_s: float = _SEND_S) -> None:
    """Sends one datagram, each line like `READY=1`. It is lost if it cannot be delivered in time."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    path = address if address.startswith("/") else "\0" + address[1:]  # abstract: no file
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as speaking:
            speaking.settimeout(within_s)
            speaking.connect(path)
            speaking.sendall("\n".join(lines).encode())
    except OSError:
        pass  # the supervisor is gone


def ready(status: str = "") -> None:
    """Report that this process serves, or is registered with the coordinator. Calling it again does no harm."""
    say("READY=1", *([f"STATUS={status}"] if status else []))


def stopping() -> None:
    say("STOPPING=1")


def only_while(check: Callable[[], bool]) -> None:
    """Feed the watchdog only while `check()` says that there is progress."""
    _checks.append(check)


def is_alive() -> bool:
    """Whether all checks say that there is progress."""
    return all(check() for check in _checks)


class Pulse:
    """A check for `only_while`: whether a compute thread still finishes its work."""

    def __init__(self, thread: Executor, now: Callable[[], float], longest_s: Callable[[], float]) -> None:
        """`longest_s()`: what one piece of its work may take at most."""
        self._thread = thread
        self._now = now
        self._longest_s = longest_s
        self._asked_at = now()
        self._asked: Future[None] = Future()
        self._asked.set_result(None)

    def __call__(self) -> bool:
        if self._asked.done():
            self._asked, self._asked_at = self._thread.submit(_nothing), self._now()
        return self._now() - self._asked_at <= self._longest_s()


def _nothing() -> None:
    pass


def watchdog_s() -> float:
    """How long the watchdog waits; 0: there is none for this process."""
    own = os.environ.get("WATCHDOG_PID", "") in ("", str(os.getpid()))
    usec = os.environ.get("WATCHDOG_USEC", "")
    return int(usec) / 1e6 if own and usec.isdigit() else 0.0


async def feed_watchdog() -> None:
    """Feed the watchdog a few times per timeout, as long as the process lives. Returns at once if there is no watchdog."""
    timeout_s = watchdog_s()
    while timeout_s:
        if is_alive():
            # Send without waiting: if the socket is full of earlier messages, the supervisor does not run, and this loop must
            # go on.
            say("WATCHDOG=1", within_s=0.0)
        await asyncio.sleep(timeout_s / _FEEDS_PER_TIMEOUT)
