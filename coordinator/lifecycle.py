"""The life of a request as one table.

    QUEUED → PLACED → PREFILLING → HANDING_OVER → DECODING → FINISHED

An attempt that is cut short goes to INTERRUPTED: the gateway, which holds the prompt and the tokens already sent, submits
the next attempt and the request is QUEUED again. Every accepted request reaches exactly one of the terminal states.
"""

from enum import StrEnum


class State(StrEnum):
    QUEUED = "queued"
    PLACED = "placed"
    """A prefill and a decode worker are chosen and their blocks reserved."""
    PREFILLING = "prefilling"
    HANDING_OVER = "handing_over"
    """The prompt is computed; its last KV blocks are on their way."""
    DECODING = "decoding"
    INTERRUPTED = "interrupted"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    FAILED = "failed"
    REJECTED = "rejected"


class Trigger(StrEnum):
    PLACE = "place"
    DISPATCH = "dispatch"
    """The first chunk is sent to the prefill worker."""
    PROMPT_DONE = "prompt_done"
    HANDED_OVER = "handed_over"
    FINISH = "finish"
    INTERRUPT = "interrupt"
    RESUBMIT = "resubmit"
    CANCEL = "cancel"
    EXPIRE = "expire"
    FAIL = "fail"
    SHED = "shed"
    """It waits, and has to make room for others in an overload."""


TERMINAL = frozenset({State.FINISHED, State.CANCELLED, State.EXPIRED, State.FAILED, State.REJECTED})
ON_WORKERS = frozenset({State.PLACED, State.PREFILLING, State.HANDING_OVER, State.DECODING})

_LIVE = (State.QUEUED, *sorted(ON_WORKERS), State.INTERRUPTED)

TRANSITIONS: dict[tuple[State, Trigger], State] = {
    (State.QUEUED, Trigger.PLACE): State.PLACED,
    (State.PLACED, Trigger.DISPATCH): State.PREFILLING,
    (State.PREFILLING, Trigger.PROMPT_DONE): State.HANDING_OVER,
    (State.HANDING_OVER, Trigger.HANDED_OVER): State.DECODING,
    # The answer may end with its first token, which prefill draws, or the decode worker's word may overtake the prefill
    # worker's, each on a link of its own.
    (State.PREFILLING, Trigger.FINISH): State.FINISHED,
    (State.HANDING_OVER, Trigger.FINISH): State.FINISHED,
    (State.DECODING, Trigger.FINISH): State.FINISHED,
    (State.PREFILLING, Trigger.HANDED_OVER): State.DECODING,
    (State.INTERRUPTED, Trigger.RESUBMIT): State.QUEUED,
    # Its worker was lost with its last word, but not before its gateway had all of the answer.
    (State.INTERRUPTED, Trigger.FINISH): State.FINISHED,
    (State.QUEUED, Trigger.RESUBMIT): State.QUEUED,
    (State.QUEUED, Trigger.EXPIRE): State.EXPIRED,
    (State.QUEUED, Trigger.SHED): State.REJECTED,
    # Its own deadline is past and its prompt not yet wholly dispatched.
    (State.PLACED, Trigger.EXPIRE): State.EXPIRED,
    (State.PREFILLING, Trigger.EXPIRE): State.EXPIRED,
    (State.INTERRUPTED, Trigger.EXPIRE): State.FAILED,
    **{(state, Trigger.INTERRUPT): State.INTERRUPTED for state in sorted(ON_WORKERS)},
    **{(state, Trigger.CANCEL): State.CANCELLED for state in _LIVE},
    **{(state, Trigger.FAIL): State.FAILED for state in _LIVE},
}


class IllegalTransition(AssertionError):
    """A bug of ours: the core fired a trigger that the table does not have for this state."""


def advance(state: State, trigger: Trigger) -> State:
    """The next state. Raises `IllegalTransition` where the table has none."""
    following = TRANSITIONS.get((state, trigger))
    if following is None:
        raise IllegalTransition(f"{trigger} in state {state}")
    return following
