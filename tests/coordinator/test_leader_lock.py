"""Of two coordinators of one ledger one serves at a time, and no turn is lost with who waited for it."""

import asyncio
import errno
import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from coordinator import serve
from coordinator.accounting.ledger import RETRY_S
from coordinator.postgres.leader_lease import NotLeader
from coordinator.serve import LeaderLock
from runtime.process import clock
from runtime.process.driver import Stop
from runtime.process.exits import CONFIG_EXIT, ConfigError
from runtime.settings.roles import CoordinatorSettings
from runtime.storage.lock_file import network_file_system
from tests.helpers import printed, until

SOON_S = 60.0


def test_next_waiter_gets_released_lock(tmp_path: Path) -> None:
    """A waiting coordinator gets the lock once the first gives it up, even if another waiter timed out before."""

    async def work() -> None:
        stop, path = Stop(), str(tmp_path / "sub" / "usage.sqlite")
        first, second, third = LeaderLock(path), LeaderLock(path), LeaderLock(path)
        assert await first.acquire(stop, SOON_S)
        with pytest.raises(NotLeader, match=r"usage\.sqlite\.lock: another coordinator"):
            await second.acquire(stop, 0.05)
        waiting = asyncio.create_task(third.acquire(stop, None))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        first.release()
        # The one that gave up waiting was before it, and passes the lock on.
        assert await asyncio.wait_for(waiting, SOON_S)
        third.release()
        assert await first.acquire(stop, SOON_S)
        first.release()

    asyncio.run(work())


def test_stopped_waiter_takes_no_lock(tmp_path: Path) -> None:
    """A coordinator that is stopped while it waits does not take the lock, so others can take it."""

    async def work() -> None:
        stop, path = Stop(), str(tmp_path / "usage.sqlite")
        first, second = LeaderLock(path), LeaderLock(path)
        assert await first.acquire(Stop(), SOON_S)
        waiting = asyncio.create_task(second.acquire(stop, None))
        await asyncio.sleep(0.05)
        stop.set()
        assert not await asyncio.wait_for(waiting, SOON_S)
        first.release()
        assert await first.acquire(Stop(), SOON_S)
        first.release()

    asyncio.run(work())


