"""Errors that cross a process boundary, and the names of the ways a request can end.

There are three kinds, which are never mixed. A failed assertion is our bug. An exception defined here is the fault of a peer
or a resource. A `Reject` or an `Outcome` is an answer for a user.
"""

from enum import StrEnum
from typing import Final


class CrossdockError(Exception):
    """Base of the typed errors for peers and resources."""


class BadOption(CrossdockError):
    """A setting cannot work with this model or on this machine; `str()` says why in one sentence."""

    option: str  # the option at fault, as on the command line


class RemoteProtocolError(CrossdockError):
    """A peer sent bytes that are not a message of this protocol, or a message that is not allowed here and now."""


class CheckFailed(CrossdockError):
    """Our own code failed while it looked at what a peer sent, before anything had changed: that peer's link ends, and the
    process goes on. The cause is the exception."""


class PeerRefused(CrossdockError):
    """A peer answered the handshake or an offer with a refusal; `str()` says which field differs."""


class _Growing(StrEnum):
    """An enumeration to which a newer version may add values. They are read as the one in `UNKNOWN_AS`."""

    @classmethod
    def _missing_(cls, value: object) -> "_Growing | None":
        return UNKNOWN_AS[cls] if isinstance(value, str) else None


class Reject(_Growing):
    """Why a request was not accepted. Nothing was reserved or charged."""

    UNKNOWN_MODEL = "unknown_model"
    TOO_LONG = "too_long"  # prompt + max_tokens is over the context length
    TOO_LARGE = "too_large"  # the KV cache would not fit the largest worker, even alone
    DUPLICATE = "duplicate"
    QUEUE_FULL = "queue_full"
    NO_CAPACITY = "no_capacity"  # no prefill or no decode worker of this model is up
    EXPIRED = "expired"  # waited in the queue longer than the server allows
    QUOTA = "quota"  # a limit of the tenant, its organisation or its key; the message names it
    UNKNOWN_TENANT = "unknown_tenant"  # the gateway knows its tenant, and the coordinator does not
    DEADLINE = "deadline"  # its deadline cannot be met
    SHED = "shed"  # it waited, and had to make room for others in an overload
    PRIORITY_CLASS = "priority_class"  # the tenant may not use the priority class asked for
    RETRY_BUDGET = "retry_budget"  # too many interrupted requests come back at once; one a little later may be accepted
    STORAGE = "storage"  # the usage ledger cannot be written at the moment
    SHUTTING_DOWN = "shutting_down"
    LOSES_WORKERS = "loses_workers"  # several workers were lost in turn while they ran it: it would end more


class WaitReason(_Growing):
    """The reason why a request waited or was rejected, in the words of `x-crossdock-wait`."""

    OWN_QUEUE = "own_queue"  # other requests of its own tenant
    OTHER_TENANTS = "other_tenants"
    NO_ROOM = "no_room"  # no worker had room for its KV or its sequences
    QUOTA = "quota"
    COLD_START = "cold_start"  # no worker, or no coordinator, was up


class Interrupt(_Growing):
    """Why an accepted attempt stopped before its end. The gateway resumes it with attempt + 1 or fails the stream."""

    PREFILL_LOST = "prefill_lost"
    DECODE_LOST = "decode_lost"
    TRANSFER_FAILED = "transfer_failed"
    GATEWAY_LINK_LOST = "gateway_link_lost"
    ENGINE_ERROR = "engine_error"
    GRAMMAR = "grammar"  # The answer cannot go on in its grammar, in any attempt: the gateway fails the stream.
    PREEMPTED = "preempted"  # made room in decode, for a tenant with less than its share or because blocks ran short
    DRAINED = "drained"  # The worker is about to end, on purpose. The request goes on at once, and loses no attempt.


def no_token_drawn(grammar: str) -> tuple[Interrupt, str]:
    """Why an attempt with this grammar (empty: none) fails where no token can be drawn from its logits."""
    if grammar:
        return Interrupt.GRAMMAR, "no token continues the answer in its grammar"
    return Interrupt.ENGINE_ERROR, "the model's logits are not finite"


class FinishReason(_Growing):
    """Why a choice ended, as the worker sees it; stop strings are found in the gateway."""

    STOP = "stop"
    LENGTH = "length"


class CancelReason(_Growing):
    """Why a request is cancelled."""

    DISCONNECTED = "disconnected"
    STOP_STRING = "stop_string"  # every choice has met a stop string: a success for the user, a cancel for the workers
    GATEWAY_LOST = "gateway_lost"
    DEADLINE = "deadline"
    ABANDONED = "abandoned"  # the gateway gave the attempt up, for instance because its stream failed
    ANSWERED = "answered"  # the gateway has the whole answer; for coordinators that missed the worker's report


UNKNOWN_AS: Final[dict[type[_Growing], _Growing]] = {
    Reject: Reject.NO_CAPACITY,
    WaitReason: WaitReason.OTHER_TENANTS,
    Interrupt: Interrupt.ENGINE_ERROR,
    FinishReason: FinishReason.STOP,
    CancelReason: CancelReason.ABANDONED,
}
"""Maps each enumeration to the value that replaces an unknown one: the value with the fewest consequences. An unknown value of
any other enumeration, like `Role`, is refused."""
