"""The sessions that workers keep: the prompt of each, and the answer on the worker that decoded it. The least recently used
one is dropped first.

`Sent.reused_tokens` says how much of it the next turn begins with.
"""

from collections import OrderedDict

from tuning.simulator.job import Sent


class KeptAnswers:
    """The answers that one worker keeps, or both halves of a mixed one."""

    def __init__(self) -> None:
        self._tokens: OrderedDict[int, int] = OrderedDict()
        self._sum = 0

    def of(self, sent: Sent) -> int:
        """Returns how many tokens of its prompt are kept; the last token is always computed."""
        return min(self._tokens.get(sent.session, 0), sent.reused_tokens, sent.prompt_tokens - 1) if sent.session else 0

    def keep(self, session: int, tokens: int, room_tokens: int) -> None:
        """Keeps a session. `room_tokens`: room that no running request holds."""
        self.take(session)
        self._tokens[session] = tokens
        self._sum += tokens
        self.shrink(room_tokens)

    def take(self, session: int) -> None:
        """Removes the session, because its next turn now holds that KV."""
        self._sum -= self._tokens.pop(session, 0)

    def shrink(self, room_tokens: int) -> None:
        while self._sum > room_tokens and self._tokens:
            _, tokens = self._tokens.popitem(last=False)
            self._sum -= tokens
