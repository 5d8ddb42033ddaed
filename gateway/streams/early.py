"""Tokens that arrived before the first token of their attempt. Pure.

The first token comes from a prefill worker and the others from a decode worker, over another connection, so that a busy
gateway may read the second one first. It is kept until the first has come, for a bounded time.
"""

from math import inf

from proto.messages import TokenItem


class EarlyTokens:
    """Early tokens of one attempt, for each of its choices, in the order in which they came."""

    def __init__(self) -> None:
        self._items: dict[int, list[tuple[TokenItem, int]]] = {}
        self._since: float | None = None

    def keep(self, item: TokenItem, decoder: int, now: float) -> None:
        """`decoder`: the incarnation of the decode worker that sent it."""
        self._items.setdefault(item.choice, []).append((item, decoder))
        self._since = now if self._since is None else self._since

    def take(self, choice: int) -> list[tuple[TokenItem, int]]:
        """The tokens that were kept for this choice, whose first token has come, with its decode worker."""
        items = self._items.pop(choice, [])
        if not self._items:
            self._since = None
        return items

    def late_at(self, first_token_wait_s: float) -> float:
        """Returns when the missing first token counts as lost."""
        return inf if self._since is None else self._since + first_token_wait_s
