"""The part of `prefill_worker.worker` that the core uses."""

from typing import Protocol

from kvtransfer.ports import KvOut
from proto.kv import Fetch
from proto.messages import Destination
from worker.ports import CoordinatorLink, Gateways


class PrefillKvIn(Protocol):
    """`kvtransfer.receiver.KvReceiver` is the real one."""

    def abort(self, request_id: str, attempt: int, reason: str) -> None: ...


class PrefillPorts(Protocol):
    @property
    def registration(self) -> CoordinatorLink: ...
    @property
    def gateways(self) -> Gateways: ...
    @property
    def sender(self) -> KvOut: ...
    @property
    def receiver(self) -> PrefillKvIn: ...

    def now(self) -> float: ...

    def fetch(self, decode: Destination, message: Fetch) -> None:
        """Send the message, and call `Fetches.expire` when the time for an offer has passed."""
