"""The calls between a worker and its KV drivers. All methods run on the event loop, unless they say otherwise."""

from collections.abc import Sequence
from typing import Protocol

from kvtransfer.session.session import KvFailed, KvSent, OfferAccepted
from proto.kv import Commit, FirstToken, Offer
from proto.messages import Message


class TransferOwner(Protocol):
    def send(self, peer_incarnation: int, message: Message, blob: bytes) -> None:
        """Send over the control link. Must not raise. If the link is gone, the owner calls `peer_lost` later."""

    def pair_failed(self, error: Exception) -> None:
        """Called when the thread of a pair has ended with this error. The pair's sessions have already failed."""
        return


class SenderOwner(TransferOwner, Protocol):
    def sent(self, result: KvSent | KvFailed) -> None:
        """Called once for each `open`, with its result. From then on the blocks may be reused."""

    def pairs_changed(self) -> None:
        """Called when the result of `KvSender.transports` has changed."""
        return


class ReceiverOwner(TransferOwner, Protocol):
    """Block ids here refer to blocks of our own size, even if the sender's blocks have another size.

    Every accepted offer ends in exactly one `committed` or `not_received`. An undecided offer that fails ends in
    `not_received` with no blocks. A refused offer causes no further call.
    """

    def offered(self, peer_incarnation: int, offer: Offer) -> OfferAccepted | str | None:
        """Accept the offer, refuse it with a reason, or return None and call `KvReceiver.decide` later. An accepted offer
        names as many target blocks as were offered, and how many of the first already hold their KV."""

    def committed(self, peer_incarnation: int, commit: Commit, block_ids: list[int], prompt_tokens: list[int]) -> None:
        """Called when the KV in these blocks is complete and verified."""

    def not_received(self, request_id: str, attempt: int, block_ids: list[int], reason: str) -> None:
        """Called when the transfer has failed and nothing writes to these blocks any more."""

    def in_doubt(self, request_id: str, attempt: int, block_ids: list[int]) -> None:
        """Called when the transfer has failed but the peer may still write to these blocks. `not_received` follows once it is
        proven that nothing writes to them."""
        return

    def is_busy(self) -> bool:
        """Returns whether this worker has work that `KvSettings.bytes_per_s` protects."""
        return True

    def turned_away(self, reason: str) -> None:
        """Called when a connection to the port of `tcp` was rejected. Runs in another thread."""
        return


class KvOut(Protocol):
    """`kvtransfer.sender.KvSender` is the real one."""

    def open(self, request_id: str, attempt: int, peer_incarnation: int, blocks: int, block_size: int) -> None: ...

    def blocks_ready(self, request_id: str, attempt: int, first_block: int, block_ids: Sequence[int]) -> None: ...

    def commit(
        self, request_id: str, attempt: int, first_tokens: Sequence[FirstToken], prompt_tokens: Sequence[int]
    ) -> None: ...

    def abort(self, request_id: str, attempt: int, reason: str) -> None: ...
