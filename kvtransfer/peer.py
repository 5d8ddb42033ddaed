"""A peer that KV is sent to or received from, as the drivers of both ends keep it."""

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from kvtransfer.memory.pool import PoolRows
from kvtransfer.session.session import AnnounceOrder, SendSegment
from kvtransfer.transports.pair import Pair
from proto.kv import PairListen

Key = tuple[str, int]  # (request_id, attempt)


@dataclass(slots=True, eq=False)
class KvPeer:
    """A connection to one peer, current or being closed, with its live sessions. `pair` is None until its thread has been
    started. If the ends cannot meet by one transport, another pair with the same id takes its place."""

    incarnation: int
    pair_id: int
    rows: PoolRows  # our pool in blocks of the size that this pair transfers
    offered: tuple[str, ...]  # transports still proposed, best first
    pair: Pair | None = None
    transport: str = ""  # in use, or by which it tries to meet; empty until known
    why: str = ""  # the reason against better transports
    ready: bool = False
    sessions: dict[Key, Any] = field(default_factory=dict)
    timer: asyncio.TimerHandle | None = None  # until both ends must have met
    dropped: bool = False
    used_at: float = 0.0
    encrypt: bool = False  # `tcp` encrypts the KV
    # On the sender: segments of all its sessions, in the order in which they became ready.
    waiting: deque[tuple[Any, SendSegment]] = field(default_factory=deque)
    announced: int = 0
    # On the receiver:
    order: AnnounceOrder = field(default_factory=AnnounceOrder)
    listening: PairListen | None = None
