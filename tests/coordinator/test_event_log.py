"""The ledger's file: written in the background, kept through restarts, bounded, and never in the way of serving."""

import asyncio
import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from coordinator.core import Core
from coordinator.event_log import recorder
from coordinator.event_log.recorder import EventRecorder
from coordinator.event_log.replay import Replay
from coordinator.events import PeerDown, PeerUp, Received
from proto.codec import pack_tokens
from proto.messages import StatusRequest
from tests.coordinator.world import gateway_hello, submit


def in_loop(body: Callable[[], object]) -> None:
    async def run() -> None:
        body()

    asyncio.run(run())


def record(path: Path, events: int = 50, *, bytes_max: int = 1 << 20, reason: str = "stopped") -> EventRecorder:
    core = EventRecorder(Core(), str(path), bytes_max, "coordinator-1")
    core.open()
    core.handle(PeerUp(1, gateway_hello(1)), 1.0)
    for number in range(events):
        core.handle(Received(1, submit(f"r{number}"), pack_tokens([7] * 10)), 2.0 + number)
    core.close(reason)
    return core


def read(path: Path) -> Replay:
    with path.open("rb") as file:
        replay = Replay(file)
        assert replay.run() is None
    return replay


def test_event_log_replays(tmp_path: Path) -> None:
    """A written log replays all events, names its writer and holds no prompt tokens."""
    path = tmp_path / "event_log"
    in_loop(lambda: record(path))
    replay = read(path)
    assert (replay.events, replay.ended, replay.bytes_read) == (51, "stopped", path.stat().st_size)
    assert replay.header.process == "coordinator-1" and "Python" in replay.header.platform
    assert path.stat().st_mode & 0o777 == 0o600
    assert pack_tokens([7] * 10) not in path.read_bytes()


def test_events_reach_disk_before_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Events reach the disk without the log being closed."""
    monkeypatch.setattr(recorder, "FLUSH_S", 0.001)
    path = tmp_path / "event_log"

    async def run() -> None:
        core = EventRecorder(Core(), str(path), 1 << 20)
        core.open()
        for number in range(3):
            core.handle(PeerDown(number, "x" * 100), 1.0 + number)
            before = path.stat().st_size
            while path.stat().st_size == before:
                await asyncio.wait({asyncio.ensure_future(asyncio.to_thread(os.sync))}, timeout=0.01)
        assert read(path).events == 3
        core.close("stopped")

    asyncio.run(asyncio.wait_for(run(), 100))
    assert read(path).ended == "stopped"


def test_large_buffers_keep_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large buffers are written in order while more events come."""
    monkeypatch.setattr(recorder, "FLUSH_BYTES", 100)
    path = tmp_path / "event_log"

    async def run() -> None:
        core = EventRecorder(Core(), str(path), 10 << 20)
        core.open()
        for number in range(500):
            core.handle(PeerDown(number, "x" * (number % 90)), 1.0 + number)
            if number % 50 == 0:
                await asyncio.wait({asyncio.ensure_future(asyncio.to_thread(int))})
        core.close("stopped")

    asyncio.run(run())
    assert read(path).events == 500


def test_log_stops_at_its_size(tmp_path: Path) -> None:
    """The log stops at its size limit with a last word, and serving goes on."""
    path = tmp_path / "event_log"
    cores: list[EventRecorder] = []
    in_loop(lambda: cores.append(record(path, 200, bytes_max=8 << 10)))
    assert path.stat().st_size <= 8 << 10
    replay = read(path)
    assert replay.ended.startswith("the event log has reached") and 10 < replay.events < 200
    assert cores[0].handle(Received(1, StatusRequest()), 1000.0)


