"""Both drivers over real gloo pairs, when the other end misbehaves, is missing, or asks for too much."""

import asyncio
import socket
import time
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
from torch import distributed

from kvtransfer.receiver import KvReceiver
from kvtransfer.session.session import KvFailed, KvSent
from proto.errors import RemoteProtocolError
from proto.kv import Abort, Accept, Ack, Announce, Commit, Decline, Offer, PairClosed, PairListen, PairOpen
from proto.messages import Ping
from tests.kvtransfer.ends import FIRST, LAYOUT, SMALL, Ends, with_ends
from tests.kvtransfer.owners import Receives


def test_unanswered_pair_open_fails():
    """A transfer fails at both ends if no answer to PairOpen comes within the rendezvous timeout."""

    async def test(ends: Ends) -> None:
        ends.transfer("r", [1])
        await ends.until(lambda: len(ends.results) == 1)
        assert "no answer to PairOpen" in ends.results[0].reason  # type: ignore[union-attr]
        await ends.until(lambda: len(ends.failed) == 1)

    quick = replace(SMALL, rendezvous_timeout_ms=200)
    with_ends(test, settings=quick, receiver_settings=SMALL, to_sender=lambda m: not isinstance(m, PairListen))


def test_closed_port_fails_at_once():
    """The receiver gave the pair up while the sender was about to meet it."""

    async def test(ends: Ends) -> None:
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            port = closed.getsockname()[1]
        ends.sender.open("r", 1, 2, 1)
        opened = next(frame for frame in ends.frames if isinstance(frame, PairOpen))
        ends.sender.handle(2, PairListen(opened.pair_id, "gloo", "127.0.0.1", port, "secret", ""), b"")
        await ends.until(lambda: len(ends.results) == 1)
        assert "Connection refused" in ends.results[0].reason, ends.results  # type: ignore[union-attr]

    with_ends(test, to_receiver=lambda message: False)


def test_unmet_listener_is_given_up():
    """A receiver fails the session and gives up the pair if no sender meets its listener in time."""

    async def test(ends: Ends) -> None:
        ends.receiver.handle(1, PairOpen(9, ("gloo",), LAYOUT.block_size, "here"), b"")
        ends.receiver.handle(1, Offer("r", 1, 9, 1), b"")
        await ends.until(lambda: len(ends.failed) == 1)
        assert ends.failed[0][:3] == ("r", 1, [0]) and ends.receiver.counters["pairs_lost"] == 1
        await ends.receiver.close()
        assert not [name for name in ends.receiver.counters if name.startswith("bytes")], "of a pair that never was"

    with_ends(test, settings=replace(SMALL, rendezvous_timeout_ms=200), to_sender=lambda message: False)


@pytest.mark.parametrize("announced", ["before the meeting fails", "after"])
def test_failed_meeting_costs_one_session(announced):
    """A sender may be killed between its end of the meeting and ours."""

    async def test(ends: Ends) -> None:
        faults: list[dict[str, object]] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: faults.append(context))
        receiver, announce = ends.receiver, Announce("r", 1, 9, 0, 0, 0, (1,))
        pair_broke, broken = receiver._pair_broke, []
        receiver._pair_broke = lambda route, reason: (pair_broke(route, reason), ends._note(broken, reason))  # type: ignore[assignment]
        receiver.handle(5, PairOpen(9, ("gloo",), LAYOUT.block_size, "here"), b"")
        await ends.until(lambda: bool(ends.strangers))
        meeting = ends.strangers[0]
        assert isinstance(meeting, PairListen)
        receiver.handle(5, Offer("r", 1, 9, 1), b"")
        if announced == "before the meeting fails":
            receiver.handle(5, announce, b"")
        store = distributed.TCPStore(meeting.host, meeting.port, is_master=False, timeout=timedelta(seconds=5))  # type: ignore[attr-defined]
        distributed.PrefixStore(meeting.secret, store).set("sender", "nobody")  # type: ignore[attr-defined]
        if announced == "after":
            await ends.until(lambda: bool(broken))
            receiver.handle(5, announce, b"")
        await ends.until(lambda: len(ends.failed) == 1)
        assert ends.failed[0][:3] == ("r", 1, [0]) and not receiver.receiving() and not faults
        del store

    with_ends(test)


