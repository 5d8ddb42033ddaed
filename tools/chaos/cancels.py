"""Clients that go, thousands of them, in every state of a request: `python -m tools.chaos.cancels`, or `scripts/cancels`."""

import argparse
import asyncio
import random
import sqlite3
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from rich.console import Console
from rich.table import Table

from tools.chaos import audit, bench
from tools.chaos.client import ask
from tools.chaos.cluster import Cluster, Violation
from tools.chaos.orders import make_orders

BACK_S = 1.0  # seconds after the last client has gone within which everything must be back
ORDERS = 40
_STATE = """
SELECT CASE WHEN outcome IS NOT 'cancelled' THEN COALESCE(outcome, 'open') WHEN decode_ms > 0 THEN 'decoding'
    WHEN transfer_ms > 0 THEN 'handing_over' WHEN prefill_ms > 0 THEN 'prefilling' ELSE 'queued' END, COUNT(*)
FROM usage GROUP BY 1
"""
"""A cancelled request has a time above 0 in its last state, and 0 in the states behind it."""


@dataclass
class Result:
    seed: int
    cancels: int = 0
    states: dict[str, int] = field(default_factory=dict)
    unheard: int = 0  # clients that went before the coordinator heard of their request
    back_s: float = 0.0
    seconds: float = 0.0
    rest: dict[str, Any] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)


async def cancels(
    cluster: Cluster, count: int, seed: int, *, clients: int = 24, back_s: float = BACK_S,
    on_progress: Callable[[int], None] = lambda done: None,
) -> Result:  # fmt: skip
    """Raises `Violation` where it cannot go on."""
    result, source = Result(seed), random.Random(seed)
    orders = make_orders(source, ORDERS, output_max=300)
    left = [source.randrange(len(orders)) for _ in range(count)]
    model = cluster.model.name

    async def go_away(session: aiohttp.ClientSession) -> None:
        while left:
            order = orders[left.pop()]
            gateway = source.choice(cluster.of("gateway"))
            how: dict[str, Any]
            if source.random() < 0.6:
                # Before the first token: on its way, waiting, computed, handed over.
                how = {"leave_at": min(source.expovariate(1 / 0.05), 1.0)}
            else:
                how = {"leave_after": source.randint(1, 60)}
            seen = await ask(session, gateway.base_url, model, order, lambda a, b: None, **how)
            if seen.error and seen.error != "left":
                raise Violation(f"{seen.request_id} (order {order.number}): {seen.error}")
            result.cancels += seen.error == "left"
            on_progress(count - len(left))

    warm = await _answers(cluster, orders[:8])
    baseline, begun = await audit.rest(cluster), time.monotonic()
    known = sum(_states(cluster).values())
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session, asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(go_away(session))
    result.seconds = time.monotonic() - begun
    result.back_s = await cluster.until_idle()
    if result.back_s > back_s:
        result.violations.append(f"everything was back after {result.back_s:.2f} s")
    rest, grown = await audit.settled(cluster, baseline)
    result.rest = rest.as_dict()
    result.violations += grown
    result.states = dict(_states(cluster))
    result.unheard = count - (sum(result.states.values()) - known)
    if result.states.get("open"):
        result.violations.append(f"{result.states['open']} rows of the ledger are open though nothing runs")
    if await _answers(cluster, orders[:8]) != warm:
        result.violations.append("answers are not those of before")
    return result


async def _answers(cluster: Cluster, orders: list[Any]) -> list[dict[int, list[int]]]:
    """Returns the answers to these orders, from both gateways in turn."""
    found, gateways = [], cluster.of("gateway")
    async with aiohttp.ClientSession() as session:
        for order in orders:
            base_url = gateways[order.number % len(gateways)].base_url
            seen = await ask(session, base_url, cluster.model.name, order, lambda a, b: None)
            if seen.error:
                raise Violation(f"order {order.number}: {seen.error}")
            found.append({index: choice.token_ids for index, choice in seen.answer.items()})
    return found


def _states(cluster: Cluster) -> dict[str, int]:
    with closing(sqlite3.connect(f"file:{cluster.usage_db}?mode=ro", uri=True, timeout=10)) as db:
        return Counter(dict(db.execute(_STATE).fetchall()))


def show(result: Result, console: Console) -> None:
    table = Table(title=f"{result.cancels:,} clients went in {result.seconds:.0f} s", title_justify="left")
    table.add_column("state of their request, by the ledger")
    table.add_column("number", justify="right")
    for state in ("queued", "prefilling", "handing_over", "decoding", "finished"):
        table.add_row(state, f"{result.states.get(state, 0):,}")
    table.add_row("not heard of", f"{result.unheard:,}")
    console.print(table)
    console.print(f"Everything was back {result.back_s:.2f} s after the last.")


def main() -> int:
    made = argparse.ArgumentParser(
        prog="scripts/cancels",
        description="Thousands of clients that disconnect, in every state of a request, on a real cluster with a tiny model."
        f" Everything must be back {BACK_S:g} s after the last, and no block, descriptor, task or thread be left over."
        " Status 1 if not.",
    )
    made.add_argument("--cancels", type=int, default=10_000, metavar="N", help="number of clients (default 10000)")
    made.add_argument("--clients", type=int, default=24, help="at once (default 24)")
    bench.add_common(made)
    arguments = made.parse_args()

    async def work(cluster: Cluster, progress: Callable[[int], None]) -> Result:
        return await cancels(
            cluster, arguments.cancels, arguments.seed, clients=arguments.clients, on_progress=progress
        )

    return bench.run(arguments, arguments.cancels, work, show)


if __name__ == "__main__":
    raise SystemExit(main())
