"""What becomes of a decode worker's reservations while their coordinator is away."""

import msgspec

from decode_worker.batch import RunningBatch
from decode_worker.core import DecodeCore
from decode_worker.requests import AttemptTable, Phase
from engine.kv.allocator import BlockAllocator
from kvtransfer.session.session import OfferAccepted
from proto.kv import Commit, FirstToken, Offer
from proto.messages import Destination, Message, Release, Released, WorkFailed
from tests.workers.test_batch import BLOCK, reserve
from worker.ports import TakeChanges

PREFILL_INCARNATION = 9
LOST_AT = 100.0


class Ports:
    """All three of a core's, and what it told them."""

    up = True

    def __init__(self) -> None:
        self.registration = self.gateways = self.receiver = self
        self.said: list[Message] = []
        self.decided: list[tuple[str, OfferAccepted | str]] = []

    def send(self, *message: Message | Destination) -> None:
        self.said += [part for part in message if isinstance(part, Message)]

    def report_cache(self, take_changes: TakeChanges) -> None: ...

    def connect(self, to: Destination) -> None: ...

    def decide(self, request_id: str, attempt: int, answer: OfferAccepted | str) -> None:
        self.decided.append((request_id, answer))

    def abort(self, request_id: str, attempt: int, reason: str) -> None: ...


def make_core() -> tuple[DecodeCore[str], Ports]:
    ports, batch = Ports(), RunningBatch[str]()
    table = AttemptTable(BlockAllocator(8), BLOCK, batch)
    return DecodeCore(ports, table, vocab_size=64, make_state=lambda order, first, prompt: "state"), ports  # type: ignore[arg-type]


def offer(core: DecodeCore[str], name: str, blocks: int = 2) -> OfferAccepted | str | None:
    return core.offered(PREFILL_INCARNATION, Offer(name, 1, 1, blocks))


def test_kv_is_taken_without_coordinator() -> None:
    """The first token is out: whoever reads the stream is not to notice."""
    core, _ = make_core()
    core.order(reserve("a", 2 * BLOCK))
    core.coordinator_lost(LOST_AT)
    assert [held.request_id for held in core.table.held()] == ["a"], "the next coordinator counts it"
    answer = offer(core, "a")
    assert isinstance(answer, OfferAccepted)
    core.expire(LOST_AT)
    core.committed(PREFILL_INCARNATION, Commit("a", 1, (), 0, (FirstToken(0, 5),)), list(answer.block_ids), [])
    assert core.table.attempts["a", 1].phase is Phase.RUNNING


def test_unused_reservation_expires() -> None:
    """Of its stream nobody may be left to tell."""
    core, ports = make_core()
    core.order(reserve("a", 2 * BLOCK))
    core.coordinator_lost(LOST_AT)
    core.order(reserve("b", 2 * BLOCK))  # of the coordinator that came next
    core.coordinator_lost(LOST_AT + 5)
    core.order(reserve("c", 2 * BLOCK))
    core.expire(LOST_AT)
    assert ports.said == [Released("a", 1)]
    core.expire(LOST_AT + 5)
    assert ports.said == [Released("a", 1), Released("b", 1)]
    assert [key for key, _ in core.table.attempts] == ["c"]


def test_next_coordinator_may_end_reservation() -> None:
    """A new coordinator can release a reservation that its predecessor made."""
    core, ports = make_core()
    core.order(reserve("a", 2 * BLOCK))
    core.coordinator_lost(LOST_AT)
    core.order(Release("a", 1))
    core.expire(LOST_AT)
    assert ports.said == [Released("a", 1)] and not core.table.attempts


def test_commit_past_last_token_fails() -> None:
    """A prefill worker ends such an attempt itself."""
    core, ports = make_core()
    order = reserve("a", 2 * BLOCK)
    core.order(msgspec.structs.replace(order, resumed_tokens=order.sampling.max_tokens))
    answer = offer(core, "a")
    assert isinstance(answer, OfferAccepted)
    core.committed(PREFILL_INCARNATION, Commit("a", 1, (), 0, (FirstToken(0, 5),)), list(answer.block_ids), [])
    assert isinstance(ports.said[-1], WorkFailed) and not core.table.attempts and not core.batch.running
