"""The interface of a transport: how two ends meet, and how the segments of a pair then cross.

A transport has a name, knows whether it can work between this process and a given peer, and makes one of two ends: the
receiver's `Listener`, whose `meeting` is told to the sender over the control link, or the sender's `Channel`, made by
joining that meeting. `Listener.meet` gives the receiver its `Channel`. A channel then works through segments in the order of
the pair. All of it runs in the pair's own thread and may block there, within the limits of `KvSettings`.

Transports differ in where the data lands first:
- `tcp`: the receiver reads into the target blocks itself, so nothing but its own thread writes to them.
- `shm`: the receiver grants a place in a window of memory that the two share. The sender copies there and says when it is
  done, and the receiver digests the data and copies it to its blocks.
- `nccl` does the same between GPUs, in a buffer of the channel, with an exchange of its own before each message.
- `cuda_ipc` writes to the target blocks themselves. The receiver's channel grants them, segment by segment, and until the
  sender says that it is done with a granted segment, or is proven to be gone, they are nobody else's. `Channel.settle` waits
  for that proof.
"""

import os
import select
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

from kvtransfer.memory.cuda import DeviceMemory
from kvtransfer.memory.digests import BlockDigests
from kvtransfer.memory.pool import PoolRows
from kvtransfer.session.limits import KvSettings

MAX_QUEUED_SEGMENTS = 1024
"""Segments a pair holds at once. A correct sender stays within its window, but may have finished as many more segments that
the receiver has not."""


PoolMemory = DeviceMemory  # a pool's memory, if other processes of this host may map it


class PairBroken(Exception):
    """The pair cannot go on: the peer is gone, was silent for too long, or said what no correct peer says."""


@dataclass(slots=True, eq=False)
class SegmentJob:
    """One segment on its way. `sequence` is its place and tag on the pair.

    `block_ids` are read when sending. On the receiver they are the target blocks. The event loop may set them to
    None at any time: the data is then received and discarded. `digest` is that of the sent blocks, where it is known before.
    """

    owner: Any  # the session
    segment: int
    sequence: int
    blocks: int
    block_ids: tuple[int, ...] | None
    digest: bytes = b""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where and how a receiver waits for its sender, told over the link at the KV port. `why` says what spoke against better
    transports, or is empty. `token`, `key` and `encrypted` are of `tcp`."""

    transport: str
    host: str
    port: int
    secret: str
    why: str = ""
    token: bytes = b""
    key: bytes = field(default=b"", repr=False)
    encrypted: bool = False


@dataclass(frozen=True, slots=True)
class LocalEnd:
    """The part of its own end that a transport uses. `memory` is where the pool lies, if others may map it; `digests`: set
    on the sender, where digests are made before blocks are sent. `listener` is the receiver's listening socket, for
    transports whose pairs share one; with `encrypt` KV crosses a network by `tcp` only encrypted."""

    rows: PoolRows
    segment_blocks: int
    settings: KvSettings
    listen_host: str = ""
    memory: PoolMemory | None = None
    digests: BlockDigests | None = None
    listener: object = None
    encrypt: bool = False


class Inbox:
    """Segments for a pair's thread. Filled and closed on the event loop; the thread waits for it, alone or in a `poll`."""

    def __init__(self) -> None:
        self.closed = False
        self.settle_limit_ms: int | None = None
        self._jobs: deque[SegmentJob] = deque()
        self._is_woken = False
        self._is_told = False  # the thread is woken already for what is queued
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def put(self, *jobs: SegmentJob) -> None:
        self._jobs += jobs
        if not self._is_told:
            self._is_told = True
            os.eventfd_write(self._event, 1)

    def wake(self) -> None:
        """Have the thread look at what was revoked."""
        self._is_woken = True
        if not self._is_told:
            self._is_told = True
            os.eventfd_write(self._event, 1)

    def was_woken(self) -> bool:
        """Whether `wake` was called since this was asked last; to be asked after `take`."""
        if not self._is_woken:
            return False
        self._is_woken = False
        return True

    def close(self, settle_limit_ms: int | None) -> None:
        """Close the inbox: queued segments are not begun. If there is a limit, segments in flight must also be released by
        then, proven safe or not, because this process ends and does not read later writes."""
        self.closed = True
        self.settle_limit_ms = settle_limit_ms
        os.eventfd_write(self._event, 1)

    def fileno(self) -> int:
        """Readable when something was put or the inbox was closed since the last `take`."""
        return self._event

    def take(self) -> list[SegmentJob]:
        """All that is queued; does not wait."""
        if not self._is_told and not self.closed:
            return []  # asked for each segment: this spares a call to the kernel
        try:
            os.eventfd_read(self._event)
        except BlockingIOError:
            return []
        self._is_told = False
        return [self._jobs.popleft() for _ in range(len(self._jobs))]

    def wait(self) -> None:
        """Wait until something was put or the inbox was closed. There is no limit: the driver closes it."""
        poll = select.poll()
        poll.register(self._event, select.POLLIN)
        poll.poll()

    def release(self) -> None:
        """Give the descriptor back; neither side uses the inbox any more."""
        os.close(self._event)


UNWANTED: Final = b"\0" * 8  # the digest of a segment that the receiver did not want: its session is over
Answer = Callable[[SegmentJob, bytes], None]
"""Says that a segment was transferred (its digest), skipped (`UNWANTED`) or failed (empty). Its blocks are free of it now."""


class Channel(ABC):
    """One end of a pair that has met."""

    @abstractmethod
    def work(self, inbox: Inbox, answer: Answer) -> None:
        """Carry out what is put into the inbox, in order, until it is closed. Raises what breaks the pair: `PairBroken`,
        `OSError` or `RuntimeError`. Segments not answered by then are answered by `settle`, or by the `Pair` after it."""

    def settle(self, inbox: Inbox, answer: Answer) -> None:
        """Called after `work`, even if it failed. Release everything, and return when no segment's blocks are touched any
        more. This waits as long as the peer may still write, unless the inbox has a limit. Never raises."""
        return

    def revoke(self, job: SegmentJob) -> None:
        """This segment is not wanted any more (its `block_ids` are None now). From any thread; it hastens the answer."""
        return


class Listener(ABC):
    """The receiver's end before the two have met."""

    meeting: Rendezvous

    @abstractmethod
    def meet(self) -> Channel:
        """Wait for the sender. Called once. Raises as `Channel.work` does."""

    @abstractmethod
    def abandon(self) -> None:
        """Make `meet` fail now. From any thread, at any time."""


class Transport(ABC):
    """Stateless. `listen` and `connect` raise as `Channel.work` does."""

    name: ClassVar[str]
    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")  # where a pool may be
    skips_unwanted: ClassVar[bool] = False  # the sender leaves out announced segments that the receiver no longer wants
    within_process: ClassVar[bool] = True  # both ends of a pair may be in one process, as with mixed workers
    confidential: ClassVar[bool] = False  # KV stays within the host, or can be encrypted

    @abstractmethod
    def unusable(self, local: LocalEnd, same_host: bool) -> str:
        """Why this process cannot use it with a peer that is, or is not, on this host; empty: it can."""

    def pair_bytes(self, segment_bytes: int) -> int:
        """About how much memory one end of a pair takes for itself."""
        return segment_bytes

    @abstractmethod
    def listen(self, local: LocalEnd) -> Listener: ...

    @abstractmethod
    def connect(self, local: LocalEnd, meeting: Rendezvous) -> Channel: ...
