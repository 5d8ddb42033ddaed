"""The transport `nccl`: messages between two GPUs, of one host or of two.

`tests/gpu` runs it on one GPU; it has not run on two yet. Tests without a GPU cover the messages of the two ends, the device's
thread, and both ends together over a communicator simulated in host memory.

A pair has a communicator of two of its own (torch's `ProcessGroupNCCL`, without a default group), set up and used once on
the pair's thread before the pair is called ready, and a TCP connection beside it, the line (`side_channel`). All messages of a
process on one device are started by one thread (`device_thread`). A segment crosses like this:

    announcement  (control link)   sender → receiver     as with every transport
    OFFERED       (line)           sender → receiver     it is packed: what is offered is sent
    POSTED        (line)           receiver → sender     the receive has begun; or UNWANTED: its session is over, skip it
    LAUNCHED      (line)           sender → receiver     the send has begun: from now on the message must cross in time
    the message   (NCCL)

So a send begins only after its receive has begun, and a receive begins only when its send is ready. Neither waits on the GPU
for longer than an exchange of messages, and a stopped or slow peer delays only its own pair. Received KV lands in a buffer of
the channel; when all of it is there, it is digested (`device_copy`) and copied to its blocks.

An operation that hangs is found out by the end of the line, at once, or by a deadline; then the communicator is aborted, which
NCCL can do to one that is set up as non-blocking. Its errors must not end this process: the variables are in
`runtime.settings.gpu_environment`.
"""

import contextlib
import os
import select
import time
from collections import deque
from typing import Any, Final

import torch
from torch import distributed

from kvtransfer.memory.cuda import device_index
from kvtransfer.memory.device_copy import DIGEST_EVERY_MAX, UNSAMPLED, checksum, sub_block_sums
from kvtransfer.memory.device_thread import DeviceThread, TransferHandle, WakeupFd, device_thread
from kvtransfer.transports import rendezvous
from kvtransfer.transports.nccl_communicator import ENTERED, Communicator, NcclMessage, warmed_up
from kvtransfer.transports.side_channel import Line
from kvtransfer.transports.tcp.listener import TcpListener
from kvtransfer.transports.tcp.transport import connect_tcp
from kvtransfer.transports.transport import (
    UNWANTED,
    Answer,
    Channel,
    Inbox,
    Listener,
    LocalEnd,
    PairBroken,
    Rendezvous,
    SegmentJob,
    Transport,
)

DIGEST_EVERY: Final = 1
OFFERED: Final = 3
POSTED: Final = 4
SKIP: Final = 5
LAUNCHED: Final = 6

COMMUNICATOR_BYTES: Final = 96 << 20  # NCCL's, estimated, for two ranks with the channels that it may use
_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


class _NcclChannel(Channel):
    """The part that the two ends share: one segment at a time, at most one operation."""

    def __init__(
        self, local: LocalEnd, line: Line, communicator: Communicator, thread: DeviceThread, digest_every: int
    ) -> None:
        self._rows = local.rows
        self._line = line
        self._communicator = communicator
        self._thread = thread
        self._every = digest_every
        self._peer_timeout_s = local.settings.rendezvous_timeout_ms / 1e3
        """How long the peer may say nothing. Longer than one segment takes: its device may be setting up other pairs. If it
        dies, the line ends."""
        self._segment_timeout_s = local.settings.segment_timeout_ms / 1e3
        self._buffer = local.rows.device_buffer(local.segment_blocks)
        self._wakeup = WakeupFd()
        self._jobs: deque[SegmentJob] = deque()
        self._handle: TransferHandle | None = None  # of the first job, once its operation was asked for

    def work(self, inbox: Inbox, answer: Answer) -> None:
        poll = select.poll()
        for source in (inbox, self._line, self._wakeup):
            poll.register(source, select.POLLIN)
        moved_at = 0.0
        while not inbox.closed:
            left_s = moved_at + self._peer_timeout_s - time.monotonic()
            if not poll.poll(max(0.0, left_s) * 1e3 if self._jobs else None):
                raise PairBroken(f"the peer said nothing in {self._peer_timeout_s:g} s")
            if not self._jobs:
                moved_at = time.monotonic()
            self._jobs += inbox.take()
            self._wakeup.clear()
            while not inbox.closed and self._move(answer):
                moved_at = time.monotonic()

    def _move(self, answer: Answer) -> bool:
        """Makes one step if one can be made now."""
        raise NotImplementedError

    def _ask(self, tensor: torch.Tensor, sending: bool) -> TransferHandle:
        """The time of a receive runs from LAUNCHED on."""
        message = NcclMessage(self._communicator, tensor, sending)
        return self._thread.submit(message, self._segment_timeout_s, self._wakeup.ring, counts=sending)

    def _has_crossed(self) -> bool:
        if self._handle is None or not self._handle.ended:
            return False
        error, self._handle = self._handle.error, None
        if error:
            raise PairBroken(f"the message was lost: {error}")
        return True

    def _digest(self, packed: torch.Tensor, sequence: int) -> bytes:
        with self._rows.on_stream():
            return UNSAMPLED if sequence % self._every else checksum([sub_block_sums(packed)])

    def settle(self, inbox: Inbox, answer: Answer) -> None:
        # The peer touches no blocks: messages land in this channel's buffer.
        if self._handle is not None:
            self._handle.cancel()
        deadline = time.monotonic() + self._peer_timeout_s
        while self._handle is not None and not self._handle.ended and time.monotonic() < deadline:
            self._wakeup.wait(deadline - time.monotonic())
        with contextlib.suppress(RuntimeError):  # it is of no use any more, whatever it says
            self._communicator.abort()
        self._wakeup.close()
        self._line.close()


