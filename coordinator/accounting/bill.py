"""The bill of one request: what it reserved, and what has come of it so far. Pure."""

import msgspec

from coordinator.accounting.account import Grant
from coordinator.accounting.quota import Ask
from scheduler.request import StateTimes


class UsageCounters(msgspec.Struct, eq=False, gc=False):
    """The usage on a bill so far."""

    attempt: int = 0
    computed_tokens: int = 0  # prompt tokens that were computed in this attempt
    prompt_tokens: int = 0  # prompt tokens to be charged
    prompt_done: bool = False
    """All of the prompt was computed or cached, in some attempt: what a later one computes of it again is not charged."""
    output_tokens: int = 0  # answer tokens that are known to be emitted, summed over choices
    from_token: int = 0  # the first answer token on this bill; those before it are on another one
    charged_tokens: int = 0  # tokens that an earlier bill of this request charged
    again: bool = False  # its row in the ledger may be closed
    adopted: bool = False  # it was an orphan, and its row is in the ledger
    held: int = 0  # reservations on workers, and dispatched chunks not yet reported
    doubt_until: float = 0.0  # the time until which a lost worker or gateway may still report more of it
    outcome: str = ""
    ended: str = ""  # its outcome before it was reopened

    @property
    def used_tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens - self.from_token


class Bill(Grant, eq=False, gc=False):
    request_id: str
    prompt_tokens_max: int
    choices: int = 1
    counters: UsageCounters = msgspec.field(default_factory=UsageCounters)
    times: StateTimes = msgspec.field(default_factory=StateTimes)

    @property
    def estimate(self) -> Ask:
        """The amounts that were reserved, with those that were charged before."""
        counters = self.counters
        prompt_tokens = counters.prompt_tokens if counters.prompt_done else self.prompt_tokens_max
        before = counters.charged_tokens - prompt_tokens
        return Ask(prompt_tokens, before + self.tokens, self.kv_blocks, before + self.tokens_max, self.sequences)
