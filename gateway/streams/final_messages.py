"""The final `Cancel` of each request. It is sent again to a coordinator that may not have received or recorded it. Also makes
the message that names an answer's blocks for its worker. Pure.

A worker also repeats what it has finished, but it may be lost together with the coordinator. Then only the gateway knows how
many tokens an answer has, and that it has ended.
"""

from collections import OrderedDict
from math import inf

from gateway.streams.state import Submission
from gateway.streams.types import SendNames
from proto.limits import HASH_BYTES
from proto.messages import Cancel
from proto.progress import AnswerNames

AGAIN_S = 10.0  # longer than a coordinator is silent before it counts as lost, or waits to record an end
KEPT_S = 60.0  # longer than a worker is silent before a coordinator counts what it finished as interrupted


class LastWords:
    def __init__(self, most: int) -> None:
        self._most = most
        self._words: OrderedDict[str, tuple[float, Cancel]] = OrderedDict()  # with the time of each; oldest first
        self._lost_at = inf

    def add(self, word: Cancel, now: float) -> None:
        self._words.pop(word.request_id, None)
        self._words[word.request_id] = now, word
        kept_from = min(now, self._lost_at) - KEPT_S
        while len(self._words) > self._most or next(iter(self._words.values()))[0] < kept_from:
            self._words.popitem(last=False)

    def about(self, request_id: str) -> list[Cancel]:
        """Returns the request's final `Cancel`, if it is still kept. It was sent, or would have been with a link."""
        found = self._words.get(request_id)
        return [found[1]] if found is not None else []

    def take_back(self, request_id: str) -> None:
        """Forget the request's final `Cancel`, since the request goes on as another attempt."""
        self._words.pop(request_id, None)

    def lost(self, now: float) -> None:
        """Note when the link to the coordinator was lost."""
        self._lost_at = min(self._lost_at, now)

    def again(self, now: float) -> list[Cancel]:
        """Returns the cancels to send again, now that this coordinator or another is connected."""
        words = [word for at, word in self._words.values() if at >= self._lost_at - AGAIN_S]
        for word in words:
            self.add(word, now)
        self._lost_at = inf
        return words


def answer_names(submission: Submission) -> list[SendNames]:
    """The names of its answers' blocks, for prompts that continue them; to the worker that has computed them last."""
    work = submission.stream.work
    if work.names is None or not submission.liveness.decoder:
        return []
    first, size, found = len(work.names.hashes) // HASH_BYTES, work.names.block_size, []
    for choice in submission.choices:
        if hashes := work.names.behind(work.prompt, choice.tokens):
            names = AnswerNames(submission.request_id, submission.attempt, choice.index, size, first, hashes)
            found.append(SendNames(submission.liveness.decoder, names))
    return found
