"""What a request costs its tenant's turn, in weighted tokens: `w_p * (prompt - cached) + w_q * output`, at least 1.

A prompt token behind a long context takes more work than one at the beginning, so it counts for more: with `c` tokens before it
for `1 + c / attention_tokens`, where `attention_tokens` is the context at which attention takes as much work as the weights. So
tenants share the time of prefill workers, not the number of tokens. Quotas and usage count plain tokens.

Prompt tokens are charged chunk by chunk when they are dispatched, the output with the last chunk, as estimated; both are
trued up to what was computed and emitted. So a request cancelled in the queue costs nothing.
"""

from dataclasses import dataclass

from proto.messages import Submit


@dataclass(frozen=True)
class Prices:
    prompt_token: float = 1.0
    output_token: float = 2.0

    def chunk(self, tokens: int, context_tokens: int = 0, attention_tokens: int = 0) -> float:
        """Of so many tokens behind so many; `attention_tokens` 0: context costs nothing."""
        cost = self.prompt_token * tokens
        if attention_tokens:
            cost *= 1.0 + (context_tokens + tokens / 2) / attention_tokens
        return cost if cost > 1.0 else 1.0

    def output(self, tokens: float) -> float:
        return self.output_token * tokens


class OutputLength:
    """A quantile of one tenant's answers, learnt online by stochastic approximation (Robbins & Monro 1951)."""

    __slots__ = ("quantile", "tokens")

    def __init__(self, quantile: float = 0.5, start_tokens: float = 128.0) -> None:
        assert 0 < quantile < 1 and start_tokens >= 1
        self.quantile, self.tokens = quantile, start_tokens

    def learn(self, emitted: int) -> None:
        """Move by a fraction of the estimate itself: answers differ by orders of magnitude."""
        toward = self.quantile if emitted > self.tokens else self.quantile - 1
        self.tokens = max(1.0, self.tokens * (1 + 0.1 * toward))

    def estimate(self, submit: Submit) -> float:
        """Tokens that all choices of this attempt will emit."""
        return submit.choices * min(float(max(submit.sampling.max_tokens - submit.resumed_tokens, 1)), self.tokens)
