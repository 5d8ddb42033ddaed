"""What a pop of the fair queue asks its caller, entry by entry, and the answers it takes. Pure."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

T = TypeVar("T")


class Terms(NamedTuple):
    """The entry can run."""

    cost: float
    """Of its next chunk."""
    last: bool
    """The chunk is its last one: the entry leaves the queue."""
    key: int
    """Under which it waits for its further chunks; of no account after the last one."""


class Close(NamedTuple):
    """Nothing under the entry's key can run now, nor under `also`."""

    also: Sequence[int] = ()


class MoveTo(NamedTuple):
    """The entry is to wait under another key, as the newest there. Its deadline and its arrival stay."""

    key: int


CLOSED = Close()


Answer = Terms | Close | MoveTo


Offer = Callable[[T], Answer]
"""Asked for the item of one entry after the other, in fair order. It must not change the queue; `peek` and `goes_before` are
allowed."""
