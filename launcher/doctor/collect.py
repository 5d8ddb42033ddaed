"""Takes the snapshot for `crossdock doctor`: asks the coordinator, and reads each process's metrics twice."""

import asyncio
import contextlib
import socket
from collections.abc import Iterable, Sequence
from email.utils import parsedate_to_datetime
from pathlib import Path
from statistics import median
from typing import NamedTuple

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from launcher.admin.status import ask
from launcher.doctor.snapshot import ProcessMetrics, Samples, Snapshot, readings
from launcher.http.client import new_session
from launcher.local import process_states, registry
from proto.errors import CrossdockError
from proto.status import StatusReport, TenantStatus
from runtime.link.keys import Keys
from runtime.process import clock

SCRAPE_S = 5.0
ASK_MS = 10_000  # longer than other commands wait: a sick cluster may be slow
AT_ONCE = 32
LOOKS = 5  # at who waits, between the two readings


class NoMetrics(CrossdockError):
    """A server does not show metrics."""


class Page(NamedTuple):
    """One process's metrics."""

    samples: Samples
    clock_ahead_s: float

    @property
    def name(self) -> str:
        return next((labels["name"] for name, labels, _ in self.samples if name == "crossdock_process_info"), "")


async def cluster(coordinator: str, keys: Keys | None, seconds: float) -> Snapshot:
    """Raises `NoAnswer`."""
    first = await ask(coordinator, ASK_MS, keys)
    async with new_session() as session:
        before = await _scrape_all(session, first)
        throttled = _throttled(first)
        began = clock.now()
        looks = []
        for _ in range(LOOKS):
            await asyncio.sleep(seconds / LOOKS)
            looks.append(await ask(coordinator, ASK_MS, keys))
        report = msgspec.structs.replace(looks[-1], tenants=_waiting_usually(looks))
        after = await _scrape_all(session, report)
        took_s = clock.now() - began
    shares = {
        name: (now[1] - was[1]) / max(now[0] - was[0], 1)
        for name, now in _throttled(first).items()  # a stopped worker may be lost by now
        if (was := throttled.get(name)) is not None
    }
    processes = [
        ProcessMetrics(name, readings(before[name].samples, page.samples), page.clock_ahead_s, shares.pop(name, 0.0))
        for name, page in after.items()
        if name in before
    ]
    # A process that its CPU limit stops for most of the time may be too slow to show its metrics.
    processes += [ProcessMetrics(name, {}, throttled_share=share) for name, share in shares.items()]
    here_too = [process_states.read(folder) for folder in registry.folders_of(coordinator)]
    restarts = tuple(line for part in here_too for line in process_states.lines(part.processes, clock.unix_time()))
    unseen = tuple(sorted(report.metrics.keys() - after.keys()))
    return Snapshot(took_s, clock.unix_time(), report, tuple(processes), restarts, unseen)


def _waiting_usually(looks: Sequence[StatusReport]) -> tuple[TenantStatus, ...]:
    """Returns the latest shares of tenants, with the median of the requests that waited: their number jumps."""
    waiting = [{one.name: one.waiting for one in look.tenants} for look in looks]
    return tuple(
        msgspec.structs.replace(one, waiting=round(median(look.get(one.name, 0) for look in waiting)))
        for one in looks[-1].tenants
    )


async def server(url: str, seconds: float) -> ProcessMetrics:
    """Reads the metrics of another server, like vLLM. Raises `NoMetrics`."""
    address = f"{url.rstrip('/').removesuffix('/metrics').removesuffix('/v1')}/metrics"
    async with new_session() as session:
        pages = []
        for pause_s in (seconds, 0.0):
            try:
                pages.append(await _scrape(session, address))
            except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                raise NoMetrics(f"--url: no metrics at {address}: {error or 'no answer'}") from None
            await asyncio.sleep(pause_s)
    return ProcessMetrics(url, readings(pages[0].samples, pages[1].samples), pages[1].clock_ahead_s)


async def _scrape_all(session: aiohttp.ClientSession, report: StatusReport) -> dict[str, Page]:
    """Returns the pages by name. An address on loopback is another process's if that one is on another host."""
    limit, found = asyncio.Semaphore(AT_ONCE), dict[str, Page]()

    async def one(name: str, address: str) -> None:
        async with limit:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError, ValueError):
                page = await _scrape(session, f"http://{address}/metrics")
                if page.name == name:
                    found[name] = page

    await asyncio.gather(*(one(name, address) for name, address in report.metrics.items()))
    return found


async def _scrape(session: aiohttp.ClientSession, address: str) -> Page:
    asked = clock.unix_time()
    async with session.get(address, timeout=aiohttp.ClientTimeout(total=SCRAPE_S)) as response:
        if response.status != 200:
            raise aiohttp.ClientError(f"HTTP {response.status}")
        text = await response.text()
        date = response.headers.get("date", "")
    ahead_s = _ahead_s(parsedate_to_datetime(date).timestamp(), asked, clock.unix_time()) if date else 0.0
    families = text_string_to_metric_families(text)
    return Page([(one.name, one.labels, one.value) for family in families for one in family.samples], ahead_s)


def _ahead_s(date: float, asked: float, came: float) -> float:
    """Returns by how much a clock that said `date`, in whole seconds cut off, between the two times is wrong at the least."""
    return date - came if date > came else min(date + 1.0 - asked, 0.0)


# --- this machine -----------------------------------------------------------------------------------------------------


def _throttled(report: StatusReport) -> dict[str, tuple[int, int]]:
    """Returns, by process of this machine, the periods of its CPU limit and those in which it was stopped."""
    here = socket.gethostname()
    pids = {worker.process or worker.name: worker.pid for worker in report.workers if worker.host == here}
    return {name: found for name, pid in pids.items() if (found := throttled_periods(pid)) is not None}


def throttled_periods(pid: int) -> tuple[int, int] | None:
    """Returns (periods, periods in which it was stopped) of a process's own CPU limit; None if it has none."""
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        return None
    for folder in _cgroup_folders(lines):
        with contextlib.suppress(OSError, ValueError, KeyError):
            found = dict(line.split() for line in (folder / "cpu.stat").read_text().splitlines())
            return int(found["nr_periods"]), int(found["nr_throttled"])
    return None


def _cgroup_folders(lines: Iterable[str]) -> list[Path]:
    """Returns where a process's limit may be: in a container, its own cgroup is the root that it sees."""
    root, found = Path("/sys/fs/cgroup"), []
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers == "" or "cpu" in controllers.split(","):
            base = root / "cpu" if controllers else root
            found += [base / path.lstrip("/"), base]
    return found
