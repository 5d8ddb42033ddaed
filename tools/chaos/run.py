"""A run: references, then clients and faults side by side, then the audit."""

import asyncio
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from signal import SIGCONT, SIGSTOP
from typing import Any

import aiohttp

from gateway.streams.final_messages import AGAIN_S
from tools.chaos import audit
from tools.chaos.client import Seen, ask
from tools.chaos.cluster import MODULES, Cluster, Member, Violation
from tools.chaos.gaps import HIT_S, QUIET_S, Fault, of_faults
from tools.chaos.orders import CONSTRAINED, Answer, Difference, Order, compare, invalid, make_orders

GAP_MIN_S = 0.005
GAPS_MAX = 1 << 20
DOWN_S = (0.05, 0.6)  # how long a killed process stays away
STOPPED_S = (2.6, 4.0)  # longer than three missed heartbeats plus the grace of one more
OVERLOOKED_S, STALL_S = 3.0, 0.25
"""A stopped process may go unnoticed for this long after it went on, if the machine itself stood still for `STALL_S`
meanwhile. The number of such cases is shown."""
CONTROL_SHARE = 0.1  # share of the moments at which nothing is broken, for comparison
RESENDS_MAX = 20
MEETINGS = 8  # orders that every gateway answers once before anything is broken
PROBE = list(range(60, 70))

Breaking = Callable[[list[asyncio.Task[None]]], Awaitable[None]]


@dataclass
class Plan:
    seed: int = 1
    faults: int | None = 20
    seconds: float | None = None
    roles: tuple[str, ...] = ("coordinator", "gateway", "prefill", "decode")
    stop_share: float = 0.2
    rank_share: float = 0.0  # of kills of workers that kill one of their ranks
    hosts: bool = False  # whole hosts are lost, each with a prefill and a decode worker, instead of single processes
    overlap: float = 0.2  # share of faults that strike while an earlier one, of another role, is not healed yet
    pause_s: float = 0.8  # mean time between a recovery and the next fault
    clients: int = 6
    orders: int = 48
    output_tokens_max: int = 400
    constrained_share: float = 0.0
    """Share of orders whose answers must follow a grammar, call a tool, or show their prompt's log-probabilities."""
    session_share: float = 0.0  # share of orders that begin a conversation of several turns
    leave_share: float = 0.0  # share of requests whose client leaves before the end


@dataclass
class Result:
    plan: Plan
    faults: list[Fault] = field(default_factory=list)
    answers: int = 0
    constrained: int = 0
    """How many of the answers were to orders of the kinds in `CONSTRAINED`. An invalid answer is a violation."""
    tokens: int = 0
    turns: int = 0
    """Whole answers to later turns of conversations. `cached_tokens` counts the tokens of such turns' prompts that were
    cached."""
    cached_tokens: int = 0
    left: int = 0
    resent: int = 0
    violations: list[str] = field(default_factory=list)
    audit: dict[str, Any] = field(default_factory=dict)
    begun: float = 0.0
    seconds: float = 0.0


