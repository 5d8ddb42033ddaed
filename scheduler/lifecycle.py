"""The life of a request as one table.

    QUEUED → PLACED → PREFILLING → HANDING_OVER → DECODING → FINISHED

An attempt that is cut short goes to INTERRUPTED: the gateway, which holds the prompt and the tokens already sent, submits
the next attempt and the request is QUEUED again. Every accepted request reaches exactly one of the terminal states.
"""

from enum import StrEnum


class RequestState(StrEnum):
    QUEUED = "queued"
    PLACED = "placed"  # a prefill and a decode worker are chosen and their blocks reserved
    PREFILLING = "prefilling"
    HANDING_OVER = "handing_over"  # the prompt is computed; its last KV blocks are on their way
    DECODING = "decoding"
    INTERRUPTED = "interrupted"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    FAILED = "failed"
    REJECTED = "rejected"


class Trigger(StrEnum):
    PLACE = "place"
    DISPATCH = "dispatch"  # the first chunk is sent to the prefill worker
    PROMPT_DONE = "prompt_done"
    HANDED_OVER = "handed_over"
    FINISH = "finish"
    INTERRUPT = "interrupt"
    RESUBMIT = "resubmit"
    CANCEL = "cancel"
    EXPIRE = "expire"
    FAIL = "fail"
    SHED = "shed"  # it waits, and has to make room for others in an overload


TERMINAL = frozenset(
    {RequestState.FINISHED, RequestState.CANCELLED, RequestState.EXPIRED, RequestState.FAILED, RequestState.REJECTED}
)
ON_WORKERS = frozenset({RequestState.PLACED, RequestState.PREFILLING, RequestState.HANDING_OVER, RequestState.DECODING})

_LIVE = (RequestState.QUEUED, *sorted(ON_WORKERS), RequestState.INTERRUPTED)

TRANSITIONS: dict[tuple[RequestState, Trigger], RequestState] = {
    (RequestState.QUEUED, Trigger.PLACE): RequestState.PLACED,
    (RequestState.PLACED, Trigger.DISPATCH): RequestState.PREFILLING,
    (RequestState.PREFILLING, Trigger.PROMPT_DONE): RequestState.HANDING_OVER,
    (RequestState.HANDING_OVER, Trigger.HANDED_OVER): RequestState.DECODING,
    # The answer may end with its first token, which prefill draws. Or the decode worker's message may overtake the prefill
    # worker's, since each has its own link.
    (RequestState.PREFILLING, Trigger.FINISH): RequestState.FINISHED,
    (RequestState.HANDING_OVER, Trigger.FINISH): RequestState.FINISHED,
    (RequestState.DECODING, Trigger.FINISH): RequestState.FINISHED,
    (RequestState.PREFILLING, Trigger.HANDED_OVER): RequestState.DECODING,
    (RequestState.INTERRUPTED, Trigger.RESUBMIT): RequestState.QUEUED,
    # Its worker was lost before it could report the end, but its gateway already had the whole answer.
    (RequestState.INTERRUPTED, Trigger.FINISH): RequestState.FINISHED,
    (RequestState.QUEUED, Trigger.RESUBMIT): RequestState.QUEUED,
    (RequestState.QUEUED, Trigger.EXPIRE): RequestState.EXPIRED,
    (RequestState.QUEUED, Trigger.SHED): RequestState.REJECTED,
    # Its own deadline is past and its prompt not yet wholly dispatched.
    (RequestState.PLACED, Trigger.EXPIRE): RequestState.EXPIRED,
    (RequestState.PREFILLING, Trigger.EXPIRE): RequestState.EXPIRED,
    (RequestState.INTERRUPTED, Trigger.EXPIRE): RequestState.FAILED,
    **{(state, Trigger.INTERRUPT): RequestState.INTERRUPTED for state in sorted(ON_WORKERS)},
    **{(state, Trigger.CANCEL): RequestState.CANCELLED for state in _LIVE},
    **{(state, Trigger.FAIL): RequestState.FAILED for state in _LIVE},
}


class IllegalTransition(AssertionError):
    """A bug of ours: the core fired a trigger that the table does not have for this state."""


def advance(state: RequestState, trigger: Trigger) -> RequestState:
    """The next state. Raises `IllegalTransition` where the table has none."""
    following = TRANSITIONS.get((state, trigger))
    if following is None:
        raise IllegalTransition(f"{trigger} in state {state}")
    return following
