"""Checks that the scheduler's sums and orders are what a count from scratch gives."""

from collections.abc import Mapping
from itertools import chain

from scheduler.fairness.held_shares import HeldNode, HeldShares, HeldStream, Key
from scheduler.kv_admission.admission import _END, _TOTAL, KvAdmission
from scheduler.kv_admission.sessions import Session, Sessions
from scheduler.kv_admission.shared_blocks import SharedBlocks


def check_room(room: KvAdmission) -> None:
    """Asserts that the rows are sorted, and that their totals are right."""
    room._settle()
    assert all(entry.covered == covered(room._shared, key) for key, entry in room._entries.items())
    assert room.wholes == sum(entry.whole for entry in room._entries.values()) >= room.peak
    assert room._ends == sorted(room._ends) == room._table[_END, : len(room._ends)].tolist()
    assert sorted(room._ids) == sorted(entry.row.row_id for entry in room._entries.values())
    for at, end in enumerate(room._ends):
        live = [entry.row for entry in room._entries.values() if entry.row.end >= end]
        total = sum(row.at(end, room.block_size) for row in live)
        assert int(room._table[_TOTAL, at]) == total, (at, end, total)


def check_sessions(sessions: Sessions, running: Mapping[Session, int]) -> None:
    """Asserts that sums are right, and that nothing that is over can be found. `running`: turns by session."""
    kept = [one for leases in sessions._leases_of.values() for one in leases]
    assert sessions.leases == len(kept) and sessions.leased_tokens == sum(one.tokens for one in kept)
    assert all(one.leased and one in sessions._idle for one in kept)
    assert all(one.running == count for one, count in running.items()), "a turn has ended twice, or not at all"
    assert not any(one in running or one.running for one in sessions._idle)
    found = {*chain.from_iterable(sessions._by_name.values()), *sessions._by_end.values()}
    assert sessions.tokens == sum(one.tokens for one in sessions._organisations.values())
    assert all(one.tokens == sum(one.users.values()) for one in sessions._organisations.values())
    assert all(one in sessions._idle or one in running for one in found), "a session that is over can be found"


def held_streams(shares: HeldShares) -> dict[tuple[int, Key], HeldStream]:
    """Returns all streams, after a check of the sums and orders above them."""
    nodes, found = [shares.root], dict[tuple[int, Key], HeldStream]()
    for node in nodes:
        nodes += node.children.values()
        found |= node.streams
        below: list[HeldNode | HeldStream] = [*node.children.values(), *node.streams.values()]
        assert node.held == sum(one.held for one in below)
        assert node.estimated == sum(one.estimated for one in below)
        assert node.order == sorted((child.share, name) for name, child in node.children.items())
    return found


def covered(shared: SharedBlocks, key: Key) -> int:
    """The blocks of an attempt that are counted with others."""
    chains = [(shared._chains[number], blocks) for number, blocks in shared._parts.get(key, {}).items()]
    return sum(blocks - chain.counting.get(key, 0) for chain, blocks in chains)


def all_covered(room: KvAdmission) -> int:
    """Blocks that are not counted because another attempt that holds them, too, counts them."""
    room._settle()
    return sum(entry.covered for entry in room._entries.values())
