"""One request as the simulator sees it."""

from collections.abc import Sequence
from typing import NamedTuple

from runtime.tenancy.priority_classes import DEFAULT_PRIORITY_CLASS

NOT_YET = -1.0


class Sent(NamedTuple):
    """A request of a trace."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()  # ids of its prompt's blocks; equal ids are equal tokens
    tenant: str = "default"
    priority: str = DEFAULT_PRIORITY_CLASS
    session: int = 0  # that it is a turn of; 0: none
    reused_tokens: int = 0  # of the prompt and answer of the session's turn before
    follows: int = -1  # index of the request after whose end it comes, instead of at `at_s`; -1: none
    think_s: float = 0.0  # from that end until this request comes


def clients_of(sent: Sequence[Sent]) -> list[int]:
    """Returns the number of each request's client."""
    found: list[int] = []
    for number, one in enumerate(sent):
        found.append(number if one.follows < 0 else found[one.follows])
    return found


class PlayedRequest:
    """Times in seconds; `NOT_YET` where nothing happened."""

    __slots__ = (
        *("at_s", "attempt", "cached", "end_s", "first_s", "join_s", "last_s", "number", "output", "path"),
        *("placed_s", "prompt", "sent", "submitted_s"),
    )

    def __init__(self, number: int, sent: Sent) -> None:
        self.number, self.sent, self.attempt = number, sent, 1
        self.at_s = self.submitted_s = sent.at_s
        self.prompt, self.output = sent.prompt_tokens, sent.output_tokens
        organisation, _, user = sent.tenant.partition("/")
        self.path = (sent.priority, organisation, user)
        self.cached = 0
        self.placed_s = self.first_s = self.join_s = self.end_s = self.last_s = NOT_YET

    def comes(self, now: float) -> None:
        """Sets the times of a request that comes after another one has ended."""
        self.at_s = self.submitted_s = now
