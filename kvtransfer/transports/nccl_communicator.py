"""The communicator of a `nccl` pair, and what the device's thread does with it.

Not run on a GPU yet (2026-11-21); written after the source of `ProcessGroupNCCL` in torch 2.9 to 2.13. What matters there:
- `config.blocking = 0` makes a communicator that can be aborted at any time. Calls that set one up then poll, for as many
  seconds as TORCH_NCCL_NONBLOCKING_TIMEOUT says, half an hour if nothing does.
- `send` and `recv` take the rank of the peer and a tag that is not used; the first one sets the communicator up.
- `wait()` of what they return orders the current stream behind the message, and returns at once.
- `abort` waits for its own end, for as long as the group's timeout; what was under way on the GPU has ended then.
- A thread of the group watches its operations; with TORCH_NCCL_ASYNC_ERROR_HANDLING=0 it ends nothing of its own accord.
"""

import time
from datetime import timedelta
from typing import Any, Final, Protocol

import torch
from torch import distributed

from kvtransfer.memory.cuda import device_index
from kvtransfer.memory.device_thread import Operation, WakeupFd, device_thread
from kvtransfer.transports.rendezvous import RECEIVER_RANK, SENDER_RANK
from kvtransfer.transports.side_channel import Line
from kvtransfer.transports.transport import PairBroken

_c10d: Any = distributed
"""torch's own stubs do not export the names used here; a build without NCCL does not have them."""

_cuda: Any = torch.cuda
"""It has no types in part."""
ENTERED: Final = 2
"""Word of the line: the receiver's device sets the communicator up now."""
ABORT_S: Final = 2.0
WARM_UP_WORDS: Final = 1 << 17
"""1 MiB: the first message of a communicator connects all of its channels, however long it is."""
_CTAS_MAX: Final = 8
"""Multiprocessors that a transfer may take from running decodes."""
_LATE_S: Final = 0.5
"""NCCL calls an operation ended, and the stream behind it does not move for so long: it ended with an error."""


class Communicator(Protocol):
    """Two ranks. Used by the device's thread alone."""

    def begin(self, tensor: torch.Tensor, sending: bool) -> None:
        """Start to send or receive this, behind what is on `stream`. Raises `RuntimeError`."""

    def has_ended(self, now: float) -> bool:
        """What was begun last. Raises `RuntimeError`."""

    def abort(self) -> None:
        """Ends what is under way; nothing works afterwards. Raises `RuntimeError`."""


class NcclCommunicator:
    """Made on the device's thread, where the first `begin` sets it up, and blocks for that."""

    def __init__(self, store: Any, rank: int, device: torch.device) -> None:
        options = _c10d.ProcessGroupNCCL.Options()
        options.config.blocking = 0
        options.config.max_ctas = _CTAS_MAX
        options._timeout = timedelta(seconds=ABORT_S)
        self._device = device
        self._peer = 1 - rank
        self._group = _c10d.ProcessGroupNCCL(store, rank, 2, options)
        self._stream = _cuda.Stream(device)
        self._event: Any = _cuda.Event()
        self._work: Any = None
        self._late_at: float | None = None

    def zeros(self, words: int) -> torch.Tensor:
        """Memory of this communicator's stream."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            return torch.zeros(words, dtype=torch.int64, device=self._device)

    def begin(self, tensor: torch.Tensor, sending: bool) -> None:
        # The stream is one of our own: waiting for the message must not hold up what other pairs enqueue.
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            start = self._group.send if sending else self._group.recv
            self._work = start([tensor], self._peer, 0)
            self._work.wait()  # orders the stream behind the message; does not block
            self._event.record(self._stream)
        self._late_at = None

    def has_ended(self, now: float) -> bool:
        if self._event.query():
            return True
        if self._work.is_completed():
            if self._late_at is None:
                self._late_at = now + _LATE_S
            elif now >= self._late_at:
                raise RuntimeError("NCCL reports an error of the communicator")
        return False

    def abort(self) -> None:
        self._work = None
        self._group.abort()


class Message(Operation):
    def __init__(self, communicator: Communicator, tensor: torch.Tensor, sending: bool) -> None:
        self._communicator, self._tensor, self._sending = communicator, tensor, sending

    def launch(self) -> None:
        self._communicator.begin(self._tensor, self._sending)

    def is_done(self, now: float) -> bool:
        return self._communicator.has_ended(now)

    def abort(self) -> None:
        self._communicator.abort()


class _WarmUp(Operation):
    """Set up the communicator and send one message by it."""

    def __init__(self, store: Any, rank: int, device: torch.device, line: Line) -> None:
        self.communicator: NcclCommunicator | None = None
        self._store, self._rank, self._device, self._line = store, rank, device, line

    def launch(self) -> None:
        if self._rank == RECEIVER_RANK:
            self._line.say(ENTERED, 0)
        with torch.cuda.device(self._device):
            self.communicator = NcclCommunicator(self._store, self._rank, self._device)
        self.communicator.begin(self.communicator.zeros(WARM_UP_WORDS), self._rank == SENDER_RANK)

    def is_done(self, now: float) -> bool:
        assert self.communicator is not None
        return self.communicator.has_ended(now)

    def abort(self) -> None:
        if self.communicator is not None:
            self.communicator.abort()


class End(Operation):
    """Let go of a communicator. One that is idle goes at once, whatever became of the other end."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator

    def launch(self) -> None:
        self._communicator.abort()

    def is_done(self, now: float) -> bool:
        return True

    def abort(self) -> None:
        return


def warmed_up(store: Any, rank: int, device: torch.device, line: Line, timeout_s: float) -> Communicator:
    """Set up on the device's thread, and used once. Raises `PairBroken`; what is still under way then is aborted."""
    operation, wakeup = _WarmUp(store, rank, device, line), WakeupFd()
    handle = device_thread(device_index(device)).submit(operation, timeout_s, wakeup.ring)
    deadline = time.monotonic() + timeout_s
    while not handle.ended and time.monotonic() < deadline:
        wakeup.wait(deadline - time.monotonic())
    wakeup.close()
    if not handle.ended or handle.error or operation.communicator is None:
        handle.cancel()
        raise PairBroken(f"the communicator could not be set up: {handle.error or 'it did not end in time'}")
    return operation.communicator
