"""The charge of a request to its tenant's turn, in weighted tokens: `w_p * (prompt - cached) + w_q * output`, at least 1.

A prompt token behind a long context takes more work than one at the beginning, so it counts for more: with `c` tokens before it
for `1 + c / attention_tokens`, where `attention_tokens` is the context at which attention takes as much work as the weights. So
tenants share the time of prefill workers, not the number of tokens. Quotas and usage count plain tokens.

Prompt tokens are charged chunk by chunk when they are dispatched. The estimated output is charged with the last chunk, and
longer output as it is emitted. Both are corrected to what was computed and emitted. So a request cancelled in the queue costs
nothing.
"""

from dataclasses import dataclass

from proto.messages import Submit


@dataclass(frozen=True)
class Prices:
    prompt_token: float = 1.0
    output_token: float = 2.0

    def chunk(self, tokens: int, context_tokens: int = 0, attention_tokens: int = 0) -> float:
        """The cost of a chunk of `tokens` behind `context_tokens`; with `attention_tokens` 0 context costs nothing."""
        cost = self.prompt_token * tokens
        if attention_tokens:
            cost *= 1.0 + (context_tokens + tokens / 2) / attention_tokens
        return cost if cost > 1.0 else 1.0

    def output(self, tokens: float) -> float:
        return self.output_token * tokens


USUAL = 0.5  # the quantile of a tenant's answers that cost and rates are estimated with
LONG = 0.9  # the quantile of a tenant's answers that room in decode is reserved for
FEW = 8
START_TOKENS, START_LONG_TOKENS = 128.0, 1024.0


class OutputLength:
    """Two quantiles of one tenant's answers, learnt online by stochastic approximation (Robbins & Monro 1951). The longest of
    the first few answers stands for the higher one."""

    __slots__ = ("long_tokens", "seen", "tokens")

    def __init__(self, long_tokens: float = 0.0) -> None:
        self.tokens, self.long_tokens = START_TOKENS, long_tokens
        self.seen = 0  # answers that have ended

    def learn(self, emitted: int) -> None:
        self.seen += 1
        self.tokens = _moved(self.tokens, USUAL, emitted)
        if self.long_tokens:
            self.long_tokens = max(_moved(self.long_tokens, LONG, emitted), emitted if self.seen <= FEW else 0.0)
        else:
            self.long_tokens = float(emitted)

    def exceeds(self, tokens: int) -> None:
        """Learn of an answer that has so many tokens and has not ended."""
        if self.seen < FEW:
            self.long_tokens = max(self.long_tokens, tokens)
        elif tokens > self.long_tokens:
            self.long_tokens = _moved(self.long_tokens, LONG, tokens)

    def estimate(self, submit: Submit) -> float:
        """Tokens that all choices of this attempt will emit."""
        return submit.choices * min(float(max(submit.sampling.max_tokens - submit.resumed_tokens, 1)), self.tokens)


def _moved(tokens: float, quantile: float, emitted: int) -> float:
    """An estimate after one more answer. It moves by a fraction of itself: answers differ by orders of magnitude."""
    toward = quantile if emitted > tokens else quantile - 1
    return max(1.0, tokens * (1 + 0.1 * toward))
