"""The last word about each request: said again to a coordinator that may not have heard it, or not have written it down; and
to its worker, what the answer was. Pure.

A worker says again what it has finished, but it may be lost together with the coordinator. Then only the gateway knows how far
an answer got, and that nobody waits for more of it.
"""

from collections import OrderedDict
from math import inf

from gateway.streams.state import Submission
from gateway.streams.types import SendNames
from proto.limits import HASH_BYTES
from proto.messages import Cancel
from proto.progress import AnswerNames

AGAIN_S = 10.0
"""Longer than a coordinator can be silent before it is given up, and than it waits for more before it writes an end down."""
KEPT_S = 60.0
"""Longer than a worker can be silent before a coordinator takes what it had finished for interrupted."""


class LastWords:
    def __init__(self, most: int) -> None:
        self._most = most
        self._words: OrderedDict[str, tuple[float, Cancel]] = OrderedDict()
        """Messages by request, and when each was sent or would have been; oldest first."""
        self._lost_at = inf

    def add(self, word: Cancel, now: float) -> None:
        self._words.pop(word.request_id, None)
        self._words[word.request_id] = now, word
        kept_from = min(now, self._lost_at) - KEPT_S
        while len(self._words) > self._most or next(iter(self._words.values()))[0] < kept_from:
            self._words.popitem(last=False)

    def about(self, request_id: str) -> list[Cancel]:
        """The cancels that were sent for it lately, or would have been."""
        found = self._words.get(request_id)
        return [found[1]] if found is not None else []

    def take_back(self, request_id: str) -> None:
        """It goes on, as another attempt."""
        self._words.pop(request_id, None)

    def lost(self, now: float) -> None:
        """The coordinator is away."""
        self._lost_at = min(self._lost_at, now)

    def again(self, now: float) -> list[Cancel]:
        """The cancels that it, or another, is to be told when it is there again."""
        words = [word for at, word in self._words.values() if at >= self._lost_at - AGAIN_S]
        for word in words:
            self.add(word, now)
        self._lost_at = inf
        return words


def answer_names(submission: Submission) -> list[SendNames]:
    """The names of its answers' blocks, for prompts that continue them; to the worker that has computed them last."""
    spec = submission.stream.spec
    if spec.names is None or not submission.decoder:
        return []
    first, size, found = len(spec.names.hashes) // HASH_BYTES, spec.names.block_size, []
    for choice in submission.choices:
        if hashes := spec.names.behind(spec.prompt, choice.tokens):
            names = AnswerNames(submission.request_id, submission.attempt, choice.index, size, first, hashes)
            found.append(SendNames(submission.decoder, names))
    return found
