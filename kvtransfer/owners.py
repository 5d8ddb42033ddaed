"""The part of a worker that its KV drivers talk to. All methods run on the event loop, unless they say otherwise."""

from typing import Protocol

from kvtransfer.session.session import KvFailed, KvSent, OfferAccepted
from proto.kv import Commit, Offer
from proto.messages import Message


class TransferOwner(Protocol):
    def send(self, peer_incarnation: int, message: Message, blob: bytes) -> None:
        """Send over the control link. Must not raise: where the link is gone, `peer_lost` follows."""

    def pair_failed(self, error: Exception) -> None:
        """The thread of a pair ended with this error. Its sessions have failed before."""
        return


class SenderOwner(TransferOwner, Protocol):
    def sent(self, result: KvSent | KvFailed) -> None:
        """The one result of each `open`. The blocks may be reused."""

    def pairs_changed(self) -> None:
        """`KvSender.transports` returns something else from now on."""
        return


class ReceiverOwner(TransferOwner, Protocol):
    """Block ids here are of our own size, whatever the sender's is.

    Every accepted offer ends in exactly one `committed` or `not_received`. An undecided offer that fails ends in `not_received`
    with no blocks, and a refused one in nothing.
    """

    def offered(self, peer_incarnation: int, offer: Offer) -> OfferAccepted | str | None:
        """Accept with target blocks, as many as offered, and how many of the first hold their KV already; or refuse with a
        reason; or return None and call `KvReceiver.decide` later."""

    def committed(self, peer_incarnation: int, commit: Commit, block_ids: list[int], prompt_tokens: list[int]) -> None:
        """The KV in these blocks is complete and verified."""

    def not_received(self, request_id: str, attempt: int, block_ids: list[int], reason: str) -> None:
        """Nothing writes to these blocks any more."""

    def in_doubt(self, request_id: str, attempt: int, block_ids: list[int]) -> None:
        """The transfer has failed, and it takes proof until nothing writes to these blocks; then `not_received` follows."""
        return

    def is_busy(self) -> bool:
        """Whether there is work that the limit of `KvSettings.bytes_per_s` protects."""
        return True

    def turned_away(self, reason: str) -> None:
        """A connection to the port of `tcp` was turned away. Runs in another thread."""
        return
