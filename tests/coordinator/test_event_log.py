"""The ledger's file: written in the background, kept through restarts, bounded, and never in the way of serving."""

import asyncio
import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from coordinator.core import Core
from coordinator.event_log import recorder as journals
from coordinator.event_log.recorder import EventLog, RecordedCore
from coordinator.event_log.replay import Replay
from coordinator.events import PeerDown, PeerUp, Received
from proto.codec import pack_tokens
from proto.messages import StatusRequest
from tests.coordinator.world import gateway_hello, submit


def in_loop(body: Callable[[], object]) -> None:
    async def run() -> None:
        body()

    asyncio.run(run())


def record(path: Path, events: int = 50, *, bytes_max: int = 1 << 20, reason: str = "stopped") -> RecordedCore:
    event_log = EventLog(str(path), bytes_max)
    core = RecordedCore(Core(), event_log, "coordinator-1")
    core.open()
    core.handle(PeerUp(1, gateway_hello(1)), 1.0)
    for number in range(events):
        core.handle(Received(1, submit(f"r{number}"), pack_tokens([7] * 10)), 2.0 + number)
    event_log.close(reason)
    return core


def read(path: Path) -> Replay:
    with path.open("rb") as file:
        replay = Replay(file)
        assert replay.run() is None
    return replay


def test_what_is_written_replays_and_says_who_wrote_it(tmp_path: Path) -> None:
    path = tmp_path / "event_log"
    in_loop(lambda: record(path))
    replay = read(path)
    assert (replay.events, replay.ended, replay.bytes_read) == (51, "stopped", path.stat().st_size)
    assert replay.header.process == "coordinator-1" and "Python" in replay.header.platform
    assert path.stat().st_mode & 0o777 == 0o600
    assert pack_tokens([7] * 10) not in path.read_bytes()


def test_it_reaches_the_disk_without_being_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journals, "FLUSH_S", 0.001)
    path = tmp_path / "event_log"

    async def run() -> None:
        event_log = EventLog(str(path), 1 << 20)
        core = RecordedCore(Core(), event_log)
        core.open()
        for number in range(3):
            core.handle(PeerDown(number, "x" * 100), 1.0 + number)
            before = path.stat().st_size
            while path.stat().st_size == before:
                await asyncio.wait({asyncio.ensure_future(asyncio.to_thread(os.sync))}, timeout=0.01)
        assert read(path).events == 3
        event_log.close("stopped")

    asyncio.run(asyncio.wait_for(run(), 100))
    assert read(path).ended == "stopped"


def test_large_buffers_are_written_in_order_while_more_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journals, "FLUSH_BYTES", 100)
    path = tmp_path / "event_log"

    async def run() -> None:
        event_log = EventLog(str(path), 10 << 20)
        core = RecordedCore(Core(), event_log)
        core.open()
        for number in range(500):
            core.handle(PeerDown(number, "x" * (number % 90)), 1.0 + number)
            if number % 50 == 0:
                await asyncio.wait({asyncio.ensure_future(asyncio.to_thread(int))})
        event_log.close("stopped")

    asyncio.run(run())
    assert read(path).events == 500


def test_it_stops_at_its_size_with_a_last_word_and_serving_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "event_log"
    cores: list[RecordedCore] = []
    in_loop(lambda: cores.append(record(path, 200, bytes_max=8 << 10)))
    assert path.stat().st_size <= 8 << 10
    replay = read(path)
    assert replay.ended.startswith("the event log has reached") and 10 < replay.events < 200
    assert cores[0].handle(Received(1, StatusRequest()), 1000.0)


def test_journals_of_earlier_processes_are_kept_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "event_log"
    for count in range(1, 7):
        in_loop(lambda count=count: record(path, count))  # type: ignore[misc]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["event_log", "event_log.1", "event_log.2", "event_log.3"]
    kept = [path, *(tmp_path / f"event_log.{number}" for number in (1, 2, 3))]
    assert [read(p).events for p in kept] == [7, 6, 5, 4]


def test_another_file_is_never_written_over(tmp_path: Path) -> None:
    path = tmp_path / "thesis.txt"
    path.write_text("precious")
    with pytest.raises(FileExistsError, match="not an event log"):
        in_loop(lambda: record(path))
    assert path.read_text() == "precious"


