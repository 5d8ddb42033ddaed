"""A connection to one peer and the live sessions on it, as the drivers of both ends keep them."""

import asyncio
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from kvtransfer.memory.pool import PoolRows
from kvtransfer.session.session import TransferSession
from kvtransfer.transports.pair import Pair

Key = tuple[str, int]  # (request_id, attempt)


@dataclass(slots=True, eq=False)
class Route:
    """A connection to one peer, current or being closed. `pair` is None until its thread has been started. If the ends cannot
    meet by one transport, another pair with the same id takes its place."""

    peer_incarnation: int
    pair_id: int
    rows: PoolRows  # our pool in blocks of the size that this pair transfers
    offered: tuple[str, ...]  # transports still proposed, best first
    pair: Pair | None = None
    transport: str = ""  # in use, or by which it tries to meet; empty until known
    why: str = ""  # the reason against better transports
    ready: bool = False
    sessions: "dict[Key, Live[Any, Any]]" = field(default_factory=dict)
    timer: asyncio.TimerHandle | None = None  # until both ends must have met
    dropped: bool = False
    used_at: float = 0.0
    encrypt: bool = False  # `tcp` encrypts the KV


S = TypeVar("S", bound=TransferSession)


R = TypeVar("R", bound=Route)


@dataclass(slots=True, eq=False)
class Live(Generic[S, R]):
    """A session with its route and timer on the event loop. Its block ids are those of the route: sub-blocks, if the peer's
    blocks are smaller than ours."""

    key: Key
    session: S
    route: R
    timer: asyncio.TimerHandle | None = None
    timer_at: float = 0.0
    ended_at: float = 0.0
