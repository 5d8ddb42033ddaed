"""The KV blocks that one attempt can need of a decode worker. Pure."""

from typing import NamedTuple

from proto.messages import Submit

NEVER = 1 << 60  # the end of an attempt without a known end, in steps


class KvDemand(NamedTuple):
    """The need of an attempt on a decode worker, in tokens; lengths are of each choice."""

    prompt_tokens: int
    left: int
    """Most tokens it will forward after joining: the last drawn token's KV is never written, hence max_tokens - 1."""
    choices: int = 1
    expected: int = NEVER  # the length that it is counted with if that is less than `left`: overcommit

    @staticmethod
    def of(submit: Submit, expected: int = NEVER) -> "KvDemand":
        new_tokens = submit.sampling.max_tokens - submit.resumed_tokens
        return KvDemand(submit.prompt_tokens, max(new_tokens - 1, 0), submit.choices, expected)

    @property
    def counted(self) -> int:
        return min(self.left, self.expected)

    def grown(self, steps: int, block_size: int) -> int:
        """Blocks held at the most `steps` steps after joining, in this and every earlier step."""
        shared = self.prompt_tokens // block_size
        tokens = self.prompt_tokens + min(max(steps, 0), self.counted)
        return shared + self.choices * (-(-tokens // block_size) - shared)

    def whole(self, block_size: int) -> int:
        """Blocks held at the end of the longest life counted with."""
        prompt_tokens, left, choices, expected = self
        shared = prompt_tokens // block_size
        return shared + choices * (-(-(prompt_tokens + min(left, expected)) // block_size) - shared)
