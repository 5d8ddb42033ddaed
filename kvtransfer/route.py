"""A connection to one peer and the live sessions on it, as the drivers of both ends keep them."""

import asyncio
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from kvtransfer.memory.pool import PoolRows
from kvtransfer.session.session import (
    TransferSession,
)
from kvtransfer.transports.pair import Pair

Key = tuple[str, int]
"""(request_id, attempt)"""


@dataclass(slots=True, eq=False)
class Route:
    """The current or a dying way to one peer. `pair` is None until its thread has been started; where meeting by one transport
    fails, another one takes its place, of the same id."""

    peer_incarnation: int
    pair_id: int
    rows: PoolRows
    """Our pool in the blocks that cross between the two."""
    offered: tuple[str, ...]
    """Transports that are still in question, best first."""
    pair: Pair | None = None
    transport: str = ""
    """That it uses, or tries to meet by; empty until that is known."""
    why: str = ""
    """The reason against better ones."""
    ready: bool = False
    """The two have met."""
    sessions: "dict[Key, Live[Any, Any]]" = field(default_factory=dict)
    timer: asyncio.TimerHandle | None = None
    """When the two must have met at the latest."""
    dropped: bool = False
    used_at: float = 0.0
    """When its last session began or ended."""
    encrypt: bool = False
    """KV crosses encrypted by `tcp`."""


S = TypeVar("S", bound=TransferSession)


R = TypeVar("R", bound=Route)


@dataclass(slots=True, eq=False)
class Live(Generic[S, R]):
    """A session and what belongs to it on the loop. Its blocks are the route's: sub-blocks, where those are smaller."""

    key: Key
    session: S
    route: R
    timer: asyncio.TimerHandle | None = None
    timer_at: float = 0.0
    ended_at: float = 0.0
