"""One request as the simulator sees it."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from runtime.tenancy.priority_classes import DEFAULT_PRIORITY_CLASS, DEFAULT_PRIORITY_CLASSES, PriorityClass
from scheduler.waiting.queue_keys import Demand, class_key

NOT_YET = -1.0


class Sent(NamedTuple):
    """A request of a trace."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()  # ids of its prompt's blocks; equal ids are equal tokens
    tenant: str = "default"
    priority: str = DEFAULT_PRIORITY_CLASS
    leaves_after: int = 0  # its client leaves; 0: it stays to the end
    session: int = 0  # that it is a turn of; 0: none
    reused_tokens: int = 0  # of the prompt and answer of the session's turn before
    follows: int = -1  # index of the request after whose end it comes, instead of at `at_s`; -1: none
    think_s: float = 0.0  # from that end until this request comes

    @property
    def forwarded_tokens(self) -> int:
        return min(self.leaves_after, self.output_tokens) if self.leaves_after else self.output_tokens


def clients_of(sent: Sequence[Sent]) -> list[int]:
    """Returns the number of each request's client."""
    found: list[int] = []
    for number, one in enumerate(sent):
        found.append(number if one.follows < 0 else found[one.follows])
    return found


class SimulatedRequest:
    """Times in seconds; `NOT_YET` where nothing happened."""

    __slots__ = (
        "_patience_s",
        "at_s",
        "attempt",
        "blocks",
        "cached",
        "chunks",
        "decode",
        "demand",
        "dispatched",
        "due",
        "end_s",
        "entry",
        "first_s",
        "join_s",
        "key",
        "last_s",
        "moves",
        "no_room",
        "number",
        "output",
        "output_charged",
        "output_max",
        "path",
        "placed_s",
        "prefill",
        "prompt",
        "sent",
        "submitted_s",
    )

    def __init__(
        self,
        number: int,
        sent: Sent,
        step_tokens: int,
        priority_classes: Mapping[str, PriorityClass] = DEFAULT_PRIORITY_CLASSES,
    ) -> None:
        self.number, self.sent, self.at_s, self.attempt = number, sent, sent.at_s, 1
        self.submitted_s = sent.at_s
        self.prompt, self.output, self.blocks = sent.prompt_tokens, sent.forwarded_tokens, sent.blocks
        self.output_max = sent.output_tokens  # known to the coordinator; the client may leave earlier
        self.chunks = -(-self.prompt // step_tokens)
        priority_class = priority_classes[sent.priority]
        self._patience_s = priority_class.ttft_s + self.chunks * priority_class.ttft_s_per_chunk
        self.due = self.at_s + self._patience_s
        organisation, _, user = sent.tenant.partition("/")
        self.path = (sent.priority, organisation, user)
        self.demand = Demand(self.prompt + self.output_max - 1, 1)
        self.key = class_key(self.demand)  # in the queue, while it is not placed
        self.dispatched = self.cached = self.moves = 0
        self.output_charged = 0.0
        self.entry: Any = None  # in the queue, while it has chunks left
        self.prefill: Any = None
        self.decode: Any = None
        self.placed_s = self.first_s = self.join_s = self.end_s = self.last_s = NOT_YET
        self.no_room = False  # once, on any decode worker

    def comes(self, now: float) -> None:
        """Sets the times of a request that comes after another one has ended."""
        self.at_s = self.submitted_s = now
        self.due = now + self._patience_s
