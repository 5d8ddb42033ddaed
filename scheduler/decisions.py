"""The decisions of the scheduler. Its owner carries each decision out, in the order in which they were made. Pure."""

import msgspec

from proto.errors import Interrupt
from proto.messages import Step
from proto.parts import Returns
from scheduler.request import Request
from scheduler.workers.worker import DecodeWorker, Worker


class Placement(msgspec.Struct, frozen=True, gc=False):
    """A request has room on two workers, which are to learn of it."""

    request: Request
    prefill: Worker
    decode: DecodeWorker
    kv_blocks: int  # its blocks on the decode worker at its full length
    returns: Returns  # how soon its tenant's sessions come back


class Dispatched(msgspec.Struct, frozen=True, gc=False):
    """A prefill worker is to compute a step."""

    worker: Worker
    step: Step
    requests: tuple[Request, ...]  # the request of each chunk
    begun: tuple[Request, ...]  # those that have their first chunk in it


class Withdrawn(msgspec.Struct, frozen=True, gc=False):
    """An attempt is over before its workers know it: they are to let go of it."""

    key: tuple[str, int]


class Interruption(msgspec.Struct, frozen=True, gc=False):
    """An attempt is interrupted: its gateway is to submit the request again, at once if `tell`."""

    request: Request
    attempt: int
    reason: Interrupt
    why: str
    tell: bool


Decision = Placement | Dispatched | Withdrawn | Interruption
