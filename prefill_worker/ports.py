"""What `prefill_worker.worker` has for the core."""

from typing import Protocol

from kvtransfer.ports import KvOut
from proto.kv import Fetch
from proto.messages import Destination
from runtime.worker.ports import Coordinator, Gateways


class KvIn(Protocol):
    """`kvtransfer.receiver.KvReceiver` is the real one."""

    def abort(self, request_id: str, attempt: int, reason: str) -> None: ...


class Ports(Protocol):
    @property
    def registration(self) -> Coordinator: ...
    @property
    def gateways(self) -> Gateways: ...
    @property
    def sender(self) -> KvOut: ...
    @property
    def receiver(self) -> KvIn: ...

    def now(self) -> float: ...

    def fetch(self, decode: Destination, message: Fetch) -> None:
        """Send it, and call `Fetches.expire` when an offer should have come."""
