"""The link that reaches each prefill worker, which may briefly have several links to us. Pure.

A worker that looks for an earlier incarnation of ours at the same address also completes a handshake with us, then notices the
difference and leaves. So a link counts from its first message on, and answers go over the link of the last message.
"""

from typing import Generic, TypeVar

L = TypeVar("L")


class Senders(Generic[L]):
    def __init__(self) -> None:
        self._links: dict[int, L] = {}

    def heard(self, incarnation: int, link: L) -> None:
        self._links[incarnation] = link

    def lost(self, incarnation: int, link: L) -> bool:
        """Returns whether this was the current link to the worker, and forgets it then."""
        if self._links.get(incarnation) is not link:
            return False
        del self._links[incarnation]
        return True

    def link(self, incarnation: int) -> L | None:
        return self._links.get(incarnation)
