"""Lists which writers may write to each KV block of a decode worker, and until when. Pure and stateless: it reads the attempts
and sessions.

    attempt        its block table, while a step may write there      (`requests`, `batch`)
    transfer       target blocks, while segments may land there       (the receiver's session: RECEIVING, CHECKING, DRAINING)
    quarantine     blocks of a failed transfer that its sender may still write to, until its thread has proof to the contrary

A lease has no clock of its own. It ends with the attempt or the session, and those end with their peer: a link without
heartbeats is given up (`runtime.link.server`), which loses the pair (`KvReceiver.peer_lost`), which fails its sessions.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from decode_worker.requests import AttemptTable
from kvtransfer.session.receiver import DRAINING
from kvtransfer.session.session import Receiving

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Lease:
    request_id: str
    attempt: int
    peer_incarnation: int  # the prefill worker that may write; 0: only a step of this worker
    state: str
    blocks: tuple[int, ...]


def leases(table: AttemptTable[S], receiving: Iterable[Receiving]) -> list[Lease]:
    """One for each sequence and each transfer session; a block shared by several is in several."""
    found = [Lease(one.request_id, one.attempt, one.peer_incarnation, one.state, one.block_ids) for one in receiving]
    for attempt in table.attempts.values():
        found += [Lease(*attempt.key, 0, attempt.phase, tuple(one.blocks.table)) for one in attempt.sequences]
    return found


def check_invariants(table: AttemptTable[S], receiving: Iterable[Receiving]) -> None:
    """Asserts that free + leased + cached + quarantined is all there is, that every reference has its lease and every lease its
    reference, and that what is in quarantine belongs to a session that waits for proof."""
    table.allocator.check_invariants()
    receiving = list(receiving)
    doubtful = {block for blocks in table.quarantined.values() for block in blocks}
    assert len(doubtful) == sum(map(len, table.quarantined.values())) == table.allocator.quarantined_count
    draining = {(one.request_id, one.attempt): set(one.block_ids) for one in receiving if one.state == DRAINING}
    for key, blocks in table.quarantined.items():
        assert set(blocks) <= draining.get(key, set()), f"{key} is in quarantine and no session of it waits for proof"
    held = Counter(block for lease in leases(table, receiving) for block in lease.blocks if block not in doubtful)
    for block in range(table.allocator.total):
        assert table.allocator.refs(block) == held[block], f"block {block}: references and leases differ"
