"""Workers of `crossdock serve` are killed at random while clients stream: no request fails, and no stream is lost or changed.

While no worker of a role is up, requests wait for its restart. Three kills here; sixty within a minute, and two hundred with
pauses, take minutes.
"""

import asyncio
import random
import signal
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import httpx
import psutil
import pytest
import uvloop

from launcher.admin.status import NoAnswer
from launcher.admin.status import ask as ask_coordinator
from launcher.local import process_states
from proto.messages import Role
from tests import tiny_models
from tests.e2e.live import Live, live
from tools.chaos.client import ask
from tools.chaos.orders import CONTEXT_TOKENS, Answer, Order, compare, make_orders

SEED = 11
CLIENTS = 4
PAUSE_S = (0.05, 1.0)  # between a kill and the next one, beside what it takes until workers of both kinds are there
RAPID_PAUSE_S = (0.2, 1.4)
"""Between kills that wait for nothing: sixty take less than a minute, and most hit a worker that is starting."""
WORKERS = ("prefill_worker", "decode_worker")


@dataclass
class Kills:
    """What a run found."""

    kills: int = 0
    starting: int = 0  # of workers that were not registered
    alone: int = 0  # of the last registered worker of its role
    streams: int = 0
    tokens: int = 0
    seconds: float = 0.0
    violations: list[str] = field(default_factory=list)
    slowest_s: list[float] = field(default_factory=list)
    gap_s: float = 0.0  # the longest between two tokens of a stream


class Run:
    def __init__(self, up: Live, count: int, *, rapid: bool) -> None:
        self.up, self.count, self.rapid = up, count, rapid
        self.random = random.Random(SEED)
        self.orders = make_orders(self.random, 24, output_max=160)
        self.references: dict[int, Answer] = {}
        self.found = Kills()
        self._over = False

    async def run(self) -> Kills:
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            for order in self.orders:
                seen = await ask(session, self.up.base_url, self.up.model_id, order, lambda _from, _to: None)
                assert not seen.error, seen.error
                self.references[order.number] = seen.answer
            begun = time.monotonic()
            clients = [asyncio.create_task(self._client(session, number)) for number in range(CLIENTS)]
            try:
                await self._kill()
            finally:
                self.found.seconds = time.monotonic() - begun
                self._over = True
                await asyncio.gather(*clients)
        return self.found

    async def _client(self, session: aiohttp.ClientSession, number: int) -> None:
        source = random.Random(f"{SEED} {number}")
        while not self._over:
            await self._one(session, source.choice(self.orders))

    async def _one(self, session: aiohttp.ClientSession, order: Order) -> None:
        found = self.found

        def on_gap(before: float, now: float) -> None:
            found.gap_s = max(found.gap_s, now - before)

        seen = await ask(session, self.up.base_url, self.up.model_id, order, on_gap)
        if seen.error:
            found.violations.append(f"after {found.kills} kills: order {order.number} ({order.kind}): {seen.error}")
        elif said := compare(self.references[order.number], seen.answer, whole=True):
            found.violations.append(f"after {found.kills} kills: order {order.number} ({order.kind}): {said.note}")
        found.streams += 1
        found.tokens += sum(len(choice.token_ids) for choice in seen.answer.values())
        found.slowest_s.append(seen.ended_at - seen.began_at)

    async def _kill(self) -> None:
        while self.found.kills < self.count and not self.found.violations:
            registered = [] if self.rapid else await self._of_both_roles()
            await asyncio.sleep(self.random.uniform(*(RAPID_PAUSE_S if self.rapid else PAUSE_S)))
            running = await asyncio.to_thread(self.up.processes)
            workers = [one for role in WORKERS for one in running[role]]
            if not workers:
                continue
            victim = self.random.choice(workers)
            role = next(role for role in WORKERS if victim in running[role])
            try:
                victim.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue
            of_role = [pid for one, pid in registered if f"{one.value}_worker" == role]
            self.found.kills += 1
            self.found.starting += victim.pid not in of_role
            self.found.alone += of_role == [victim.pid]

    async def _of_both_roles(self) -> list[tuple[Role, int]]:
        """Registered workers, once there are some of both roles, the dead ones left out."""
        async with asyncio.timeout(120):
            while True:
                try:
                    report = await ask_coordinator(self.up.coordinator, 5_000)
                except NoAnswer:
                    continue
                found = [(one.role, one.pid) for one in report.workers if psutil.pid_exists(one.pid)]
                if {role for role, _ in found} == {Role.PREFILL, Role.DECODE}:
                    return found
                await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    ("count", "rapid"),
    [
        pytest.param(3, False, id="few"),
        pytest.param(60, True, id="60-in-a-minute", marks=[pytest.mark.long, pytest.mark.timeout(900)]),
        pytest.param(200, False, id="200", marks=[pytest.mark.long, pytest.mark.timeout(3600)]),
    ],
)
def test_worker_kills_fail_no_request(tmp_path: Path, count: int, rapid: bool) -> None:
    """Kills of workers fail no request and never end the service."""
    model = tiny_models.make("llama", tmp_path / "tiny", max_position_embeddings=CONTEXT_TOKENS)
    with live(model, tmp_path, "--prefill", "2", "--decode", "2", KV_GIB="0.02", STEP_TOKENS="64") as up:
        up.wait_for("four workers", lambda: len(up.status().workers) == 4)
        others = {role: up.one(role).pid for role in ("coordinator", "gateway")}
        run = Run(up, count, rapid=rapid)
        try:
            found = uvloop.run(run.run())
        finally:
            _tell(run.found)
        assert up.process.poll() is None, "the service ended"
        assert not found.violations
        assert found.kills == count and found.streams >= count // (6 if rapid else 2)
        assert {role: up.one(role).pid for role in others} == others
        up.wait_for("all are back", lambda: len(up.status().workers) == 4, 180.0)
        up.wait_idle()
        states = process_states.read(next((tmp_path / "crossdock/runs").glob("*/cluster.json")).parent)
        restarts = {one.name: one.restarts for one in states.processes}
        assert sum(restarts.values()) >= count, "each was started again"
        assert restarts["coordinator"] == restarts["gateway-0"] == 0
        page = httpx.get(f"http://{states.metrics}/metrics", timeout=60, trust_env=False).text
        for name, number in restarts.items():
            assert f'crossdock_supervisor_restarts_total{{process="{name}"}} {number}.0' in page
        assert not any("given up" in line for line in up.output)
    assert up.process.returncode == 0


def _tell(found: Kills) -> None:
    slowest = sorted(found.slowest_s) or [0.0]
    sys.stderr.write(
        f"\n{found.kills} kills in {found.seconds:.0f} s ({found.starting} of workers that started, {found.alone} of the last"
        f" of their role); {found.streams} streams, {found.tokens} tokens, {len(found.violations)} violations;"
        " a stream took"
        f" {statistics.median(slowest):.2f} s at the median, {slowest[int(len(slowest) * 0.99)]:.1f} s p99,"
        f" {slowest[-1]:.1f} s at most; longest gap {found.gap_s:.1f} s\n"
    )
