"""Of two coordinators of one ledger one serves at a time, and no turn is lost with who waited for it."""

import asyncio
from pathlib import Path

import pytest

from coordinator import main
from coordinator.__main__ import _usage_db
from coordinator.recovery.leader_lock import LeaderLock, NotLeader
from coordinator.recovery.lock_file import is_taken
from runtime.process.driver import Stop
from runtime.settings.roles import CoordinatorSettings

SOON_S = 5.0


def test_the_next_has_its_turn_when_the_first_gives_up(tmp_path: Path) -> None:
    async def work() -> None:
        stop, path = Stop(), str(tmp_path / "sub" / "usage.sqlite")
        first, second, third = LeaderLock(path), LeaderLock(path), LeaderLock(path)
        assert not is_taken(path)
        assert await first.take(stop, SOON_S)
        assert is_taken(path)
        with pytest.raises(NotLeader, match=r"usage\.sqlite\.lock: another coordinator"):
            await second.take(stop, 0.05)
        waiting = asyncio.create_task(third.take(stop, None))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        first.give_up()
        # The one that gave up waiting was before it, and passes the lock on.
        assert await asyncio.wait_for(waiting, SOON_S)
        third.give_up()
        assert await first.take(stop, SOON_S)
        first.give_up()

    asyncio.run(work())


def test_who_is_stopped_while_waiting_takes_no_turn(tmp_path: Path) -> None:
    async def work() -> None:
        stop, path = Stop(), str(tmp_path / "usage.sqlite")
        first, second = LeaderLock(path), LeaderLock(path)
        assert await first.take(Stop(), SOON_S)
        waiting = asyncio.create_task(second.take(stop, None))
        await asyncio.sleep(0.05)
        stop.set()
        assert not await asyncio.wait_for(waiting, SOON_S)
        first.give_up()
        assert await first.take(Stop(), SOON_S)
        first.give_up()

    asyncio.run(work())


def test_a_second_coordinator_of_a_journal_ends_with_a_word_on_the_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(main, "PREDECESSOR_S", 0.05)
    path = str(tmp_path / "usage.sqlite")
    settings = CoordinatorSettings(usage_db=path, bind="tcp://127.0.0.1:0", metrics="off", log_format="json")

    async def work() -> int:
        first = LeaderLock(path)
        assert await first.take(Stop(), SOON_S)
        status = await asyncio.wait_for(main._serve(settings, Stop()), SOON_S)
        first.give_up()
        return status

    assert asyncio.run(work()) == 1
    said = "".join(capfd.readouterr())
    assert "--usage-db: " in said and "another coordinator writes this ledger" in said
    assert not Path(path).exists(), "it has not touched the ledger"


@pytest.mark.parametrize(
    ("arguments", "environment", "journal"),
    [
        (["--standby", "--usage-db", "a.sqlite"], {}, "a.sqlite"),
        (["--usage-db=b.sqlite"], {"CROSSDOCK_USAGE_DB": "c.sqlite"}, "b.sqlite"),
        (["--standby"], {"CROSSDOCK_USAGE_DB": "c.sqlite"}, "c.sqlite"),
        (["--usage-db"], {}, ""),
        ([], {}, ""),
    ],
)
def test_whose_journal_it_is_is_known_before_anything_is_loaded(
    arguments: list[str], environment: dict[str, str], journal: str
) -> None:
    assert _usage_db(arguments, environment) == journal


def test_a_lock_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link.lock").symlink_to(tmp_path / "file")
    for path in (tmp_path / "file" / "usage.sqlite", tmp_path / "link"):
        with pytest.raises(NotLeader, match=str(path.parent)):
            asyncio.run(LeaderLock(str(path)).take(Stop(), SOON_S))
