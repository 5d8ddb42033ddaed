"""What can happen to a request, as its timeline tells it. Pure."""

import msgspec

from coordinator.event_log.reasons import (
    By,
    Reason,
)


class Submitted(msgspec.Struct, frozen=True, tag_field="what", tag="submitted"):
    at_s: float
    attempt: int
    priority_class: str
    tenant: str
    prompt_tokens: int
    max_tokens: int
    waiting: int
    """Requests for this model that waited already …"""
    waiting_of_tenant: int
    """… and those among them of the same tenant."""


class Passed(msgspec.Struct, frozen=True, tag_field="what", tag="passed_over"):
    """Turns at which it got nothing, for one reason and because of one tenant, between two changes of its state."""

    at_s: float
    until_s: float
    times: int
    reason: Reason
    """As it was at the last of these turns."""
    requests: tuple[str, ...]
    """Whose turns they were, the first few."""
    requests_in_all: int


class KeptFor(msgspec.Struct, frozen=True, tag_field="what", tag="room_kept_for_it"):
    at_s: float
    bypassed: int


class Placed(msgspec.Struct, frozen=True, tag_field="what", tag="placed"):
    at_s: float
    workers: str
    kv_blocks: int
    """Reserved on the decode worker."""
    cached_tokens: int
    """Of the prompt, believed to be on the prefill worker."""
    kept: bool
    """It was not its turn, but room had been kept for it."""


class ChunkSent(msgspec.Struct, frozen=True, tag_field="what", tag="chunk"):
    at_s: float
    worker: str
    step: int
    start: int
    tokens: int
    prompt_tokens: int
    beside: int
    """Chunks of other requests in the same step."""


class Changed(msgspec.Struct, frozen=True, tag_field="what", tag="state"):
    """A change of state that none of the others tells."""

    at_s: float
    state: str
    why: str
    transfer_ms: float = 0.0


class Ended(msgspec.Struct, frozen=True, tag_field="what", tag="ended"):
    at_s: float
    outcome: str
    why: str
    retry_after_s: float
    by: By | None
    """For whom it had to make room."""


Entry = Submitted | Passed | KeptFor | Placed | ChunkSent | Changed | Ended
