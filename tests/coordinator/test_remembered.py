"""Ended requests are remembered by time: what repeats them within it neither runs nor is charged again."""

from coordinator.accounting.billing import SLICES, Opened, Remembered
from coordinator.core import Core
from coordinator.events import Configured, Limits, PeerUp, Received, Send
from proto.codec import pack_tokens
from proto.errors import CancelReason
from proto.messages import Cancel, Interrupted, Role
from runtime.tenancy.tenants import open_tenants
from tests.coordinator.world import gateway_hello, submit, worker_hello


def test_repeated_submit_is_recognised() -> None:
    """A repeated submit is recognised, and not charged again, after thousands of other requests ended."""
    core = Core(Limits())
    core.handle(Configured(open_tenants(), 0.0), 0.0)
    core.handle(PeerUp(1, gateway_hello(1)), 0.0)
    core.handle(PeerUp(10, worker_hello(Role.PREFILL, 10)), 0.0)
    core.handle(PeerUp(20, worker_hello(Role.DECODE, 20, max_seqs=1)), 0.0)
    blob = pack_tokens(range(10))
    for number in range(4400):
        now = number / 5000
        core.handle(Received(1, submit(f"r{number}"), blob), now)
        core.handle(Received(1, Cancel(f"r{number}", 1, CancelReason.STOP_STRING)), now)
    for name in ("r1", "r4399"):
        again = core.handle(Received(1, submit(name), blob), 2.0)
        said = [action.message for action in again if isinstance(action, Send)]
        assert [type(message) for message in said] == [Interrupted]
        assert not any(isinstance(action, Opened) for action in again), "it would be charged again"
    assert core.accounts.billing.settled.get("r2") is not None


def test_entries_expire_within_one_slice() -> None:
    """Entries are kept for their time and at most one slice longer."""
    table: Remembered[int] = Remembered(16.0, 1000)
    for second in range(100):
        table.put(f"k{second}", second, float(second))
        for age in (0, 8, 16):
            assert second < age or table.get(f"k{second - age}") == second - age
        assert f"k{second - 18}" not in table
        assert len(table) <= 18
    assert table.dropped_early == 0


def test_repeated_put_renews_entry() -> None:
    """An entry put in again has its new value and counts its age from then on."""
    table: Remembered[str] = Remembered(16.0, 1000)
    table.put("a", "old", 0.0)
    table.put("a", "new", 10.0)
    table.put("b", "", 20.0)
    assert table.get("a") == "new" and "c" not in table
    table.put("c", "", 40.0)
    assert table.get("a") is None and table.get("b") is None and len(table) == 1


def test_overflow_drops_oldest_and_counts_them() -> None:
    """Entries over the bound push out the oldest ones, which are counted."""
    table: Remembered[int] = Remembered(1e9, 160)
    for number in range(1000):
        table.put(f"k{number}", number, 0.0)
        assert len(table) <= 160
    assert table.dropped_early == 1000 - len(table)
    assert all(table.get(f"k{number}") == number for number in range(1000 - 160 + 160 // SLICES, 1000))
