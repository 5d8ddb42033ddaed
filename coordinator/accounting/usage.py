"""The messages to the usage ledger, and its answers after a restart. Pure."""

from dataclasses import dataclass

import msgspec

from coordinator.accounting.quota import Ask


class Opened(msgspec.Struct, frozen=True, gc=False):
    """A request is accepted: charged at its estimate until it ends."""

    request_id: str
    day: int  # the day on which it counts, in days since 1970, UTC
    tenant: str
    model: str
    priority_class: str
    borrowed: bool
    ask: Ask
    again: bool = False  # Its row may have been closed before. It is charged at least what it was charged then.
    from_token: int = 0
    """The first answer token that is charged here. Those before it are charged to another request, of which this one
    continues a choice."""


class Closed(msgspec.Struct, frozen=True, gc=False):
    """A request has ended, with what was really computed and emitted. Times are over all attempts."""

    request_id: str
    outcome: str
    charged_tokens: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    queue_ms: float
    prefill_ms: float
    transfer_ms: float
    decode_ms: float
    from_token: int = 0  # `output_tokens` are counted from here


Entry = Opened | Closed


@dataclass(frozen=True)
class Past:
    """The state that the ledger held when the coordinator started."""

    open: tuple[Opened, ...] = ()  # requests that an earlier coordinator accepted, without a written end
    charged: tuple[tuple[str, int, int], ...] = ()
    """(tenant, day, tokens) of the day of the start, the open ones included."""
    recent: tuple[tuple[str, float, int], ...] = ()
    """(tenant, seconds ago, tokens) of each request accepted in the last minute within its rates, oldest first."""


class Settled(msgspec.Struct, frozen=True, gc=False):
    """The part of a closed bill that is kept, so that a later bill can continue from it."""

    attempt: int
    computed_tokens: int
    prompt_tokens: int
    prompt_tokens_max: int
    prompt_done: bool
    output_tokens: int
    from_token: int
    charged_tokens: int  # tokens that bills before it charged
    used_tokens: int
