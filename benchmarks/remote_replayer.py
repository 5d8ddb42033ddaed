"""A prefill side that computes nothing: it holds KV, and sends it each time it is asked to."""

import asyncio
import time

import torch

from kvtransfer.memory.layout import KvLayout
from kvtransfer.ports import SenderOwner
from kvtransfer.sender import KvSender
from kvtransfer.session.limits import KvSettings
from kvtransfer.session.session import KvFailed, KvSent
from proto.kv import FirstToken
from proto.messages import Hello, Message
from runtime.link.client import LinkClient
from runtime.link.server import LinkSettings, Peer


class Replayer(SenderOwner):
    """A link to one receiver, and a sender on it. One session at a time."""

    def __init__(self, address: str, hello: Hello, receiver_incarnation: int) -> None:
        self.incarnation = hello.incarnation
        self._receiver_incarnation = receiver_incarnation
        self._peer: Peer | None = None
        self._up = asyncio.Event()
        self._sender: KvSender | None = None
        self._done: asyncio.Future[KvSent | KvFailed] | None = None
        self.offered_at = 0.0
        """When the last session was offered, in seconds of `time.monotonic`, which all processes of a host share."""
        self._link = LinkClient(
            address=address,
            hello=hello,
            on_up=lambda peer, welcome: self._on_up(peer),
            on_message=lambda peer, message, blob: self._on_message(message, blob),
            on_down=lambda peer, reason: self._on_down(reason),
            settings=LinkSettings(heartbeat_ms=10_000),
        )

    async def start(self) -> None:
        """Starts the link; returns when it is up."""
        await self._link.start()
        await self._up.wait()

    async def close(self) -> None:
        if self._sender is not None:
            await self._sender.close()
        await self._link.close()

    async def set_up(self, layout: KvLayout, pool: torch.Tensor, settings: KvSettings) -> None:
        """Prepares the sender for this pool."""
        if self._sender is not None:
            await self._sender.close()
        self._sender = KvSender(
            layout=layout, pool=pool, incarnation=self.incarnation, clock=time.monotonic, owner=self, settings=settings
        )
        self._sender.digest(range(pool.shape[0]))

    async def session(self, request_id: str, block_ids: list[int]) -> float:
        """Sends a session whose blocks are all ready; returns the seconds from its offer to its acknowledgement. Raises
        `RuntimeError`."""
        assert self._sender is not None
        self._done = asyncio.get_running_loop().create_future()
        self.offered_at = time.monotonic()
        self._sender.open(request_id, 1, self._receiver_incarnation, len(block_ids))
        self._sender.blocks_ready(request_id, 1, 0, block_ids)
        self._sender.commit(request_id, 1, (FirstToken(0, 1),), ())
        result = await self._done
        if isinstance(result, KvFailed):
            raise RuntimeError(f"a transfer failed: {result.reason}")
        return time.monotonic() - self.offered_at

    def _on_up(self, peer: Peer) -> None:
        self._peer = peer
        self._up.set()

    def _on_message(self, message: Message, blob: bytes) -> None:
        if self._sender is not None:
            self._sender.handle(self._receiver_incarnation, message, blob)

    def _on_down(self, reason: str) -> None:
        if self._sender is not None:
            self._sender.peer_lost(self._receiver_incarnation, reason)

    def send(self, peer_incarnation: int, message: Message, blob: bytes) -> None:
        if self._peer is not None:
            self._peer.send(message, blob)

    def sent(self, result: KvSent | KvFailed) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(result)