def test_second_coordinator_names_usage_db_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A second coordinator of one ledger ends with a message that names --usage-db and leaves the file alone."""
    monkeypatch.setattr(serve, "PREDECESSOR_S", 0.05)
    path = str(tmp_path / "usage.sqlite")
    settings = CoordinatorSettings(usage_db=path, bind="tcp://127.0.0.1:0", metrics="off", log_format="json")

    async def work() -> int:
        first = LeaderLock(path)
        assert await first.acquire(Stop(), SOON_S)
        status = await asyncio.wait_for(serve.serve(settings, Stop()), SOON_S)
        first.release()
        return status

    assert asyncio.run(work()) == 1
    said = printed(capfd)
    assert "--usage-db: " in said and "another coordinator writes this ledger" in said
    assert not Path(path).exists(), "it has not touched the ledger"


def test_uncreatable_lock_error_names_path(tmp_path: Path) -> None:
    """An error about a lock file that cannot be created names its folder."""
    (tmp_path / "file").write_text("")
    (tmp_path / "link.lock").symlink_to(tmp_path / "file")
    for path in (tmp_path / "file" / "usage.sqlite", tmp_path / "link"):
        with pytest.raises(NotLeader, match=str(path.parent)):
            asyncio.run(LeaderLock(str(path)).acquire(Stop(), SOON_S))


@pytest.mark.parametrize(
    "kind", ["nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "fuse.anything", "9p", "lustre", "ceph", "gfs2"]
)
def test_network_file_system_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """A ledger on a network file system is refused with the name of that file system."""
    device = tmp_path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    mounts = tmp_path / "mounts"
    mounts.write_text(
        f"1 1 0:99999 / /other rw - ext4 x rw\n2 1 {number} / /a\\040b rw,relatime shared:1 - {kind} host:/x rw\n"
    )
    assert network_file_system(tmp_path, mounts) == kind
    monkeypatch.setattr(serve, "network_file_system", lambda path: network_file_system(path, mounts))
    path = tmp_path / "usage.sqlite"
    settings = CoordinatorSettings(usage_db=str(path), bind="tcp://127.0.0.1:0", metrics="off", log_format="json")
    with pytest.raises(ConfigError, match=f"--usage-db: {tmp_path} is on {kind}, a network file system"):
        asyncio.run(asyncio.wait_for(serve.serve(settings, Stop()), 60))
    assert not path.exists()


@pytest.mark.parametrize("kind", ["ext4", "xfs", "tmpfs", "overlay", "virtiofs", "fuse.fuse-overlayfs", "nfsd"])
def test_local_file_system_is_accepted(tmp_path: Path, kind: str) -> None:
    """A local file system is not taken for a network file system, nor is an unknown mount table."""
    device = tmp_path.stat().st_dev
    mounts = tmp_path / "mounts"
    mounts.write_text(
        f"1 1 {os.major(device)}:{os.minor(device)} / / rw - {kind} x rw\n2 1 0:99999 / /x rw - nfs x rw\n"
    )
    assert network_file_system(tmp_path, mounts) == ""
    assert network_file_system(tmp_path, tmp_path / "no proc") == network_file_system(tmp_path) == ""


def test_ledger_link_to_nfs_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A symbolic link to a ledger on a network file system is followed and refused."""
    far = tmp_path / "far"
    far.mkdir()
    (tmp_path / "usage.sqlite").symlink_to(far / "usage.sqlite")
    monkeypatch.setattr(serve, "network_file_system", lambda path: "nfs" if path == far else "")
    with pytest.raises(ConfigError, match=f"{far} is on nfs"):
        asyncio.run(LeaderLock(str(tmp_path / "usage.sqlite")).acquire(Stop(), 60))


@pytest.mark.parametrize("name", ["a\0b", "loop/usage.sqlite", "file/usage.sqlite"])
def test_invalid_lock_path_is_refused(tmp_path: Path, name: str) -> None:
    """An unusable lock path is refused at once, without a claim that another coordinator has it."""
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "file").touch()
    with pytest.raises(NotLeader) as caught:
        asyncio.run(asyncio.wait_for(LeaderLock(str(tmp_path / name)).acquire(Stop(), None), 60))
    assert "another coordinator" not in str(caught.value)


@pytest.mark.parametrize("replaced", [False, True])
def test_stalled_coordinator_needs_its_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], replaced: bool
) -> None:
    """A coordinator serves again after a stall only if the lock file is still its own."""
    path = tmp_path / "usage.sqlite"
    settings = CoordinatorSettings(usage_db=str(path), bind="tcp://127.0.0.1:0", metrics="off", log_format="json")
    served: list[int] = []

    def replace() -> None:
        Path(f"{path}.lock").unlink()
        Path(f"{path}.lock").touch()

    async def run(self: serve.Coordinator, stop: asyncio.Event, bind_within_s: float) -> int:  # type: ignore[name-defined]
        served.append(self.metrics.absences)
        self.stall_detector.away_s = 3.0 if len(served) == 1 else 0.0
        if replaced:
            replace()
        return 0

    monkeypatch.setattr(serve.Coordinator, "run", run)  # type: ignore[attr-defined]
    status = asyncio.run(asyncio.wait_for(serve.serve(settings, Stop()), 60))
    assert (status, served) == ((1, [0]) if replaced else (0, [0, 1]))
    assert ("--usage-db: " in printed(capfd)) == replaced


def test_lock_of_removed_file_is_refused(tmp_path: Path) -> None:
    """A waiter is refused if the lock file was removed while it waited."""

    async def work() -> None:
        path = str(tmp_path / "usage.sqlite")
        first, second = LeaderLock(path), LeaderLock(path)
        assert await first.acquire(Stop(), SOON_S)
        waiting = asyncio.create_task(second.acquire(Stop(), None))
        await asyncio.sleep(0.05)
        os.unlink(f"{path}.lock")
        first.release()
        with pytest.raises(NotLeader, match="was removed while"):
            await asyncio.wait_for(waiting, 60)

    asyncio.run(work())


