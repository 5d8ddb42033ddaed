"""The log-probabilities of a prompt's tokens, as they come from a prefill worker, in order. Pure."""

import sys
from array import array
from collections.abc import Iterator
from typing import NamedTuple

from proto.errors import RemoteProtocolError
from proto.progress import PromptLogprobs


class PromptScore(NamedTuple):
    """The score of one token of the prompt."""

    logprob: float
    rank: int  # Its place among all tokens, likeliest first; 1 is the likeliest
    top: tuple[tuple[int, float], ...]  # The likeliest tokens at its place, best first


class PromptScores:
    def __init__(self, prompt_tokens: int, top: int) -> None:
        """`top`: how many of the likeliest tokens are asked for at each place."""
        self._wanted = prompt_tokens - 1
        self._top_max = top
        self._top = 0
        self._logprobs, self._ranks = array("f"), array("i")
        self._top_ids, self._top_logprobs = array("i"), array("f")

    @property
    def complete(self) -> bool:
        """Whether there is one for every token of the prompt but the first."""
        return len(self._ranks) == self._wanted

    def take(self, message: PromptLogprobs) -> None:
        """Add scores. Those of an earlier attempt count. Scores that would leave a gap are dropped: when the first token
        comes, the missing scores are noticed. Raises `RemoteProtocolError`."""
        rows = len(message.ranks) // 4
        lengths = [len(part) for part in (message.logprobs, message.ranks, message.top_ids, message.top_logprobs)]
        if lengths != [4 * rows, 4 * rows, 4 * rows * message.top, 4 * rows * message.top]:
            raise RemoteProtocolError(f"log-probabilities of {rows} prompt tokens in {lengths} bytes")
        have, end = len(self._ranks), message.start - 1 + rows
        if message.top > self._top_max or end > self._wanted:
            raise RemoteProtocolError(f"log-probabilities up to prompt token {end} of {self._wanted}")
        skip = have - (message.start - 1)
        if not 0 <= skip < rows or (have and message.top != self._top):
            return
        self._top = message.top
        for own, packed, width in (
            (self._logprobs, message.logprobs, 1),
            (self._ranks, message.ranks, 1),
            (self._top_ids, message.top_ids, message.top),
            (self._top_logprobs, message.top_logprobs, message.top),
        ):
            numbers = array(own.typecode)
            numbers.frombytes(packed[4 * skip * width :])
            if sys.byteorder == "big":
                numbers.byteswap()
            own.extend(numbers)

    def __len__(self) -> int:
        return len(self._ranks)

    def __iter__(self) -> Iterator[PromptScore]:
        """The scores from the prompt's second token on."""
        for row, (logprob, rank) in enumerate(zip(self._logprobs, self._ranks, strict=True)):
            at = slice(row * self._top, (row + 1) * self._top)
            yield PromptScore(logprob, rank, tuple(zip(self._top_ids[at], self._top_logprobs[at], strict=True)))
