"""What the coordinator knows of one request."""

from dataclasses import dataclass

from coordinator.lifecycle import State, Trigger, advance
from proto.messages import Submit


@dataclass(eq=False)
class Request:
    """One request over all its attempts; the fields from `submit` on belong to the current one."""

    id: str
    gateway_epoch: int
    submit: Submit
    blob: bytes
    """Packed prompt ids, forwarded untouched and dropped once forwarded."""
    since: float
    """When it entered the current state."""
    state: State = State.QUEUED
    prefill_epoch: int = 0
    decode_epoch: int = 0
    dispatched_tokens: int = 0
    """Prompt tokens sent out in chunks."""
    computed_tokens: int = 0

    @property
    def attempt(self) -> int:
        return self.submit.attempt

    @property
    def key(self) -> tuple[str, int]:
        return (self.id, self.submit.attempt)

    def fire(self, trigger: Trigger, now: float) -> None:
        self.state = advance(self.state, trigger)
        self.since = now

    def renew(self, submit: Submit, blob: bytes) -> None:
        """Take the next attempt's parameters over."""
        self.submit, self.blob = submit, blob
        self.prefill_epoch = self.decode_epoch = 0
        self.dispatched_tokens = self.computed_tokens = 0


def kv_blocks_needed(submit: Submit, block_size: int) -> int:
    """Blocks that decode needs at the most: the prompt's full blocks once, and what each choice writes beyond them.

    The last drawn token's KV is never written, hence the `- 1`.
    """
    shared = submit.prompt_tokens // block_size
    new_tokens = submit.sampling.max_tokens - submit.resumed_tokens
    whole = -(-(submit.prompt_tokens + max(new_tokens, 1) - 1) // block_size)
    return shared + submit.choices * max(whole - shared, 0)