class Sends(_NcclChannel):
    _offered = b""  # digest of the first job, once packed and offered
    _packed: torch.Tensor
    _told = False  # LAUNCHED was said

    def _move(self, answer: Answer) -> bool:
        if not self._jobs:
            if (word := self._line.hear()) is not None:
                raise PairBroken(f"the receiver broke the protocol: word {word[0]} about nothing")
            return False
        job = self._jobs[0]
        if not self._offered:
            assert job.block_ids is not None
            with self._rows.on_stream():
                self._packed = self._rows.rows_or_gather(job.block_ids, self._buffer)
            self._offered = self._digest(self._packed, job.sequence)
            self._rows.wait()
            self._line.say(OFFERED, job.sequence)
            return True
        if self._handle is not None and self._handle.launched and not self._told:
            self._told = True
            self._line.say(LAUNCHED, job.sequence)
            return True
        if self._has_crossed():
            self._answer(answer, self._offered)
            return True
        word = self._line.hear()
        if word is None:
            return False
        if self._handle is not None or word not in ((POSTED, job.sequence), (SKIP, job.sequence)):
            raise PairBroken(f"the receiver broke the protocol: word {word[0]} about segment {word[1]}")
        if word[0] == SKIP:
            self._answer(answer, UNWANTED)
        else:
            self._handle = self._ask(self._packed, sending=True)
        return True

    def _answer(self, answer: Answer, segment_digest: bytes) -> None:
        self._offered, self._told = b"", False
        answer(self._jobs.popleft(), segment_digest)


class NcclReceives(_NcclChannel):
    def __init__(
        self, local: LocalEnd, line: Line, communicator: Communicator, thread: DeviceThread, digest_every: int
    ) -> None:
        super().__init__(local, line, communicator, thread, digest_every)
        self._offers: deque[int] = deque()  # not answered; the announcement takes another way, and may come later
        self._posted = False

    def _move(self, answer: Answer) -> bool:
        if (word := self._line.hear()) is not None:
            self._heed(*word)
            return True
        if not self._jobs or not self._offers:
            return False
        job = self._jobs[0]
        if job.sequence != self._offers[0]:
            raise PairBroken(f"the sender offered segment {self._offers[0]} in place of {job.sequence}")
        if self._handle is None:
            return self._take(job, answer)
        if self._handle.launched and not self._posted:
            self._posted = True
            self._line.say(POSTED, job.sequence)
            return True
        # The message may arrive before LAUNCHED; still wait for LAUNCHED before ending the segment.
        if not (self._handle.counts or self._handle.error) or not self._has_crossed():
            return False
        self._posted = False
        self._answer(answer, self._keep(job))
        return True

    def _heed(self, kind: int, sequence: int) -> None:
        # The sender may know before we do that a message has crossed, and offer the next one.
        if kind == OFFERED and len(self._offers) <= 1:
            self._offers.append(sequence)
        elif kind == LAUNCHED and self._posted and self._handle is not None and sequence == self._offers[0]:
            self._handle.counts = True
        else:
            raise PairBroken(f"the sender broke the protocol: word {kind} about segment {sequence}")

    def _take(self, job: SegmentJob, answer: Answer) -> bool:
        if job.block_ids is None:
            self._line.say(SKIP, job.sequence)
            self._answer(answer, b"")
        else:
            self._handle = self._ask(self._buffer[: job.blocks], sending=False)
        return True

    def _keep(self, job: SegmentJob) -> bytes:
        """The digest of what lies in the buffer, when it is in its blocks; empty if nobody wants it any more."""
        block_ids, packed = job.block_ids, self._buffer[: job.blocks]
        if block_ids is None:
            return b""
        with self._rows.on_stream():
            self._rows.scatter(block_ids, packed)
        segment_digest = self._digest(packed, job.sequence)
        self._rows.wait()
        return segment_digest

    def _answer(self, answer: Answer, segment_digest: bytes) -> None:
        self._offers.popleft()
        answer(self._jobs.popleft(), segment_digest)