def test_lock_and_folder_are_private(tmp_path: Path) -> None:
    """The lock file has mode 0600 and the folder created for it mode 0700."""
    path = tmp_path / "made" / "usage.sqlite"
    lock = LeaderLock(str(path))
    assert asyncio.run(lock.acquire(Stop(), 60))
    lock.release()
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert Path(f"{path}.lock").stat().st_mode & 0o777 == 0o600


def test_unreadable_ledger_names_usage_db_option(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A ledger that is no database ends the start with a message that names --usage-db."""
    path = tmp_path / "usage.sqlite"
    path.write_bytes(b"garbage" * 1000)
    settings = CoordinatorSettings(usage_db=str(path), bind="tcp://127.0.0.1:0", metrics="off", log_format="json")
    assert asyncio.run(asyncio.wait_for(serve.serve(settings, Stop()), 60)) == 1
    assert f"--usage-db: {path}: file is not a database" in printed(capfd)


@pytest.mark.parametrize("is_released", [True, False])
def test_locked_ledger_delays_the_start(tmp_path: Path, capfd: pytest.CaptureFixture[str], is_released: bool) -> None:
    """A start waits for a locked ledger and says so once. It then serves, or ends in order when it is told to."""
    path, said = tmp_path / "usage.sqlite", list[str]()
    settings = CoordinatorSettings(usage_db=str(path), bind="tcp://127.0.0.1:0", metrics="off", log_format="json")

    def has_said(words: str) -> bool:
        said.append(printed(capfd))
        return words in "".join(said)

    async def work() -> int:
        stop = Stop()
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            serving = asyncio.create_task(serve.serve(settings, stop))
            await until(lambda: has_said("the coordinator waits for it"))
            await asyncio.sleep(3 * RETRY_S)
            assert not has_said("listening") and not serving.done()
            if is_released:
                other.execute("ROLLBACK")
                await until(lambda: has_said("listening"))
            stop.set()
            return await asyncio.wait_for(serving, 5)

    assert asyncio.run(work()) == 0
    assert "".join(said).count("the coordinator waits for it") == 1


@pytest.mark.parametrize(("number", "status"), [(errno.ENOSPC, 1), (errno.EROFS, 1), (errno.EACCES, CONFIG_EXIT)])
def test_full_disk_at_a_start_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, status: int) -> None:
    """A coordinator whose policies do not fit on the disk ends with a status after which systemd starts it again."""
    settings = CoordinatorSettings(usage_db=str(tmp_path / "usage.sqlite"), bind="tcp://127.0.0.1:0", metrics="off")

    def fails(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("coordinator.policy_keeper.os.fsync", fails)
    with pytest.raises(ConfigError, match=f"--usage-db: .*{os.strerror(number)}") as caught:
        asyncio.run(asyncio.wait_for(serve.serve(settings, Stop()), 60))
    assert caught.value.exit_status == status


def test_wall_clock_step_reaches_quotas(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of the wall clock changes the day that the quotas count."""
    settings = CoordinatorSettings(bind="tcp://127.0.0.1:0", metrics="off", log_format="json")

    async def work() -> None:
        coordinator = serve.Coordinator(settings)  # type: ignore[attr-defined]
        await coordinator._configure()
        quotas = coordinator.core.accounts.billing.quotas
        now, unix_s, day = clock.now(), clock.unix_time(), quotas.day(clock.now())
        for step_s, days in ((0.5, 0), (86_400.0, 1), (-86_400.0, -1), (0.0, 0)):
            monkeypatch.setattr(clock, "unix_time", lambda step_s=step_s: unix_s + step_s)
            monkeypatch.setattr(clock, "now", lambda: now)
            coordinator._look_at_wall_clock()
            assert quotas.day(now) == day + days

    asyncio.run(work())
