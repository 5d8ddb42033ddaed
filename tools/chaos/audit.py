"""The audit when all is over: descriptors, threads, shared memory, tasks, and the ledger against the answers that clients
got."""

import asyncio
import os
import re
import sqlite3
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from coordinator.accounting.billing import DOUBT_S
from tools.chaos.client import Seen
from tools.chaos.cluster import MODULES, Cluster
from tools.chaos.orders import Order

SLACK = {"fds": 4, "threads": 2, "memory_maps": 2, "tasks": 4}
"""By which a process may differ from another of its role at rest: a connection just closing, a pool's thread not needed yet."""
GROUP = {"fds": 16, "threads": 4}
"""Of a pair that broke and meets by tcp since: more than one that shares memory has."""
FETCH = {"fds": 4, "threads": 1, "memory_maps": 1}
"""Of a pair by which something was fetched: the first fetches come after the first look."""
SETTLE_S = 3.0
LINGER_S = 30.0
IN_DOUBT_S = DOUBT_S + 2.0


@dataclass
class Rest:
    """Of each process at rest, by its slot."""

    roles: dict[str, str] = field(default_factory=dict)
    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    rss_bytes: dict[str, int] = field(default_factory=dict)
    shm_files: list[str] = field(default_factory=list)
    groups: Counter[str] = field(default_factory=Counter)
    """Pairs by tcp of each worker."""
    fetch_peers: int = 0
    """Workers that each worker may have fetched from since, or the other way round."""

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self), "groups": dict(self.groups)}


async def rest(cluster: Cluster) -> Rest:
    """To be asked when no client is there. Connections may take a moment to close: the least of a few looks counts."""
    found = Rest(shm_files=shm_files())
    report = cluster.watcher.report
    for pair in report.kv_pairs if report is not None else ():
        if pair.transport == "tcp":
            found.groups.update(name.rpartition(".")[0] for name in (pair.prefill, pair.decode))
    end = time.monotonic() + SETTLE_S
    while True:
        for member in cluster.members:
            seen = of_process(member.pid)
            if member.role == "gateway":
                seen |= await _of_gateway((await cluster.watcher.next_report()).metrics[member.name])
            earlier = found.counts.get(member.slot, seen)
            found.roles[member.slot] = member.role
            found.counts[member.slot] = {what: min(earlier[what], seen[what]) for what in seen}
            found.rss_bytes[member.slot] = psutil.Process(member.pid).memory_info().rss
        if time.monotonic() > end:
            return found
        await asyncio.sleep(0.5)


async def settled(cluster: Cluster, before: Rest) -> tuple[Rest, list[str]]:
    """The resources at last, and those that have grown: a transfer thread may wait out its time for a peer that was lost."""
    end = time.monotonic() + LINGER_S
    while True:
        found = await rest(cluster)
        said = grown(before, found)
        if not said or time.monotonic() > end:
            return found, said


def of_process(pid: int) -> dict[str, int]:
    maps = Path(f"/proc/{pid}/maps").read_text()
    shared = {line.split(None, 5)[5] for line in maps.splitlines() if "/memfd:" in line or "/dev/shm" in line}
    descriptors = len(os.listdir(f"/proc/{pid}/fd"))
    return {"fds": descriptors, "threads": psutil.Process(pid).num_threads(), "memory_maps": len(shared)}


async def _of_gateway(address: str) -> dict[str, int]:
    async with aiohttp.ClientSession() as session, session.get(f"http://{address}/metrics") as response:
        text = await response.text()
    values = dict(re.findall(r"^crossdock_gateway_(tasks|active_streams) ([\d.]+)$", text, re.MULTILINE))
    return {name: int(float(value)) for name, value in values.items()}


def shm_files() -> list[str]:
    return sorted(os.listdir("/dev/shm"))


def grown(before: Rest, after: Rest) -> list[str]:
    """The resources that are more than they were, beyond the differences between processes of a role."""
    found = []
    for slot, counts in after.counts.items():
        same = [before.counts[other] for other, role in before.roles.items() if role == after.roles[slot]]
        for what, count in counts.items():
            most = max(one.get(what, 0) for one in same) + GROUP.get(what, 0) * after.groups[slot]
            most += FETCH.get(what, 0) * before.fetch_peers if after.roles[slot] in MODULES else 0
            if count > most + SLACK.get(what, 0):
                found.append(f"{slot} has {count} {what} at rest, where {most} were enough before")
    if len(after.shm_files) > len(before.shm_files):
        found.append(f"new in /dev/shm: {sorted(set(after.shm_files) - set(before.shm_files))}")
    return found


