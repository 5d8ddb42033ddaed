"""The link that reaches a prefill worker, where it may have several to us for a moment. Pure.

A worker that looks for an earlier incarnation of ours, at the same address, shakes hands with us too before it sees whom it
met and leaves again. So a link counts from its first message on, and answers go where the last message came from.
"""

from typing import Generic, TypeVar

L = TypeVar("L")


class Senders(Generic[L]):
    def __init__(self) -> None:
        self._links: dict[int, L] = {}

    def heard(self, incarnation: int, link: L) -> None:
        self._links[incarnation] = link

    def lost(self, incarnation: int, link: L) -> bool:
        """Whether that was the way to this worker; else nothing is lost."""
        if self._links.get(incarnation) is not link:
            return False
        del self._links[incarnation]
        return True

    def link(self, incarnation: int) -> L | None:
        return self._links.get(incarnation)
