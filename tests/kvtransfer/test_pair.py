"""What a pair's thread tells the loop, and when; the channel is played."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence

import torch

from kvtransfer.memory.pool import PoolRows
from kvtransfer.transports import registry as transports
from kvtransfer.transports.pair import Pair, PairEvents
from kvtransfer.transports.transport import Answer, Channel, Inbox, LocalEnd, PairBroken, Rendezvous, SegmentJob
from tests.kvtransfer.ends import LAYOUT, SMALL, WAIT_S

MEETING = Rendezvous("played", "", 0, "")


class Played(Channel):
    """Carries segments out as far as it may."""

    def __init__(self) -> None:
        self.may = threading.Semaphore(0)
        self.breaks_at = -1

    def work(self, inbox: Inbox, answer: Answer) -> None:
        while True:
            inbox.wait()
            for job in inbox.take():
                assert self.may.acquire(timeout=WAIT_S)
                if job.sequence == self.breaks_at:
                    raise PairBroken("told to")
                answer(job, b"digested")
            if inbox.closed:
                return


class Heard:
    """A pair with a played channel, and what the loop hears of it."""

    def __init__(self, monkeypatch) -> None:
        self.channel = Played()
        monkeypatch.setattr(transports, "connect", lambda local, meeting: self.channel)
        self.segments: list[tuple[int, bytes]] = []
        self.more = asyncio.Event()
        self.words = 0
        self.down = asyncio.Event()
        loop = asyncio.get_running_loop()
        plain = loop.call_soon_threadsafe

        def counted(*arguments, **named):
            self.words += 1
            return plain(*arguments, **named)

        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
        events = PairEvents(
            lambda: None,
            self._on_segments,
            lambda reason: self.pair.close(),  # type: ignore[arg-type, has-type]
            self.down.set,
        )
        rows = PoolRows(torch.zeros(LAYOUT.shape(4)), LAYOUT)
        self.pair = Pair(MEETING, LocalEnd(rows, 1, SMALL), events, "kv-played")

    def _on_segments(self, answers: Sequence[tuple[SegmentJob, bytes]]) -> None:
        self.segments += [(job.sequence, digest) for job, digest in answers]
        self.more.set()

    def submit(self, *owners: object) -> None:
        for sequence, owner in enumerate(owners):
            self.pair.submit(SegmentJob(owner, 0, sequence, 1, (0,)))

    async def until(self, count: int) -> None:
        async with asyncio.timeout(WAIT_S):
            while len(self.segments) < count:
                self.more.clear()
                await self.more.wait()

    async def close(self) -> None:
        self.channel.may.release(1000)
        self.pair.close()
        async with asyncio.timeout(WAIT_S):
            await self.down.wait()


def with_pair(monkeypatch, test: Callable[[Heard], Awaitable[None]]) -> None:
    async def main() -> None:
        heard = Heard(monkeypatch)
        try:
            await test(heard)
        finally:
            await heard.close()

    asyncio.run(main())


def test_last_segment_is_reported_at_once(monkeypatch):
    """The last segment of a session is reported at once, though other sessions' segments follow."""

    async def test(heard: Heard) -> None:
        one, other = object(), object()
        heard.submit(one, one, one, other, other, other, other, other)
        heard.channel.may.release(3)
        await heard.until(3)
        assert heard.segments == [(0, b"digested"), (1, b"digested"), (2, b"digested")]
        heard.channel.may.release(5)
        await heard.until(8)

    with_pair(monkeypatch, test)


def test_segment_answers_come_in_batches(monkeypatch):
    """The segments of one session are reported in order, several at a time."""

    async def test(heard: Heard) -> None:
        heard.submit(*[heard] * 32)
        heard.channel.may.release(32)
        await heard.until(32)
        assert [sequence for sequence, _ in heard.segments] == list(range(32))
        assert heard.words <= 10, "a word to the loop for each segment"

    with_pair(monkeypatch, test)


def test_half_a_window_is_reported(monkeypatch):
    """A sender announces more when half its window is free: it must not wait for the other half."""

    async def test(heard: Heard) -> None:
        heard.submit(*[heard] * 8)
        heard.channel.may.release(4)
        await heard.until(4)

    with_pair(monkeypatch, test)


def test_few_answers_are_kept_back(monkeypatch):
    """They count towards those that a receiver queues, and a sender that announces more breaks the protocol."""

    async def test(heard: Heard) -> None:
        heard.submit(*[heard] * 600)
        heard.channel.may.release(128)
        await heard.until(128)

    with_pair(monkeypatch, test)


def test_done_segments_survive_a_break(monkeypatch):
    """Segments carried out before a pair broke are reported with their digest, and the others without."""

    async def test(heard: Heard) -> None:
        heard.channel.breaks_at = 2
        heard.submit(*[heard] * 9)
        heard.channel.may.release(3)
        await heard.until(9)
        assert heard.segments == [(at, b"digested" if at < 2 else b"") for at in range(9)]

    with_pair(monkeypatch, test)
