"""The trace that a request belongs to (W3C Trace Context), and whether it is sampled. Pure."""

import re
from collections.abc import Sequence
from typing import Final, NamedTuple

_TRACEPARENT: Final = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})", re.ASCII)
_RANDOM_BITS: Final = 56  # of a trace id, at its end, that decide


class TraceContext(NamedTuple):
    trace_id: int
    parent_id: int = 0  # the client's span; 0: there is none
    sampled: bool | None = None  # as the client says; None: it says nothing

    def is_sampled(self, share: float) -> bool:
        """Whether it is sampled before anything is known of the request. All gateways decide alike on one trace."""
        if self.sampled is not None:
            return self.sampled
        return self.trace_id % (1 << _RANDOM_BITS) < share * (1 << _RANDOM_BITS)


def read_traceparent(values: Sequence[str]) -> TraceContext | None:
    """The client's trace, from all its `traceparent` headers; None unless there is one that is valid."""
    found = _TRACEPARENT.fullmatch(values[0]) if len(values) == 1 else None
    if found is None:
        return None
    trace_id, parent_id, flags = (int(part, 16) for part in found.groups())
    return TraceContext(trace_id, parent_id, bool(flags & 1)) if trace_id and parent_id else None
