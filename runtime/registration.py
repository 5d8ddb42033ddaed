"""A worker's standing link to the coordinator: registers, registers again after a loss, passes orders on."""

import os
import socket
from collections.abc import Callable

import msgspec

from proto import limits
from proto.messages import CacheEvents, Capacity, Finished, Held, Hello, Message, Role, Welcome
from runtime import notify
from runtime.link import LinkClient, LinkSettings, OnMessage, Peer, is_orderly
from runtime.log import Log
from runtime.settings import WorkerSettings
from runtime.waiting import WaitNotice


class Registration:
    """`held()` is asked at each registration; `on_lost` is called when the coordinator goes."""

    def __init__(
        self,
        *,
        settings: WorkerSettings,
        hello: Hello,
        held: Callable[[], tuple[Held, ...]],
        on_message: OnMessage,
        on_lost: Callable[[str], None],
        log: Log,
        links: LinkSettings,
    ) -> None:
        self._held = held
        self._hello = hello
        self._on_lost = on_lost
        self._log = log
        self._peer: Peer | None = None
        self._unsaid: list[Message] = []
        """Said while the coordinator was away: the next Hello still counts what these let go of."""
        self._left: dict[tuple[str, int], Held] = {}
        """What was held when the coordinator was lost."""
        self._client = LinkClient(
            address=settings.coordinator,
            hello=self._hello_now,
            on_up=self._up,
            on_message=on_message,
            on_down=self._down,
            settings=links,
        )
        self._waiting = WaitNotice(log, settings.coordinator, lambda: self._client.last_error)

    def report_cache(self, take_changes: Callable[[int], tuple[bytes, bytes]]) -> None:
        """Tell the coordinator what a prefix cache has gained and lost; while it is away, the changes stay where they are."""
        if self._peer is None:
            return
        inserted, evicted = take_changes(limits.MAX_CACHE_CHANGES)
        if inserted or evicted:
            self._peer.send(CacheEvents(inserted, evicted))

    async def start(self) -> None:
        self._waiting.begin()
        await self._client.start()

    async def close(self) -> None:
        await self._client.close()
        self._waiting.end()

    @property
    def up(self) -> bool:
        """Whether the coordinator is there."""
        return self._peer is not None

    def send(self, message: Message) -> None:
        """Tell the coordinator, if it is there; if not, the next registration says what is still held, and what has finished
        meanwhile: its answer is to be paid for as it was, not as it was estimated."""
        if self._peer is not None:
            self._peer.send(message)
        else:
            self._unsaid.append(message)

    def _hello_now(self) -> Hello:
        held = {(one.request_id, one.attempt): one for one in self._held()}
        finished = [message for message in self._unsaid if isinstance(message, Finished)]
        keys = [(message.request_id, message.attempt) for message in finished]
        self._unsaid = [message for message, key in zip(finished, keys, strict=True) if key in self._left]
        for key in keys:
            if key in self._left:
                held[key] = msgspec.structs.replace(self._left[key], kv_blocks=0, seqs=0)
        fields = {name: getattr(self._hello, name) for name in Hello.__struct_fields__}
        return Hello(**(fields | {"held": tuple(held.values())}))

    def _up(self, peer: Peer, welcome: Welcome) -> None:
        self._peer = peer
        self._waiting.end()
        unsaid, self._unsaid = self._unsaid, []
        self._left.clear()
        for message in unsaid:
            peer.send(message)
        self._log.info("registered", coordinator_epoch=welcome.epoch)
        notify.ready("registered")

    def _down(self, _: Peer, reason: str) -> None:
        self._peer = None
        self._left = {(one.request_id, one.attempt): one for one in self._held()}
        self._waiting.begin()
        if is_orderly(reason):
            self._log.info("coordinator left", reason=reason)
        else:
            self._log.warning("coordinator lost", reason=reason)
        self._on_lost(reason)


def worker_hello(
    settings: WorkerSettings, *, epoch: int, name: str, fingerprint: str, capacity: Capacity, address: str = ""
) -> Hello:
    """A worker's Hello; `address` is where it can be reached, if it can."""
    return Hello(
        version=limits.PROTOCOL_VERSION,
        role=Role(settings.role),
        epoch=epoch,
        name=name,
        model=settings.served_model_id,
        fingerprint=fingerprint,
        address=address,
        capacity=capacity,
        host=socket.gethostname(),
        pid=os.getpid(),
    )