class _Listener(Listener):
    def __init__(self, local: LocalEnd, listener: TcpListener) -> None:
        self._local, self._listener = local, listener
        self._store = rendezvous.StoreListener(local.listen_host, local.settings.rendezvous_timeout_ms / 1e3)
        # Token and key go over the control link: a store lists all it holds to every process that connects.
        self._expected, self._line_port = listener.expect()
        self.meeting = Rendezvous(
            Nccl.name,
            local.listen_host,
            self._store.port,
            self._store.secret,
            token=self._expected.token,
            key=self._expected.key,
        )

    def meet(self) -> Channel:
        try:
            return self._store.meet(self._make)
        finally:
            self._listener.forget(self._expected)

    def _make(self, store: Any, rank: int, host: str, timeout_s: float) -> Channel:
        local = self._local
        store.set("line", str(self._line_port))
        line = Line(self._listener.accept(self._expected, timeout_s)[0])
        try:
            line.say(DIGEST_EVERY, local.settings.digest_every)
            device = local.rows.device
            communicator = warmed_up(store, rank, device, line, timeout_s)
        except (OSError, RuntimeError, PairBroken):
            line.close()
            raise
        return NcclReceives(local, line, communicator, device_thread(device_index(device)), local.settings.digest_every)

    def abandon(self) -> None:
        self._store.abandon()
        self._expected.abandon()


class Nccl(Transport):
    name = "nccl"
    devices = ("cuda",)
    within_process = False  # NCCL refuses two ranks on one GPU

    def unusable(self, local: LocalEnd, same_host: bool) -> str:
        return cannot_run(distributed.is_nccl_available(), os.environ.get(_HANDLING, ""))

    def pair_bytes(self, segment_bytes: int) -> int:
        return COMMUNICATOR_BYTES + segment_bytes

    def listen(self, local: LocalEnd) -> Listener:
        if not isinstance(local.listener, TcpListener):
            raise PairBroken("this process has no address to receive KV on")
        return _Listener(local, local.listener)

    def connect(self, local: LocalEnd, meeting: Rendezvous) -> Channel:
        if why := self.unusable(local, same_host=False):
            raise PairBroken(why)

        def make(store: Any, rank: int, host: str, timeout_s: float) -> Channel:
            port = store.get("line").decode()
            if not port.isdecimal() or not 0 < int(port) < 65536:
                raise PairBroken("the receiver told no port")
            line = Line(connect_tcp(meeting, int(port), timeout_s)[0])
            try:
                every = line.await_word(DIGEST_EVERY, timeout_s)
                if not 1 <= every <= DIGEST_EVERY_MAX:
                    raise PairBroken(f"the receiver wants one segment in {every} digested")
                line.await_word(ENTERED, timeout_s)
                device = local.rows.device
                communicator = warmed_up(store, rank, device, line, timeout_s)
            except (OSError, RuntimeError, PairBroken):
                line.close()
                raise
            return Sends(local, line, communicator, device_thread(device_index(device)), every)

        timeout_s = local.settings.rendezvous_timeout_ms / 1e3
        return rendezvous.connect(make, meeting.host, meeting.port, meeting.secret, timeout_s)


def cannot_run(available: bool, error_handling: str) -> str:
    """Why this process must not use NCCL; empty if it may."""
    if not available:
        return "torch is a build without NCCL"
    if error_handling != "0":
        return f"{_HANDLING} is not 0, so a pair that breaks would end this process"
    return ""
