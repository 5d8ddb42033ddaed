"""Plays KV hand-overs: each takes the time that `Timing` says, and fails only if one of its ends aborts it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvtransfer.session.session import KvFailed, KvSent, OfferAccepted
from lab.cluster.surroundings import ClusterSurroundings
from proto.kv import Commit, FirstToken, Offer

Key = tuple[str, int]


class ClusterReceiver(Protocol):
    """The receiving end: a decode worker with the methods of `DecodeCore`, or a prefill worker that fetches."""

    def offered(self, incarnation: int, offer: Offer) -> OfferAccepted | str | None: ...

    def committed(self, incarnation: int, commit: Commit, blocks: list[int], prompt_tokens: list[int]) -> None: ...

    def not_received(self, request_id: str, attempt: int, blocks: list[int]) -> None: ...


@dataclass(eq=False)
class _Transfer:
    key: Key
    sender_incarnation: int
    on_result: Callable[[KvSent | KvFailed], None]
    receiver: ClusterReceiver
    answer: OfferAccepted | str | None = None


class Transfers:
    """All open transfers in one direction, and their receivers' end; as `decode_worker.core.DecodeKvIn`."""

    def __init__(self, cluster: ClusterSurroundings) -> None:
        self.cluster = cluster
        self.receivers: dict[int, ClusterReceiver] = {}
        self._open: dict[Key, _Transfer] = {}

    def decide(self, request_id: str, attempt: int, answer: OfferAccepted | str) -> None:
        self._answered(self._open[(request_id, attempt)], answer)

    def abort(self, request_id: str, attempt: int, reason: str) -> None:
        transfer = self._open.pop((request_id, attempt), None)
        if transfer is not None:
            blocks = list(transfer.answer.block_ids) if isinstance(transfer.answer, OfferAccepted) else []
            self.cluster.at(self.cluster.now, self._over, transfer, reason, blocks)

    def open(
        self,
        key: Key,
        sender_incarnation: int,
        receiver_incarnation: int,
        blocks: int,
        on_result: Callable[[KvSent | KvFailed], None],
    ) -> None:
        receiver = self.receivers.get(receiver_incarnation)
        if receiver is None:
            self.cluster.at(self.cluster.now, on_result, KvFailed(*key, "the receiver was lost"))
            return
        transfer = self._open[key] = _Transfer(key, sender_incarnation, on_result, receiver)
        self._answered(transfer, receiver.offered(sender_incarnation, Offer(*key, 0, blocks)))

    def commit(self, commit: Commit, prompt_tokens: Sequence[int]) -> None:
        cluster, transfer = self.cluster, self._open.get((commit.request_id, commit.attempt))
        if transfer is not None:
            took_s = cluster.random.uniform(*cluster.timing.hand_over_s)
            cluster.at(cluster.now + took_s, self._arrived, transfer, commit, list(prompt_tokens), took_s)

    def lose(self, incarnation: int) -> None:
        """Loses a worker: the other ends of its transfers notice it."""
        lost = self.receivers.pop(incarnation, None)
        for transfer in list(self._open.values()):
            if transfer.receiver is lost:
                del self._open[transfer.key]
                result = KvFailed(*transfer.key, "the receiver was lost")
                self.cluster.at(self.cluster.now, transfer.on_result, result)
            elif transfer.sender_incarnation == incarnation:
                del self._open[transfer.key]
                blocks = list(transfer.answer.block_ids) if isinstance(transfer.answer, OfferAccepted) else []
                self.cluster.at(self.cluster.now, transfer.receiver.not_received, *transfer.key, blocks)

    def _answered(self, transfer: _Transfer, answer: OfferAccepted | str | None) -> None:
        transfer.answer = answer
        if isinstance(answer, str):
            del self._open[transfer.key]
            self.cluster.at(self.cluster.now, transfer.on_result, KvFailed(*transfer.key, answer))

    def _arrived(self, transfer: _Transfer, commit: Commit, prompt_tokens: list[int], took_s: float) -> None:
        if self._open.get(transfer.key) is not transfer:
            return
        assert isinstance(transfer.answer, OfferAccepted), "orders to both workers of a request come together"
        del self._open[transfer.key]
        blocks = list(transfer.answer.block_ids)
        transfer.receiver.committed(transfer.sender_incarnation, commit, blocks, prompt_tokens)
        transfer.on_result(KvSent(*transfer.key, 0, 1000 * took_s))

    def _over(self, transfer: _Transfer, reason: str, blocks: list[int]) -> None:
        transfer.receiver.not_received(*transfer.key, blocks)
        transfer.on_result(KvFailed(*transfer.key, reason))


class ClusterKvSender:
    """A sender's end; as `kvtransfer.ports.KvOut`."""

    def __init__(
        self, transfers: Transfers, sender_incarnation: int, on_result: Callable[[KvSent | KvFailed], None]
    ) -> None:
        self._transfers, self._incarnation, self._on_result = transfers, sender_incarnation, on_result
        self.abort = transfers.abort

    def open(self, request_id: str, attempt: int, peer_incarnation: int, blocks: int, block_size: int) -> None:
        self._transfers.open((request_id, attempt), self._incarnation, peer_incarnation, blocks, self._on_result)

    def blocks_ready(self, request_id: str, attempt: int, first_block: int, block_ids: Sequence[int]) -> None:
        """Does nothing: the way of single blocks is not modelled."""

    def commit(
        self, request_id: str, attempt: int, first_tokens: Sequence[FirstToken], prompt_tokens: Sequence[int]
    ) -> None:
        commit = Commit(request_id, attempt, (), len(prompt_tokens), tuple(first_tokens))
        self._transfers.commit(commit, prompt_tokens)
