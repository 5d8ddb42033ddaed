"""A connection between two workers and its threads, as `kvtransfer.transports.pair`: segments cross one after the other, each
when both ends are at it. A fault breaks the connection for good. A thread may read or write the segment's blocks until its
answer comes.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtransfer.memory.layout import blocks_of
from tests.world.network import network_of
from tests.world.toy_model import Toy, mix
from tests.world.world import SimulatedProcess, Timer

RENDEZVOUS_S = 10.0
SEGMENT_S = 3.0
Content = tuple[tuple[int, ...], ...]


class PoolProcess(SimulatedProcess):
    """A process with a pool of KV blocks."""

    def check_writable(self, blocks: Sequence[int]) -> None:
        """Raises `Violation` if these blocks are not its own, so that it may not receive into them."""
        raise NotImplementedError


@dataclass(eq=False)
class TransferJob:
    owner: object
    segment: int
    sequence: int
    blocks: int
    block_ids: tuple[int, ...] | None
    """None: receive and discard."""


def digest(content: Content) -> bytes:
    value = 0
    for slots in content:
        for slot in slots:
            value = mix(value, slot & (1 << 64) - 1)
    return value.to_bytes(8, "little")


class SimulatedPair:
    """One end of a connection. It reads or writes only the blocks of its first job."""

    def __init__(
        self,
        process: PoolProcess,
        toy: Toy,
        *,
        sends: bool,
        ratio: int,
        on_ready: Callable[[], None],
        on_segment: Callable[[TransferJob, bytes | None], None],
        on_down: Callable[[str], None],
    ) -> None:
        self.process = process
        self.toy = toy
        self.sends = sends
        self.ratio = ratio
        """The number of our blocks to those that cross."""
        self.is_down = False
        self._ready = False
        self.far: SimulatedPair | None = None
        self._on_ready, self._on_segment, self._on_down = on_ready, on_segment, on_down
        self._jobs: deque[TransferJob] = deque()
        self._closing = False
        self._broken = ""
        self._started = -1
        """Sequence number of the job that the thread works on."""
        self._timer: Timer | None = process.after(RENDEZVOUS_S, self.fail, "nobody came to the rendezvous")

    @property
    def queued(self) -> int:
        return len(self._jobs)

    def jobs_of(self, owner: object) -> list[TransferJob]:
        return [job for job in self._jobs if job.owner is owner]

    def meet(self, secret: str) -> None:
        meeting = network_of(self.process).rendezvous
        other = meeting.pop(secret, None)
        if other is None:
            meeting[secret] = self
            return
        if other.is_down or not other.process.alive:
            self.process.after(0.005, self.fail, "connection refused")
            return
        for one, far in ((self, other), (other, self)):
            one.far = far
            self.process.world.after(self.process.world.random.uniform(0.002, 0.01), one.process.call, one._met)

    def submit(self, job: TransferJob) -> None:
        assert not self.is_down
        self._jobs.append(job)
        self._next()

    def close(self) -> None:
        """Ends the thread after the segment that it works on."""
        if not self._closing:
            self._closing = True
            if not self._at_job():
                self.process.after(0.001, self.fail, "closed")

    def fail(self, reason: str) -> None:
        """Ends the thread. The thread at the other end hears of it, or finds out by its timeout."""
        if self.is_down:
            return
        self.is_down = True
        if self._timer is not None:
            self._timer.cancel()
        jobs, self._jobs = self._jobs, deque()
        if self.far is not None:
            self.far._far_failed(f"the other end: {reason}")
        self._on_down(reason)
        for job in jobs:
            self._on_segment(job, None)

    def _met(self) -> None:
        if self.is_down or self._closing:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._ready = True
        self._on_ready()
        self._next()

    def _at_job(self) -> bool:
        return bool(self._jobs) and self._started == self._jobs[0].sequence

    def _far_failed(self, reason: str) -> None:
        self._broken = reason
        if self._at_job() and self.process.world.random.random() < 0.7:
            self.process.after(0.005, self.fail, reason)

    def _next(self) -> None:
        """Lets the thread take its next job, if it is free."""
        if not self._jobs or self.is_down or not self._ready or self._at_job():
            return
        if self._closing or self._broken:
            self.process.after(0.001, self.fail, self._broken or "closed")
            return
        job = self._jobs[0]
        self._started = job.sequence
        self._timer = self.process.after(SEGMENT_S, self._too_late, job)
        assert self.far is not None
        if self.far._at_job() and self.far._started == job.sequence:
            world = self.process.world
            world.after(world.random.uniform(0.0005, 0.004), self._cross, job.sequence)

    def _too_late(self, job: TransferJob) -> None:
        if self._jobs and self._jobs[0] is job:
            self.fail("timed out")

    def _cross(self, sequence: int) -> None:
        """Both threads are at this segment: its bytes move."""
        far, world, network = self.far, self.process.world, network_of(self.process)
        assert far is not None
        ends = (self, far)
        if any(end.is_down or not end.process.alive or end._started != sequence for end in ends):
            return
        if any(network.blocked(a.process, b.process) for a, b in (ends, ends[::-1])):
            return  # the timeouts will tell
        if any(end.process.paused for end in ends):
            world.after(0.05, self._cross, sequence)
            return
        source, target = ends if self.sends else ends[::-1]
        job, into = source._jobs[0], target._jobs[0]
        assert job.block_ids is not None and job.blocks == into.blocks
        content = source.toy.packed(job.block_ids, source.ratio)
        sent = digest(content)
        if world.random.random() < network.corrupt:
            world.injected["segment corrupted"] += 1
            content = ((content[0][0] ^ 1, *content[0][1:]), *content[1:])
        received = b""
        if into.block_ids is not None:
            target.process.check_writable(blocks_of(into.block_ids, target.ratio))
            target.toy.spread(into.block_ids, target.ratio, content)
            received = digest(content)
        source.process.call(source._done, job, sent)
        target.process.call(target._done, into, received)

    def _done(self, job: TransferJob, segment_digest: bytes) -> None:
        if self.is_down or not self._jobs or self._jobs[0] is not job:
            return
        self._jobs.popleft()
        if self._timer is not None:
            self._timer.cancel()
        self._on_segment(job, segment_digest)
        if self._closing and not self.is_down:
            self.fail("closed")
        else:
            self._next()