def test_disallowed_transport_is_refused():
    """A transport that the receiver does not allow is refused by its name."""

    async def test(ends: Ends) -> None:
        ends.transfer("r", [1])
        await ends.until(lambda: len(ends.results) == 1)
        assert "no transport that both can use: shm: not allowed here" in ends.results[0].reason  # type: ignore[union-attr]

    with_ends(test, settings=replace(SMALL, transports=("shm",)), receiver_settings=SMALL)


def test_transfers_beyond_limits_are_refused():
    """Sessions and pairs beyond their limits are refused with a reason, and those within them go on."""

    async def test(ends: Ends) -> None:
        for number in range(4):
            ends.transfer(f"r{number}", [number])
        await ends.until(lambda: len(ends.results) == 4)
        assert [type(result) for result in ends.results[:2]] == [KvFailed, KvFailed]
        assert {result.reason for result in ends.results[:2]} == {"too many transfers at once"}  # type: ignore[union-attr]
        assert all(isinstance(result, KvSent) for result in ends.results[2:])
        ends.receiver.handle(5, PairOpen(1, ("gloo",), LAYOUT.block_size, "here"), b"")
        assert ends.strangers == [PairClosed(1, "too many pairs")]

    with_ends(test, settings=replace(SMALL, sessions_max=2, pairs_max=1))


def test_stray_frames_change_nothing():
    """Late, repeated, foreign and unknown frames: counted, answered where an answer helps, and nothing else changes."""

    async def test(ends: Ends) -> None:
        seen: list[object] = []
        ends.to_sender = lambda message: seen.append(message) is None
        ends.transfer("r", [1, 2, 3, 4])
        await ends.ended(1)
        kept = list(ends.frames)
        for message in kept:
            if not isinstance(message, Commit):
                ends.receiver.handle(1, message, b"")
                ends.receiver.handle(77, message, b"")  # another peer's incarnation
        await asyncio.sleep(0)
        assert len(ends.committed) == 1 and ends.failed == []
        seen.clear()
        commit = next(message for message in kept if isinstance(message, Commit))
        ends.receiver.handle(1, commit, b"")
        assert [type(message) for message in seen] == [Ack]
        ends.receiver.handle(1, Commit("unknown", 1, (), 0, commit.first_tokens), b"")
        assert isinstance(seen[-1], Abort)
        for message in (Accept("r", 1, 1), Ack("r", 1, 5), Abort("r", 1, "late"), Accept("unknown", 1, 1)):
            ends.sender.handle(2, message, b"")
        assert len(ends.results) == 1
        for end, incarnation in ((ends.sender, 2), (ends.receiver, 1)):
            with pytest.raises(RemoteProtocolError):
                end.handle(incarnation, Ping(), b"")

    with_ends(test)


def test_attempt_may_change_senders():
    """An attempt is declined from a second sender until the first sender has failed."""

    async def test(ends: Ends) -> None:
        first, second = Offer("r", 1, 1, 1), Offer("r", 1, 1, 2)
        for incarnation in (7, 8):
            ends.receiver.handle(incarnation, PairOpen(1, ("gloo",), LAYOUT.block_size, "here"), b"")
        ends.receiver.handle(7, first, b"")
        ends.receiver.handle(8, second, b"")
        assert ends.strangers[-1] == Decline("r", 1, "this attempt is another sender's")
        ends.receiver.peer_lost(7, "killed")
        ends.receiver.handle(8, second, b"")
        assert isinstance(ends.strangers[-1], Accept)
        ends.receiver.handle(7, Abort("r", 1, "late"), b"")
        assert [failure[2] for failure in ends.failed] == [[0]]

    with_ends(test)


