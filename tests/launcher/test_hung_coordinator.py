"""A real coordinator that hangs with the leader lock, under the real supervisor: another one serves."""

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import uvloop

from launcher.admin.status import NoAnswer, ask
from launcher.cluster.file import parse
from launcher.cluster.plan import coordinator_address, plan_host
from launcher.cluster.up import spec_of
from launcher.local.ports import free_port
from launcher.local.supervisor import Supervisor

pytestmark = pytest.mark.cluster

WATCHDOG_S = 3.0  # not the 10 s of a real one


async def serving(coordinator: str) -> str:
    """The name of the coordinator that answers."""
    async with asyncio.timeout(90):
        while True:
            try:
                report = await ask(coordinator, 1_000)
            except NoAnswer:
                continue
            (name,) = report.metrics
            return name


@pytest.mark.parametrize("standby", [False, True])
def test_hung_coordinator_is_replaced(tmp_path: Path, standby: bool) -> None:
    """A coordinator that hangs is followed by another one, with and without a standby."""
    port, usage_db = free_port("127.0.0.1"), tmp_path / "usage.sqlite"
    file = parse(
        f'[ports]\ncoordinator = {port}\n[coordinator]\nusage_db = "{usage_db}"\nstandby = {str(standby).lower()}\n'
        '[hosts.only]\naddress = "127.0.0.1"\ncoordinator = true\n',
        tmp_path,
    )

    async def scene() -> None:
        said: list[str] = []
        supervisor = Supervisor(log_dir=tmp_path, say=lambda level, name, text: said.append(f"{name} {text}"))
        for process in plan_host(file, "only", "none").processes:
            supervisor.start(replace(spec_of(process), watchdog_s=WATCHDOG_S))
        try:
            first = await serving(coordinator_address(file))
            async with asyncio.timeout(90):
                while not supervisor.all_ready():  # noqa: ASYNC110 (it has nobody to tell)
                    await asyncio.sleep(0.05)
            supervisor.started_up = True
            hung = supervisor.children[first]
            incarnation = hung.pid
            os.kill(incarnation, signal.SIGSTOP)
            assert await serving(coordinator_address(file)) == (first if not standby else _other(first))
            assert any(line.startswith(f"{first} said nothing for ") for line in said)
            if not standby:
                assert hung.pid not in (0, incarnation)
        finally:
            await supervisor.close()

    uvloop.run(scene())


def _other(name: str) -> str:
    return {"coordinator": "coordinator-1", "coordinator-1": "coordinator"}[name]