@dataclass(frozen=True)
class Receipt:
    """The usage that a client got, to be held against the journal."""

    request_id: str
    prompt_tokens: int
    """0: of a chat that brought none, so that it is not known."""
    tokens: int
    choices: int
    whole: bool
    stops: bool
    """It has stop strings: its worker emits some tokens more before it hears of the end."""
    uncertain: bool
    """Refused, or failed: it may have no row."""

    @staticmethod
    def of(order: Order, seen: Seen) -> "Receipt":
        tokens = sum(len(choice.token_ids) for choice in seen.answer.values())
        if order.body.get("max_tokens") == 0 and not seen.error:
            tokens = 1  # which is drawn, and not shown
        return Receipt(
            seen.request_id,
            len(order.prompt) if "prompt" in order.body else seen.prompt_tokens,
            tokens,
            len(seen.answer),
            not seen.error,
            "stop" in order.body,
            bool(seen.error) and seen.error != "left" and not seen.broken,
        )


@dataclass
class Journal:
    rows: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    tokens_got: int = 0
    tokens_charged: int = 0
    drift_single: int = 0
    """Output tokens by the ledger beyond those of whole answers of one choice."""
    drift_several: int = 0
    drift_lost: int = 0
    """Of rows written off at their estimate, or open until they are: those who knew of their end went with the coordinator, the
    gateway too."""
    drift_fenced: int = 0
    """Of answers that were whole though the coordinator took them for cancelled: it had been stopped, and lost all links."""
    fenced: int = 0
    wrong: list[str] = field(default_factory=list)

    @property
    def unknown(self) -> int:
        return self.outcomes["open"] + self.outcomes["lost"]

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self), "outcomes": dict(self.outcomes)}


_Row = tuple[str, str | None, int, int, int]
_ROWS = "SELECT request_id, outcome, prompt_tokens, cached_tokens, output_tokens FROM usage"


def journal(path: Path, receipts: Iterable[Receipt]) -> Journal:
    """Each whole answer against its rows. A client that left, or whose gateway was killed, has a row that is closed."""
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=10)) as db:
        rows = db.execute(_ROWS).fetchall()
    found = Journal(rows=len(rows))
    by_request: dict[str, list[_Row]] = {}
    for row in rows:
        found.outcomes[row[1] or "open"] += 1
        by_request.setdefault(re.sub(r"\.c\d+$", "", row[0]), []).append(row)
    for receipt in receipts:
        if receipt.request_id and not receipt.uncertain:
            _compare(receipt, by_request.get(receipt.request_id, []), found)
    return found


async def closed_journal(path: Path, receipts: list[Receipt]) -> Journal:
    """When its rows are closed: what a gateway has told stays in doubt for a moment, as a worker may know of more."""
    end = time.monotonic() + IN_DOUBT_S
    while True:
        found = journal(path, receipts)
        if not found.outcomes["open"] or time.monotonic() > end:
            return found
        await asyncio.sleep(0.5)


def _compare(receipt: Receipt, rows: list[_Row], found: Journal) -> None:
    if not rows:
        found.wrong.append(f"{receipt.request_id} has no row in the ledger")
        return
    if not receipt.whole:
        return
    lost, beyond = any(row[1] in (None, "lost") for row in rows), sum(row[4] for row in rows) - receipt.tokens
    found.tokens_got += receipt.tokens
    found.tokens_charged += receipt.tokens + beyond
    if lost:
        found.drift_lost += beyond
    elif all(row[1] == "cancelled" for row in rows) and not receipt.stops:
        found.drift_fenced += beyond
        found.fenced += 1
    elif receipt.choices > 1:
        found.drift_several += beyond
    elif not receipt.stops:
        found.drift_single += beyond
        if beyond > 0:
            found.wrong.append(f"{receipt.request_id} got {receipt.tokens} tokens, {beyond} less than charged: {rows}")
    if beyond < 0 and not lost:
        found.wrong.append(f"{receipt.request_id} got {receipt.tokens} tokens, {-beyond} more than charged: {rows}")
    prompt_tokens = sum(row[2] + row[3] for row in rows if row[0] == receipt.request_id)
    if receipt.prompt_tokens and prompt_tokens != receipt.prompt_tokens and rows[0][1] == "finished":
        found.wrong.append(
            f"{receipt.request_id}: a prompt of {receipt.prompt_tokens} tokens; its rows say {prompt_tokens}"
        )