@pytest.mark.parametrize(
    "frame",
    [
        Announce("r", 1, 1, 5, 0, 0, (1,)),  # announcements before it are missing
        Announce("r", 1, 1, 0, 0, 0, (1_000,)),  # more than the receiver has room for
    ],
)
def test_protocol_violation_costs_pair_only(frame):
    """A frame that breaks the protocol fails its session, and the next transfer arrives."""

    async def test(ends: Ends) -> None:
        ends.sender.open("r", 1, 2, 4)
        ends.loop.call_soon(ends.receiver.handle, 1, frame, b"")
        await ends.ended(1)
        assert "broke the protocol" in ends.failed[0][3] and ends.receiver.counters["violations"] == 1
        ends.transfer("next", [1, 2, 3])
        await ends.ended(2)
        assert isinstance(ends.results[1], KvSent)

    with_ends(test)


def test_close_ends_everything_once():
    """Closing the ends fails an open session once, and a session opened later fails with the same reason."""

    async def test(ends: Ends) -> None:
        ends.sender.open("r", 1, 2, 4)
        ends.sender.blocks_ready("r", 1, 0, [1, 2])
        await ends.close()
        assert ends.results == [KvFailed("r", 1, "shutting down")]
        ends.sender.open("late", 1, 2, 1)
        assert len(ends.results) == 1, "a result from inside open"
        await ends.until(lambda: len(ends.results) == 2)
        assert ends.results[1] == KvFailed("late", 1, "shutting down")

    with_ends(test)


def test_bad_pools_and_hosts_are_refused():
    """A pool that differs from the layout and a listen host that is not one address are refused."""

    async def main() -> None:
        def make(pool: torch.Tensor, host: str = "127.0.0.1") -> KvReceiver:
            return KvReceiver(
                layout=LAYOUT,
                pool=pool,
                incarnation=1,
                clock=lambda: 0.0,
                listen_host=host,
                owner=Receives(lambda *frame: None, lambda *offer: None),
                settings=SMALL,
            )

        good = torch.zeros(LAYOUT.shape(3))
        make(good)
        for bad in (good.half(), good[:, :1], torch.zeros(LAYOUT.shape(6))[::2], good.transpose(2, 3)):
            with pytest.raises(ValueError, match="the layout says"):
                make(bad)
        for host in ("0.0.0.0", "", "::"):
            with pytest.raises(ValueError, match="one address"):
                make(good, host)

    asyncio.run(main())


def test_ended_sessions_are_forgotten_in_time():
    """Late frames find it, and a worker does not grow with the number of its requests."""

    async def test(ends: Ends) -> None:
        await asyncio.sleep(0)
        late_s = [0.0]
        for end in (ends.sender, ends.receiver):
            end._clock = lambda: time.monotonic() + late_s[0]
        for number in range(3):
            ends.transfer(f"r{number}", [1, 2])
            await ends.ended(number + 1)
            ends.receiver.handle(1, Commit(f"r{number}", 1, (), 1, FIRST), b"")
            assert len(ends.receiver._ended) == len(ends.sender._ended) == number + 1
        assert not ends.receiver.counters["stale_frames"]
        late_s[0] = ends.settings.remembered_ms / 1e3
        ends.transfer("new", [1, 2])
        await ends.ended(4)
        assert {key[0] for end in (ends.sender, ends.receiver) for key in end._ended} == {"new"}
        ends.receiver.handle(1, Commit("r0", 1, (), 1, FIRST), b"")
        assert ends.receiver.counters["stale_frames"] == 1

    with_ends(test)


def test_pair_failure_follows_its_sessions(monkeypatch):
    """A worker looks at it: some errors end its use of the GPU."""

    def breaks(*_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    async def test(ends: Ends) -> None:
        told: list[tuple[str, int]] = []
        ends.receiver._pair_failed = lambda error: told.append((str(error), len(ends.failed)))
        monkeypatch.setattr("tests.kvtransfer.gloo._Receiving.work", breaks)
        ends.transfer("r", [1, 2])
        await ends.until(lambda: bool(ends.failed))
        assert told == [("CUDA error: an illegal memory access was encountered", 1)]

    # With a segment under way its session ends only when the thread has answered, which may be later.
    with_ends(test, to_receiver=lambda message: not isinstance(message, Announce))
