"""Owners of one end of a transfer for tests: frames go to `wire`, and what matters to the test to a callable."""

from collections.abc import Callable
from dataclasses import dataclass

from kvtransfer.ports import ReceiverOwner, SenderOwner
from kvtransfer.session.session import KvFailed, KvSent, OfferAccepted
from proto.kv import Commit, Offer
from proto.messages import Message

Wiring = Callable[[int, Message, bytes], None]


@dataclass
class Sends(SenderOwner):
    wire: Wiring
    on_result: Callable[[KvSent | KvFailed], object]

    def send(self, peer_incarnation: int, message: Message, blob: bytes) -> None:
        self.wire(peer_incarnation, message, blob)

    def sent(self, result: KvSent | KvFailed) -> None:
        self.on_result(result)


@dataclass
class Receives(ReceiverOwner):
    wire: Wiring
    accept: Callable[[int, Offer], OfferAccepted | str | None]

    def send(self, peer_incarnation: int, message: Message, blob: bytes) -> None:
        self.wire(peer_incarnation, message, blob)

    def offered(self, peer_incarnation: int, offer: Offer) -> OfferAccepted | str | None:
        return self.accept(peer_incarnation, offer)

    def committed(self, peer_incarnation: int, commit: Commit, block_ids: list[int], prompt_tokens: list[int]) -> None:
        return

    def not_received(self, request_id: str, attempt: int, block_ids: list[int], reason: str) -> None:
        return
