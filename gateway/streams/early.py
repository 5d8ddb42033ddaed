"""Tokens that overtook the first one of their attempt. Pure.

The first token comes from a prefill worker and the others from a decode worker, over another connection, so that a busy
gateway may read the second one first. It is kept until the first has come, for a bounded time.
"""

from math import inf

from proto.messages import TokenItem


class EarlyTokens:
    """Of one attempt, for each of its choices, in the order in which they came."""

    def __init__(self) -> None:
        self._items: dict[int, list[TokenItem]] = {}
        self._decoder = 0
        self._since: float | None = None

    def keep(self, item: TokenItem, decoder: int, now: float) -> None:
        self._items.setdefault(item.choice, []).append(item)
        self._decoder = decoder
        self._since = now if self._since is None else self._since

    def take(self, choice: int) -> tuple[list[TokenItem], int]:
        """What was kept for this choice, whose first token has come; and the decode worker's incarnation."""
        items = self._items.pop(choice, [])
        if not self._items:
            self._since = None
        return items, self._decoder

    def late_at(self, first_token_wait_s: float) -> float:
        """When the first token that they wait for is taken for lost."""
        return inf if self._since is None else self._since + first_token_wait_s