def test_a_journal_that_is_being_written_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "event_log"

    def two() -> None:
        event_log = EventLog(str(path), 1 << 20)
        RecordedCore(Core(), event_log).open()
        with pytest.raises(FileExistsError, match="another coordinator"):
            record(path)
        event_log.close("stopped")

    in_loop(two)
    assert [p.name for p in tmp_path.iterdir()] == ["event_log"]


def test_two_that_start_at_once_on_a_new_path_write_one_file_each_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one has looked at the path before the first one was there."""
    path = tmp_path / "event_log"

    def two() -> None:
        first, second = EventLog(str(path), 1 << 20), EventLog(str(path), 1 << 20)
        keep_earlier = journals._keep_earlier

        def look_then_be_overtaken(each: Path) -> None:
            keep_earlier(each)
            monkeypatch.setattr(journals, "_keep_earlier", keep_earlier)
            RecordedCore(Core(), first, "first").open()

        monkeypatch.setattr(journals, "_keep_earlier", look_then_be_overtaken)
        with pytest.raises(FileExistsError, match="being written by another coordinator"):
            RecordedCore(Core(), second, "second").open()
        assert not second.recording
        first.close("stopped")

    in_loop(two)
    assert read(path).header.process == "first"


def test_a_file_that_was_moved_away_is_not_written_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one has opened the path, then a short recording of the first one ends there and is kept by a third one."""
    path = tmp_path / "event_log"

    def two() -> None:
        opens = os.open

        def opened(name: Path, *options: int) -> int:
            descriptor = opens(name, *options)
            monkeypatch.setattr(os, "open", opens)
            record(path, 3)
            record(path, 5)
            return descriptor

        monkeypatch.setattr(os, "open", opened)
        with pytest.raises(FileExistsError, match="another coordinator"):
            record(path)

    in_loop(two)
    assert read(tmp_path / "event_log.1").events == 4


def test_without_locks_nothing_is_recorded_and_serving_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    path = tmp_path / "event_log"
    in_loop(lambda: record(path))
    assert path.stat().st_size == 0


@pytest.mark.parametrize("path", ["no/such/folder/journal", "."])
def test_a_path_that_cannot_be_meant_is_an_error(path: str, tmp_path: Path) -> None:
    with pytest.raises(OSError):
        in_loop(lambda: record(tmp_path / path))


def test_a_full_disk_at_the_start_ends_only_the_recording(capsys: pytest.CaptureFixture[str]) -> None:
    in_loop(lambda: record(Path("/dev/full")))


def test_a_full_disk_later_ends_only_the_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journals, "FLUSH_BYTES", 100)
    path = tmp_path / "event_log"
    writes = 0

    def write(fd: int, data: bytes) -> int:
        nonlocal writes
        writes += 1
        if writes > 1:
            raise OSError(28, "No space left on device")
        return real(fd, data)

    real = os.write
    monkeypatch.setattr("coordinator.event_log.recorder.os.write", write)

    async def run() -> None:
        event_log = EventLog(str(path), 1 << 20)
        core = RecordedCore(Core(), event_log)
        core.open()
        number = 0
        while event_log.recording:
            number += 1
            core.handle(PeerDown(number, "x" * 100), 1.0)
            await asyncio.wait({asyncio.ensure_future(asyncio.to_thread(int))})
        before = writes
        core.handle(PeerUp(1, gateway_hello(1)), 2.0)
        event_log.close("stopped")
        assert writes == before

    asyncio.run(asyncio.wait_for(run(), 100))


def test_a_failing_core_leaves_its_last_event_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "event_log"

    def broken(*_: object) -> None:
        raise AssertionError("planted")

    monkeypatch.setattr("coordinator.core.members.down", broken)

    async def run() -> None:
        core = RecordedCore(Core(), EventLog(str(path), 1 << 20))
        core.open()
        with pytest.raises(AssertionError, match="planted"):
            core.handle(PeerDown(1, "x"), 1.0)

    asyncio.run(run())
    replay = read(path)
    assert replay.failed == "AssertionError('planted')" and replay.ended == "the core failed"