class Run:
    def __init__(self, cluster: Cluster, plan: Plan, on_progress: Callable[["Result", float], None]) -> None:
        self.cluster, self.plan = cluster, plan
        self.result = Result(plan)
        self.random = random.Random(plan.seed)
        self.orders = make_orders(
            self.random, plan.orders, output_max=plan.output_tokens_max, constrained_share=plan.constrained_share,
            session_share=plan.session_share,
        )  # fmt: skip
        self.references: dict[tuple[int, int], Answer] = {}
        self.gaps: deque[tuple[float, float]] = deque(maxlen=GAPS_MAX)
        self.receipts: list[audit.Receipt] = []
        self.tolerates: Callable[[Seen], bool] = lambda seen: False
        """Says after which failures a client tries again, besides the death of its gateway."""
        self._on_progress = on_progress
        self._over = asyncio.Event()

    async def run(self, breaking: Breaking | None = None) -> Result:
        """Runs the references, the clients with the faults, and the audit. Raises `Violation` where the run cannot go on;
        `result` has what was found until then. `breaking` replaces the faults while clients are there."""
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
            await self._look_up(session)
        baseline = await audit.rest(self.cluster)
        if self.plan.session_share:
            baseline.fetch_peers = sum(member.role in MODULES for member in self.cluster.members)
        self.result.begun = time.monotonic()
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
            clients = [asyncio.create_task(self._client(session, number)) for number in range(self.plan.clients)]
            try:
                await (breaking or self._break_things)(clients)
                self._over.set()
                await asyncio.gather(*clients)
                last_at = time.monotonic()
            finally:
                for task in clients:
                    task.cancel()
                await asyncio.gather(*clients, return_exceptions=True)
        self.result.seconds = time.monotonic() - self.result.begun
        of_faults(self.gaps, self.result.faults)
        await self._audit(baseline, last_at)
        return self.result

    # --- the load -------------------------------------------------------------------------------------------------------

    async def _look_up(self, session: aiohttp.ClientSession) -> None:
        """Gets the right answers from a cluster without faults. Every gateway answers some of the orders, so that all
        processes have met. Nothing is cached for turns of conversations."""
        todo, gateways = list(self.orders), self.cluster.of("gateway")

        async def some() -> None:
            while todo:
                order = todo.pop()
                if order.turn:
                    order = replace(order, body={**order.body, "cache_salt": f"{order.key}"})
                for gateway in gateways if order.number < MEETINGS else gateways[:1]:
                    seen = await ask(session, gateway.base_url, self.cluster.model.name, order, lambda a, b: None)
                    if seen.error:
                        raise Violation(f"without any fault: order {order.number}: {seen.error}")
                    first = self.references.setdefault(order.key, seen.answer)
                    if said := compare(first, seen.answer, whole=True):
                        raise Violation(f"without any fault: order {order.number} ({order.kind}): {said.note}")
                if (then := order.next_turn(self.references[order.key])) is not None:
                    todo.append(then)

        await asyncio.gather(*(some() for _ in range(4)))

    async def _client(self, session: aiohttp.ClientSession, number: int) -> None:
        source = random.Random(f"{self.plan.seed} client {number}")
        while not self._over.is_set():
            order = source.choice(self.orders)
            leaves = source.random() < self.plan.leave_share
            leave_after = source.randrange(self.plan.output_tokens_max // 2) if leaves else None
            then: Order | None = order
            while then is not None and not self._over.is_set():
                seen = await self._ask_until_answered(session, then, leave_after, source)
                then = None if seen.error else then.next_turn(seen.answer)

    async def _ask_until_answered(
        self, session: aiohttp.ClientSession, order: Order, leave_after: int | None, source: random.Random
    ) -> Seen:
        for _ in range(RESENDS_MAX):
            seen, again = await self._ask_once(session, order, leave_after, source)
            self._judge(order, seen, again)
            if not again:
                return seen
            self.result.resent += 1
        raise Violation(f"order {order.number} was sent {RESENDS_MAX} times: {seen.error}")

    async def _ask_once(
        self, session: aiohttp.ClientSession, order: Order, leave_after: int | None, source: random.Random
    ) -> tuple[Seen, bool]:
        """Returns the answer that came, and whether to send the request again because its gateway was killed."""
        gateways = [member for member in self.cluster.of("gateway") if not member.hurt] or self.cluster.of("gateway")
        gateway = source.choice(gateways)
        model = self.cluster.model.name
        seen = await ask(session, gateway.base_url, model, order, self._gap, leave_after=leave_after)
        return seen, _died_meanwhile(gateway, seen) or (bool(seen.error) and self.tolerates(seen))

    def _gap(self, since: float, until: float) -> None:
        if until - since >= GAP_MIN_S:
            self.gaps.append((since, until))

    def _judge(self, order: Order, seen: Seen, again: bool) -> None:
        result, left = self.result, seen.error == "left"
        whole = not seen.error
        result.answers += whole
        result.turns += whole and order.turn > 0
        result.cached_tokens += seen.cached_tokens if order.turn else 0
        result.constrained += whole and order.kind in CONSTRAINED
        if whole and (why := invalid(order, seen.answer)):
            self._violated(f"{seen.request_id} (order {order.number}, {order.kind}): {why}")
        result.left += left
        result.tokens += sum(len(choice.token_ids) for choice in seen.answer.values())
        difference = compare(self.references[order.key], seen.answer, whole=whole)
        fault = self._to_blame(seen)
        if difference:
            self._note_difference(order, seen, difference, fault)
        if not whole and not left:
            if fault is not None:
                fault.errors.append(seen.error)
            # Only clients of a killed gateway may see an error.
            if not again:
                self._violated(f"{seen.request_id} (order {order.number}, {order.kind}): {seen.error}", fault)
        self.receipts.append(audit.Receipt.of(order, seen))

    def _note_difference(self, order: Order, seen: Seen, difference: Difference, fault: Fault | None) -> None:
        if fault is not None:
            fault.difference.update(lost=difference.lost, duplicated=difference.duplicated, changed=difference.changed)
        self._violated(f"{seen.request_id} (order {order.number}, {order.kind}): {difference.note}", fault)

    def _violated(self, what: str, fault: Fault | None = None) -> None:
        after = f" after {fault.kind} {fault.name} at {fault.at - self.result.begun:.2f} s" if fault is not None else ""
        self.result.violations.append(f"{time.monotonic() - self.result.begun:.2f} s: {what}{after}")

    def _to_blame(self, seen: Seen) -> Fault | None:
        """Returns the latest fault that was active while the stream ran."""
        met = [f for f in self.result.faults if f.kind != "none" and f.at <= seen.ended_at]
        met = [f for f in met if not f.healed_at or f.healed_at >= seen.began_at]
        return met[-1] if met else None

    # --- the faults -----------------------------------------------------------------------------------------------------

    async def _break_things(self, clients: list[asyncio.Task[None]]) -> None:
        """Causes faults until there were enough or the time is up, and waits until all are healed. Raises the exception of a
        client that failed."""
        plan, healing = self.plan, set[asyncio.Task[None]]()
        end = self.result.begun + plan.seconds if plan.seconds is not None else float("inf")
        count = 0
        while (plan.faults is None or count < plan.faults) and time.monotonic() < end:
            if healing and self.random.random() >= plan.overlap:
                await asyncio.wait(healing)
            pause = HIT_S + min(self.random.expovariate(1 / plan.pause_s), 4 * plan.pause_s)
            await asyncio.wait(clients, timeout=min(pause, end - time.monotonic()), return_when="FIRST_EXCEPTION")
            await self.check(clients)
            if (fault := self._draw()) is not None:
                count += fault[1].kind != "none"
                healing.add(task := asyncio.create_task(self._strike(*fault)))
                task.add_done_callback(healing.discard)
            self._on_progress(self.result, time.monotonic() - self.result.begun)
        if healing:
            await asyncio.wait(healing)
        await asyncio.wait(clients, timeout=QUIET_S, return_when="FIRST_EXCEPTION")
        await self.check(clients)
        self.cluster.check_links()

    async def check(self, clients: list[asyncio.Task[None]]) -> None:
        """Raises the exception with which a client or a process ended, and `Violation` once something is wrong."""
        for task in clients:
            if task.done():
                task.result()
        self.cluster.check_alive()
        if self.result.violations:
            raise Violation(self.result.violations[0])

    def _draw(self) -> tuple[Member | None, Fault] | None:
        """Draw a process and a fault; never two of one role, so that there is a spare."""
        if not self.plan.roles:
            return None
        if self.random.random() < CONTROL_SHARE and not any(m.hurt for m in self.cluster.members):
            return None, Fault("–", "none", "nobody", time.monotonic())
        roles = ("prefill",) if self.plan.hosts else self.plan.roles  # there is one on each host
        unhurt = [r for r in roles if not any(m.hurt for m in self.cluster.of(r))]
        if not unhurt:
            return None
        role = self.random.choice(unhurt)
        member = self.cluster.serving() if role == "coordinator" else self.random.choice(self.cluster.of(role))
        kind = "stop" if self.random.random() < self.plan.stop_share else "kill"
        if self.plan.hosts:
            return member, Fault("host", "cut" if kind == "stop" else kind, member.host[0], time.monotonic())
        if kind == "kill" and self.plan.rank_share and self.random.random() < self.plan.rank_share:
            kind = "rank"
        return member, Fault(member.role, kind, member.name, time.monotonic())

    async def _strike(self, member: Member | None, fault: Fault) -> None:
        if member is None or member.role == "coordinator":
            if member is not None:
                member.hurt = True
            # The gaps of this fault are compared with those before it, over the same time. A longer time would have longer
            # gaps anyway.
            healed = max((f.healed_at for f in self.result.faults), default=self.result.begun)
            await asyncio.sleep(healed + HIT_S + QUIET_S - time.monotonic())
        try:
            if member is None:
                fault.at = time.monotonic()
                self.result.faults.append(fault)
                await asyncio.sleep(QUIET_S)
            elif fault.role == "host":
                await self._lose_host(member.host[0], fault)
            elif fault.kind in ("kill", "rank"):
                await self._kill(member, fault)
            else:
                await self._stop(member, fault)
        except Violation as error:
            self._violated(str(error), fault)
        fault.healed_at, fault.stall_s = time.monotonic(), self.cluster.watcher.stood_still_s(fault.at)
        if member is not None:
            member.hurt = False

    async def _kill(self, member: Member, fault: Fault) -> None:
        cluster = self.cluster
        member.hurt, fault.at = True, time.monotonic()
        member.killed_at.append(fault.at)
        self.result.faults.append(fault)
        detecting = asyncio.create_task(self._detected(member, member.name, fault))
        await cluster.kill(member, rank=fault.kind == "rank")
        await asyncio.sleep(self.random.uniform(*DOWN_S))
        probing = asyncio.create_task(self._probe(fault)) if member.role == "coordinator" else None
        cluster.start(member)
        await self._back(member, fault)
        await detecting
        if probing is not None:
            await probing

    async def _stop(self, member: Member, fault: Fault) -> None:
        member.hurt, fault.at = True, time.monotonic()
        self.result.faults.append(fault)
        detecting = asyncio.create_task(self._detected(member, member.name, fault))
        self.cluster.signal(member, SIGSTOP)
        try:
            await asyncio.sleep(self.random.uniform(*STOPPED_S))
        finally:
            self.cluster.signal(member, SIGCONT)
        fault.stopped_s = time.monotonic() - fault.at
        await detecting
        await self._back(member, fault, fault.at + fault.stopped_s)

    async def _lose_host(self, host: str, fault: Fault) -> None:
        """Kill all processes of a host, or take its network away for a while."""
        cluster, network = self.cluster, self.cluster.network
        assert network is not None
        members = [member for member in cluster.members if member.host[:1] == (host,)]
        fault.at = time.monotonic()
        self.result.faults.append(fault)
        for member in members:
            member.hurt = True
        detecting = [asyncio.create_task(self._detected(member, member.name, fault)) for member in members]
        if fault.kind == "kill":
            await asyncio.gather(*map(cluster.kill, self.random.sample(members, len(members))))
            await asyncio.sleep(self.random.uniform(*DOWN_S))
            for member in members:
                cluster.start(member)
        else:
            network.set_interface(host, "down")
            await asyncio.sleep(self.random.uniform(*STOPPED_S))
            network.set_interface(host, "up")
            fault.stopped_s = time.monotonic() - fault.at
        await asyncio.gather(*detecting)
        for member in members:
            await self._back(member, fault, fault.at + (fault.stopped_s or 0.0))
            member.hurt = False

    async def _probe(self, fault: Fault) -> None:
        gateway = next(member for member in self.cluster.of("gateway") if not member.hurt)
        order = Order(-1, "probe", PROBE, {"prompt": PROBE, "max_tokens": 1, "stream": True, "return_token_ids": True})
        async with aiohttp.ClientSession() as session:
            seen = await ask(session, gateway.base_url, self.cluster.model.name, order, lambda a, b: None)
        if _died_meanwhile(gateway, seen):
            return
        if seen.error:
            fault.errors.append(seen.error)
            self._violated(f"a request beside an absent coordinator: {seen.error}", fault)
        else:
            fault.admitted_s = seen.first_token_at - fault.at

    async def _detected(self, member: Member, name: str, fault: Fault) -> None:
        """Notes when the coordinator no longer knows the process; for a coordinator, when its link to us is gone."""
        watcher = self.cluster.watcher
        if member.role == "coordinator":
            fault.detected_s = await self.cluster.until("its link is gone", lambda: not watcher.incarnation_known)
        else:
            # While the coordinator is absent, a loss is not seen. A process that was lost and is back shows only in the count.
            lost, coordinators = watcher.lost(member.role), watcher.coordinators

            def missed() -> bool:
                return watcher.incarnation_known and (name not in watcher.names() or watcher.lost(member.role) > lost)

            def overlooked() -> bool:
                # The machine stood still too, and the coordinator does not hold that against the process; or another
                # coordinator serves by now.
                if fault.stopped_s is None or time.monotonic() < fault.at + fault.stopped_s + OVERLOOKED_S:
                    return False
                return watcher.stood_still_s(fault.at) > STALL_S or watcher.coordinators > coordinators

            await self.cluster.until(f"{name} is missed", lambda: missed() or overlooked())
            if missed():
                fault.detected_s = time.monotonic() - fault.at

    async def _back(self, member: Member, fault: Fault, since: float | None = None) -> None:
        """Waits until all have found each other again; for the coordinator, from the fault until it admits requests."""
        await self.cluster.until(f"{member.name} is back", self.cluster.is_whole)
        fault.back_s = time.monotonic() - (fault.at if since is None else since)
        await self.cluster.until(f"{member.name} stands by", lambda: self.cluster.stands_by(member))
        if member.role == "gateway":
            await self._ready(member)

    async def _ready(self, gateway: Member) -> None:
        async with aiohttp.ClientSession() as session:
            deadline = time.monotonic() + 30
            while time.monotonic() < deadline:
                try:
                    async with session.get(f"{gateway.base_url}/ready", timeout=aiohttp.ClientTimeout(2)) as response:
                        if response.status == 200:
                            return
                except (aiohttp.ClientError, TimeoutError):
                    pass
                await asyncio.sleep(0.02)
        raise Violation(f"{gateway.name} does not get ready")

    # --- afterwards -----------------------------------------------------------------------------------------------------

    def _lost_together(self, one: str, other: str) -> bool:
        """Whether a loss of role `one` came before an earlier loss of role `other` had healed and all had been reported again,
        or the other way round."""
        faults = self.result.faults
        pairs = [(a, b) for a in faults if a.role == one for b in faults if b.role == other]
        return any(a.at < b.healed_at + AGAIN_S and b.at < a.healed_at + AGAIN_S for a, b in pairs)

    async def _audit(self, baseline: audit.Rest, last_at: float) -> None:
        try:
            await self.cluster.until_idle()
        except (Violation, TimeoutError) as error:
            self._violated(str(error))
        found = self.result.audit
        found["idle_after_s"] = time.monotonic() - last_at
        report = self.cluster.watcher.report
        found["counters"] = dict(report.counters) if report is not None else {}
        rest, grown = await audit.settled(self.cluster, baseline)
        found["rest"] = rest.as_dict()
        for said in grown:
            self._violated(said)
        ledger = await audit.closed_ledger(self.cluster.usage_db, self.receipts)
        found["ledger"] = ledger.as_dict()
        for said in ledger.wrong:
            self._violated(said)
        # A gateway that lives can tell how its requests ended, even if other processes are lost.
        if not self._lost_together("coordinator", "gateway"):
            if ledger.unknown:
                self._violated(f"{ledger.unknown} rows of the ledger are open or written off")
            if ledger.fenced:
                self._violated(f"{ledger.fenced} whole answers are cancelled by the ledger")


def _died_meanwhile(gateway: Member, seen: Seen) -> bool:
    """Whether a client's connection broke because its gateway was killed."""
    return seen.broken and any(seen.began_at - 0.5 <= at <= seen.ended_at for at in gateway.killed_at)