def test_earlier_logs_are_kept(tmp_path: Path) -> None:
    """Logs of three earlier processes are kept beside the new one."""
    path = tmp_path / "event_log"
    for count in range(1, 7):
        in_loop(lambda count=count: record(path, count))  # type: ignore[misc]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["event_log", "event_log.1", "event_log.2", "event_log.3"]
    kept = [path, *(tmp_path / f"event_log.{number}" for number in (1, 2, 3))]
    assert [read(p).events for p in kept] == [7, 6, 5, 4]


def test_foreign_file_is_not_overwritten(tmp_path: Path) -> None:
    """A file that is no event log is never written over."""
    path = tmp_path / "thesis.txt"
    path.write_text("precious")
    with pytest.raises(FileExistsError, match="not an event log"):
        in_loop(lambda: record(path))
    assert path.read_text() == "precious"


def test_log_in_use_is_left_alone(tmp_path: Path) -> None:
    """A log that another coordinator is writing is left alone."""
    path = tmp_path / "event_log"

    def two() -> None:
        core = EventRecorder(Core(), str(path), 1 << 20)
        core.open()
        with pytest.raises(FileExistsError, match="another coordinator"):
            record(path)
        core.close("stopped")

    in_loop(two)
    assert [p.name for p in tmp_path.iterdir()] == ["event_log"]


def test_concurrent_starts_share_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one has looked at the path before the first one was there."""
    path = tmp_path / "event_log"

    def two() -> None:
        first, second = (EventRecorder(Core(), str(path), 1 << 20, name) for name in ("first", "second"))
        keep_earlier = recorder._keep_earlier

        def look_then_be_overtaken(each: Path) -> None:
            keep_earlier(each)
            monkeypatch.setattr(recorder, "_keep_earlier", keep_earlier)
            first.open()

        monkeypatch.setattr(recorder, "_keep_earlier", look_then_be_overtaken)
        with pytest.raises(FileExistsError, match="being written by another coordinator"):
            second.open()
        assert not second.recording
        first.close("stopped")

    in_loop(two)
    assert read(path).header.process == "first"


def test_moved_file_is_not_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_missing_locks_stop_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is recorded where file locks are missing, and serving goes on."""

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    path = tmp_path / "event_log"
    in_loop(lambda: record(path))
    assert path.stat().st_size == 0


@pytest.mark.parametrize("path", ["no/such/folder/log", "."])
def test_impossible_path_is_an_error(path: str, tmp_path: Path) -> None:
    """A path in a missing folder, or of a folder, is an error."""
    with pytest.raises(OSError):
        in_loop(lambda: record(tmp_path / path))


def test_full_disk_at_start_ends_recording(capsys: pytest.CaptureFixture[str]) -> None:
    """A disk that is full at the start ends only the recording."""
    in_loop(lambda: record(Path("/dev/full")))


def test_full_disk_later_ends_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fills up later ends only the recording."""
    monkeypatch.setattr(recorder, "FLUSH_BYTES", 100)
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
        core = EventRecorder(Core(), str(path), 1 << 20)
        core.open()
        number = 0
        while core.recording:
            number += 1
            core.handle(PeerDown(number, "x" * 100), 1.0)
            await asyncio.wait({asyncio.ensure_future(asyncio.to_thread(int))})
        before = writes
        core.handle(PeerUp(1, gateway_hello(1)), 2.0)
        core.close("stopped")
        assert writes == before

    asyncio.run(asyncio.wait_for(run(), 100))


def test_failing_core_leaves_last_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failing core leaves its last event and its failure on the disk."""
    path = tmp_path / "event_log"

    def broken(*_: object) -> None:
        raise AssertionError("planted")

    monkeypatch.setattr("coordinator.core.processes.on_down", broken)

    async def run() -> None:
        core = EventRecorder(Core(), str(path), 1 << 20)
        core.open()
        with pytest.raises(AssertionError, match="planted"):
            core.handle(PeerDown(1, "x"), 1.0)

    asyncio.run(run())
    replay = read(path)
    assert replay.failed == "AssertionError('planted')" and replay.ended == "the core failed"
