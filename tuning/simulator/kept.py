"""The sessions that workers keep: of each the prompt, and where it was decoded, the answer; least recently used goes first.

`Sent.reused_tokens` says how much of it the next turn begins with.
"""

from collections import OrderedDict

from tuning.simulator.job import Sent


class KeptAnswers:
    """The answers that one worker keeps, or both halves of a mixed one."""

    def __init__(self) -> None:
        self._tokens: OrderedDict[int, int] = OrderedDict()
        """Tokens of each session."""
        self._sum = 0

    def of(self, sent: Sent) -> int:
        """Tokens of its prompt; the last one is always computed."""
        return min(self._tokens.get(sent.session, 0), sent.reused_tokens, sent.prompt_tokens - 1) if sent.session else 0

    def keep(self, session: int, tokens: int, room_tokens: int) -> None:
        """`room_tokens`: that nothing running holds."""
        self.take(session)
        self._tokens[session] = tokens
        self._sum += tokens
        self.shrink(room_tokens)

    def take(self, session: int) -> None:
        """Its next turn holds it now."""
        self._sum -= self._tokens.pop(session, 0)

    def shrink(self, room_tokens: int) -> None:
        while self._sum > room_tokens and self._tokens:
            _, tokens = self._tokens.popitem(last=False)
            self._sum -= tokens
