"""How long a tenant's answers are, learnt online, and with how many tokens an answer is counted in decode (overcommit). Pure.

A tenant or organisation is *proven* once `PROVEN_ANSWERS` of its answers have been seen. Answers of a proven tenant are counted
with the length that few of them exceed; those of an unproven one with the length of its organisation, or of all. But so are at
most `UNPROVEN_STREAMS` of its streams at a time. Further ones are counted with `UNPROVEN_TOKENS`, if `max_tokens` allows so
many. So a tenant that nobody knows cannot fill decode with answers that outgrow it.
"""

from math import ceil

from proto.messages import Submit
from scheduler.fairness.fair_node import Path
from scheduler.fairness.held_shares import HeldShares
from scheduler.kv_admission.admission import NEVER
from scheduler.limits import START_LONG_TOKENS
from scheduler.request import Request

PROVEN_ANSWERS = 8
UNPROVEN_STREAMS = 4
UNPROVEN_TOKENS = 4096.0


USUAL = 0.5  # the quantile of a tenant's answers that cost and rates are estimated with
LONG = 0.9  # the quantile of a tenant's answers that room in decode is reserved for
FEW = 8
START_TOKENS = 128.0


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


class AnswerLengths:
    def __init__(self, long_tokens: float = START_LONG_TOKENS, overcommit: float = 1.0) -> None:
        """`long_tokens`: the length that few answers are taken to exceed before any was seen. Answers are counted with at least
        `max_tokens` divided by `overcommit`."""
        self._lengths: dict[Path, OutputLength] = {(): OutputLength(long_tokens)}
        """The lengths of each tenant, of each organisation in its priority class, and of all."""
        self._overcommit = overcommit

    def of(self, path: Path) -> OutputLength:
        found = self._lengths.get(path)
        if found is None:
            found = self._lengths[path] = OutputLength()
        return found

    def forget(self, path: Path) -> None:
        """A tenant; its organisation is forgotten with it, and learnt again if it has others."""
        self._lengths.pop(path, None)
        self._lengths.pop(path[:2], None)

    def learn(self, path: Path, emitted: int) -> None:
        """An answer has ended with so many tokens."""
        for depth in _LEVELS:
            length = self.of(path[:depth])
            if length.seen == PROVEN_ANSWERS - 1:
                length.long_tokens = self.long_tokens(path[:depth])  # the first answers to end are the short ones
            length.learn(emitted)

    def outlived(self, path: Path, tokens: int) -> None:
        """A running answer has more tokens than it was counted with."""
        for depth in _LEVELS:
            self.of(path[:depth]).exceeds(tokens)

    def long_tokens(self, path: Path) -> float:
        """The tokens of one choice that few of a tenant's answers are expected to exceed."""
        least = 0.0
        for depth in _LEVELS:
            length = self.of(path[:depth])
            least = max(length.long_tokens, least)
            if length.seen >= PROVEN_ANSWERS:
                break
        return least

    def is_proven(self, path: Path) -> bool:
        return self.of(path).seen >= PROVEN_ANSWERS

    def expect(self, request: Request, shares: HeldShares) -> None:
        """Set with how many tokens a request that is not placed would be counted now."""
        if self._overcommit <= 1 or request.resumed:
            request.expected_left = NEVER
            return
        path, submit = request.path, request.submit
        tokens = max(self.long_tokens(path), (submit.sampling.max_tokens - submit.resumed_tokens) / self._overcommit)
        if any(
            not self.is_proven(path[:depth]) and shares.estimated(path[:depth]) >= UNPROVEN_STREAMS for depth in (2, 3)
        ):
            tokens = max(tokens, UNPROVEN_TOKENS)
        request.expected_left = max(ceil(tokens) - 1, 0)


_LEVELS = (3, 2, 0)  # lengths of the paths of a tenant, its organisation and all
