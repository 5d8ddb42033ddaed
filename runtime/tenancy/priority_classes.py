"""Priority classes: their weight in the fair queue, and the targets that their requests are admitted and placed by. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final


@dataclass(frozen=True)
class PriorityClass:
    """A priority class: a weight, and a share of service that it never falls below. No class has strict priority over
    another."""

    weight: float = 1.0
    floor_share: float = 0.0  # of all service, while every priority class has work; more when some have none
    ttft_s: float = 2.0  # from arrival to a request's due time, if it has no deadline
    ttft_s_per_chunk: float = 2.0  # added for each chunk: an old long prompt is not due before every new short one
    queue_wait_s: float | None = None  # unplaced for so long, a request is rejected; None: --queue-wait-s-max applies
    ttft_ms: float | None = None
    """Target for the first token. A request without a deadline of its own is rejected on arrival if it is expected to miss
    this. A prompt that takes longer than half of it by itself may take twice its own time."""
    ttft_grace_s: float = 0.0  # an overload refuses none for `ttft_ms` before it has lasted so long
    tpot_ms: float | None = None  # Mean per later token. It bounds the batch of a decode worker with such a request.
    percentile: float = 0.9  # of finished requests that should keep both targets; for status and metrics

    @property
    def has_targets(self) -> bool:
        return self.ttft_ms is not None or self.tpot_ms is not None


DEFAULT_PRIORITY_CLASSES: Final[Mapping[str, PriorityClass]] = MappingProxyType(
    {
        "interactive": PriorityClass(8.0, 0.0, 0.5, 1.0, ttft_ms=4000.0, ttft_grace_s=10.0),
        "standard": PriorityClass(4.0, 0.0, 2.0, 2.0, ttft_ms=4000.0, ttft_grace_s=10.0),
        "batch": PriorityClass(1.0, 0.05, 60.0, 10.0),
    }
)
DEFAULT_PRIORITY_CLASS: Final = "standard"
