"""The audit when all is over: descriptors, threads, shared memory, tasks, and the ledger against the answers that clients
got."""

import asyncio
import contextlib
import os
import re
import sqlite3
import time
from collections import Counter
from collections.abc import Collection, Iterable
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
"""How far a process may exceed, at rest, the counts that its role had before: a connection may be closing, a pool may have a
new thread."""
GROUP = {"fds": 16, "threads": 4}
"""Resources of a pair that broke and has used tcp since, beyond those of a pair that shares memory."""
FETCH = {"fds": 10, "threads": 1, "memory_maps": 1}
"""Resources of a pair over which KV was fetched: the first fetches come after the first look."""
SETTLE_S = 3.0
LINGER_S = 30.0
IN_DOUBT_S = DOUBT_S + 2.0


@dataclass
class Rest:
    """The resources of each process at rest, by its slot."""

    roles: dict[str, str] = field(default_factory=dict)
    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    descriptors: dict[str, Counter[str]] = field(default_factory=dict)  # by kind
    rss_bytes: dict[str, int] = field(default_factory=dict)
    shm_files: list[str] = field(default_factory=list)
    groups: Counter[str] = field(default_factory=Counter)  # the number of each worker's pairs by tcp
    fetch_peers: int = 0  # how many workers each worker may have fetched from, or been fetched from by, since

    def as_dict(self) -> dict[str, Any]:
        plain = {slot: dict(kinds) for slot, kinds in self.descriptors.items()}
        return {**vars(self), "descriptors": plain, "groups": dict(self.groups)}


async def rest(cluster: Cluster) -> Rest:
    """Returns the resources of each process; call it when no client is there. Connections may take a moment to close, so the
    least of a few looks counts."""
    found = Rest(shm_files=shm_files({member.pid for member in cluster.members}))
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
            found.descriptors[member.slot] = kinds_of_descriptors(member.pid)
            found.rss_bytes[member.slot] = psutil.Process(member.pid).memory_info().rss
        if time.monotonic() > end:
            return found
        await asyncio.sleep(0.5)


async def settled(cluster: Cluster, before: Rest) -> tuple[Rest, list[str]]:
    """Returns the resources after the run and a line for each that has grown. A transfer thread may wait until its timeout for
    a lost peer."""
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


def kinds_of_descriptors(pid: int) -> Counter[str]:
    """Returns the number of its descriptors of each kind; sockets by the state of their connections, and files by name."""
    kinds: Counter[str] = Counter()
    for one in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            kinds[re.sub(r":\[\d+\]$", "", os.readlink(one))] += 1
    kinds.update(f"socket {one.status}" for one in psutil.Process(pid).net_connections())
    return kinds


async def _of_gateway(address: str) -> dict[str, int]:
    async with aiohttp.ClientSession() as session, session.get(f"http://{address}/metrics") as response:
        text = await response.text()
    values = dict(re.findall(r"^crossdock_gateway_(tasks|active_streams) ([\d.]+)$", text, re.MULTILINE))
    return {name: int(float(value)) for name, value in values.items()}


def shm_files(ours: Collection[int]) -> list[str]:
    """Returns the names in /dev/shm, without those that a process maps which is not one of `ours`."""
    of_others: set[str] = set()
    for pid in set(psutil.pids()) - set(ours):
        with contextlib.suppress(OSError):
            of_others.update(re.findall(r"/dev/shm/(\S+)", Path(f"/proc/{pid}/maps").read_text()))
    return sorted(set(os.listdir("/dev/shm")) - of_others)


def grown(before: Rest, after: Rest) -> list[str]:
    """Returns a line for each resource that has grown by more than processes of one role differ."""
    found = []
    for slot, counts in after.counts.items():
        same = [before.counts[other] for other, role in before.roles.items() if role == after.roles[slot]]
        for what, count in counts.items():
            most = max(one.get(what, 0) for one in same) + GROUP.get(what, 0) * after.groups[slot]
            most += FETCH.get(what, 0) * before.fetch_peers if after.roles[slot] in MODULES else 0
            if count > most + SLACK.get(what, 0):
                found.append(f"{slot} has {count} {what} at rest, where {most} were enough before")
                if what == "fds":
                    more = after.descriptors[slot] - before.descriptors.get(slot, Counter())
                    found[-1] += f"; more than it had: {dict(more)}"
    if new := sorted(set(after.shm_files) - set(before.shm_files)):
        found.append(f"new in /dev/shm: {new}")
    return found


@dataclass(frozen=True)
class Receipt:
    """The usage that a client got, for comparison with the ledger."""

    request_id: str
    prompt_tokens: int  # 0: not known, because the chat's answer did not say it
    tokens: int
    choices: int
    whole: bool
    stops: bool  # the request has stop strings: its worker emits a few more tokens before it hears of the end
    uncertain: bool  # the request was refused or failed, so it may have no row

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
class LedgerAudit:
    rows: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    tokens_got: int = 0
    tokens_charged: int = 0
    drift_single: int = 0  # output tokens that the ledger charges beyond those of whole answers with one choice
    drift_several: int = 0
    drift_lost: int = 0
    """The same, for rows written off at their estimate, or open until they are. The coordinator and the gateway, which knew
    their end, were both lost."""
    drift_fenced: int = 0
    """The same, for whole answers that the coordinator took for cancelled: it had been stopped and had lost all links."""
    fenced: int = 0
    wrong: list[str] = field(default_factory=list)

    @property
    def unknown(self) -> int:
        return self.outcomes["open"] + self.outcomes["lost"]

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self), "outcomes": dict(self.outcomes)}


_Row = tuple[str, str | None, int, int, int]
_ROWS = "SELECT request_id, outcome, prompt_tokens, cached_tokens, output_tokens FROM usage"


def audit_ledger(path: Path, receipts: Iterable[Receipt]) -> LedgerAudit:
    """Compares each whole answer with its rows. A client that left, or whose gateway was killed, has a closed row."""
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=10)) as db:
        rows = db.execute(_ROWS).fetchall()
    found = LedgerAudit(rows=len(rows))
    by_request: dict[str, list[_Row]] = {}
    for row in rows:
        found.outcomes[row[1] or "open"] += 1
        by_request.setdefault(re.sub(r"\.c\d+$", "", row[0]), []).append(row)
    for receipt in receipts:
        if receipt.request_id and not receipt.uncertain:
            _compare(receipt, by_request.get(receipt.request_id, []), found)
    return found


async def closed_ledger(path: Path, receipts: list[Receipt]) -> LedgerAudit:
    """Returns the audit when the rows are closed. A gateway's report stays in doubt for a moment, as a worker may know of
    more."""
    end = time.monotonic() + IN_DOUBT_S
    while True:
        found = audit_ledger(path, receipts)
        if not found.outcomes["open"] or time.monotonic() > end:
            return found
        await asyncio.sleep(0.5)


def _compare(receipt: Receipt, rows: list[_Row], found: LedgerAudit) -> None:
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
