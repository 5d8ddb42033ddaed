"""The communicator of a `nccl` pair, and what the device's thread does with it.

`tests/gpu` runs it on one GPU, never yet on two. This code relies on the following of `ProcessGroupNCCL` in torch 2.9 to 2.13:
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

_c10d: Any = distributed  # torch's own stubs do not export the names used here; a build without NCCL does not have them

_cuda: Any = torch.cuda  # it has no types in part
ENTERED: Final = 2  # word of the line: the receiver's device sets the communicator up now
ABORT_S: Final = 2.0
WARM_UP_WORDS: Final = 1 << 17  # 1 MiB: a communicator's first message connects all of its channels, of whatever length
_CTAS_MAX: Final = 8  # that a transfer may take from running decodes
_LATE_S: Final = 0.5  # NCCL says an operation ended, but its stream stands still: it ended with an error


class Communicator(Protocol):
    """Two ranks. Begun by one thread at a time; aborted by the thread of its pair, which alone waits for that."""

    def begin(self, tensor: torch.Tensor, sending: bool) -> None:
        """Start to send or receive this, behind what is on `stream`. Raises `RuntimeError`."""

    def has_ended(self, now: float) -> bool:
        """True if the latest operation has ended. Raises `RuntimeError`."""

    def abort(self) -> None:
        """Ends what is under way; nothing works afterwards. Raises `RuntimeError`."""


class NcclCommunicator:
    """Made on the pair's thread, where the first `begin` sets it up, and blocks for that. Used by the device's thread from then
    on."""

    def __init__(self, store: Any, rank: int, device: torch.device) -> None:
        # NCCL's stream, then, is not one of those that torch gives to others, too.
        options = _c10d.ProcessGroupNCCL.Options(is_high_priority_stream=True)
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


class NcclMessage(Operation):
    def __init__(self, communicator: Communicator, tensor: torch.Tensor, sending: bool) -> None:
        self._communicator, self._tensor, self._sending = communicator, tensor, sending

    def launch(self) -> None:
        self._communicator.begin(self._tensor, self._sending)

    def is_done(self, now: float) -> bool:
        return self._communicator.has_ended(now)


class _WarmUp(Operation):
    """The first message, which has begun already."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator

    def launch(self) -> None:
        return

    def is_done(self, now: float) -> bool:
        return self._communicator.has_ended(now)


def warmed_up(store: Any, rank: int, device: torch.device, line: Line, timeout_s: float) -> Communicator:
    """Set up on this thread, and used once. The receiver says when it begins, so that the two wait for each other as short as
    they can. Raises `PairBroken` or `RuntimeError`; what is still under way then is aborted."""
    deadline = time.monotonic() + timeout_s
    if rank == RECEIVER_RANK:
        line.say(ENTERED, 0)
    with torch.cuda.device(device):
        communicator = NcclCommunicator(store, rank, device)
    wakeup = WakeupFd()
    try:
        communicator.begin(communicator.zeros(WARM_UP_WORDS), rank == SENDER_RANK)
        handle = device_thread(device_index(device)).submit(_WarmUp(communicator), timeout_s, wakeup.ring)
        while not handle.ended and (left_s := deadline - time.monotonic()) > 0:
            wakeup.wait(left_s)
        if not handle.ended or handle.error:
            handle.cancel()
            raise PairBroken(f"the communicator could not be set up: {handle.error or 'it did not end in time'}")
    except (RuntimeError, PairBroken):
        communicator.abort()
        raise
    finally:
        wakeup.close()
    return communicator
