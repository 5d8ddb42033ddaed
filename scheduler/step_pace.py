"""How much work a prefill worker gets in advance: enough to keep it busy, but so little that the next prompt starts soon.
Pure.

A step of 256 tokens takes milliseconds on a GPU, but seconds on a CPU behind a long context, and it cannot be interrupted. So
steps are also bounded by the time that they take, judged by the last steps.
"""

from math import inf
from typing import Final, NamedTuple

STEP_TOKENS_MIN: Final = 64  # steps are not cut shorter, or the fixed cost of a step would dominate


class StepLimits(NamedTuple):
    tokens: int = 0  # 0: as each worker says. A `StepPace` needs the number itself.
    ms: float = 0.0  # 0: no matter how long
    in_flight: int = 2


class StepPace:
    """How many tokens a step of one prefill worker may have."""

    def __init__(self, limits: StepLimits) -> None:
        self._limits = limits
        self.token_ms = 0.0
        """Milliseconds a token took in the last steps of useful length, smoothed; 0 until there was one."""
        self.slice_ms = 0.0  # milliseconds that a mixed worker's streams leave between two of their steps; 0: no bound

    @property
    def _longest_ms(self) -> float:
        return min(self._limits.ms or inf, self.slice_ms or inf)

    @property
    def budget(self) -> int:
        """Tokens of its next step."""
        most, longest_ms = self._limits.tokens, self._longest_ms
        if self.token_ms * most <= longest_ms:
            return most
        return min(most, max(1 if self.slice_ms else STEP_TOKENS_MIN, int(longest_ms / self.token_ms)))

    def is_full(self, tokens: int) -> bool:
        """Whether a step was long enough to measure the worker's rate. A short step is mostly overhead, and makes its worker
        look slower than it is."""
        return 2 * tokens >= self.budget

    def measure(self, tokens: int, step_ms: float) -> None:
        if self.is_full(tokens):
            now_ms = step_ms / tokens
            self.token_ms += (now_ms - self.token_ms) * (0.5 if self.token_ms else 1.0)

    def may_have_more(self, steps: int, tokens: int) -> bool:
        """Whether the worker gets another step while `steps` steps of `tokens` tokens in all are in flight."""
        if not steps:
            return True
        return steps < self._limits.in_flight and self._longest_ms > 2 * self.token_ms * tokens
