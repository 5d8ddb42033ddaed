"""The coordinator process: drives the core, its links, the usage ledger, the event log, policies and metrics."""

import asyncio
import os
import secrets
import socket
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from coordinator.accounting.billing import Closed, Opened, Past
from coordinator.accounting.ledger import Ledger, UsageStore
from coordinator.accounting.quota import DAY_S
from coordinator.accounting.sqlite_store import SqliteStore
from coordinator.core import Core
from coordinator.dashboard import site
from coordinator.dashboard.snapshot import RecentEvents, snapshot
from coordinator.event_log.recorder import EventRecorder
from coordinator.events import (
    Action,
    Configured,
    Event,
    Limits,
    PeerDown,
    PeerUp,
    ProtocolViolation,
    Received,
    Send,
    StateChanged,
    Tick,
)
from coordinator.outbox import Outbox
from coordinator.policy_keeper import PolicyFile, PolicyKeeper, PolicyStore, PolicyStoreError
from coordinator.policy_versions import PolicyInForce
from coordinator.postgres.leader_lease import LeaderLease
from coordinator.recovery.stall_detector import StallDetector
from coordinator.reporting import status
from coordinator.reporting.attempt_times import AttemptClock
from coordinator.reporting.metrics import CoordinatorMetrics
from proto import codec, limits
from proto.drain import DrainAnswer, FlipAnswer
from proto.errors import CancelReason, Reject, RemoteProtocolError
from proto.messages import Cancel, ClusterState, Hello, Message, Rejected, Role, Submit
from proto.policy import ArmStatus, PolicyAnswer, PolicyRequest, RevisionStatus, RolloutRequest
from proto.status import StatusReport
from runtime.link.failure_detector import FailureDetector
from runtime.link.keys import keys_for
from runtime.link.server import CannotBind, LinkServer, LinkSettings, Peer, is_orderly
from runtime.link.tls import tls_of
from runtime.metrics.common import link_counters
from runtime.metrics.server import MetricsServer
from runtime.process import clock, garbage_collector, log, notify
from runtime.process.driver import CoreDriver, cancelled, watched
from runtime.process.exits import ConfigError
from runtime.process.version import version_of
from runtime.settings import machine
from runtime.settings.roles import CoordinatorSettings
from runtime.storage.errors import StorageError
from runtime.tenancy.file import TenantsFile
from runtime.tenancy.tenants import Tenants, TenantsError
from scheduler.lifecycle import TERMINAL

_BEHIND_RETRY_S = 1.0
_ORDER_S = 8.0  # that an order of the dashboard may take
_CLOCK_STEP_S = 1.0  # the core is told when the wall clock and the monotonic one have drifted apart by more
_LIMITS = Limits.__dataclass_fields__.keys() & CoordinatorSettings.model_fields.keys()


class Coordinator:
    """Wires the core to its control port."""

    def __init__(
        self, settings: CoordinatorSettings, before: "Coordinator | None" = None, lease: LeaderLease | None = None
    ) -> None:
        """`before`: the coordinator that this process ran until it was away. `lease`: while it is held, this one leads."""
        self.settings = settings
        self.name = name = settings.name or f"coordinator-{os.getpid()}"
        self.log = log.configure(level=settings.log_level, fmt=settings.log_format, process=name)
        self.core = Core(Limits(**{name: getattr(settings, name) for name in _LIMITS}))
        self.recorder: EventRecorder | None = None
        if settings.event_log:
            self.recorder = EventRecorder(self.core, settings.event_log, settings.event_log_max_mib << 20, name)
        self.stall_detector = StallDetector(FailureDetector(settings.heartbeat_ms, 0.0).limit_s)
        self.driver: CoreDriver[Event, Action] = CoreDriver(self, perform=self._perform, tick=Tick())
        self.observed = MetricsServer(settings.metrics, tls=tls_of(settings))
        self.peers: dict[int, Peer] = {}
        self.hash_key = b""
        """The cluster's key for block hashes: the first gateway's key, so that prefixes cached before this start are found, or
        else a new one."""
        self.tenants: TenantsFile | None = None
        self.policies: PolicyKeeper | None = None
        self.lease = lease
        self.ledger: Ledger | None = None
        self.outbox = Outbox()
        self.recent_events = RecentEvents()
        self._admin_key = site.AdminKey(settings.admin_key_file)
        self._started = clock.now()
        self.attempts: AttemptClock | None = None  # from the first request that its gateway traces
        self._utc_offset_s = 0.0
        self.failure: asyncio.Event = asyncio.Event()  # set when the ledger can no longer be written
        self.server = LinkServer(
            bind=settings.bind,
            hello=Hello(
                limits.PROTOCOL_VERSION,
                Role.COORDINATOR,
                clock.new_incarnation(),
                self.name,
                host=socket.gethostname(),
                pid=os.getpid(),
            ),
            accept=self.core.refusal,
            on_up=self._up,
            on_message=self._message,
            on_down=self._down,
            settings=LinkSettings(
                heartbeat_ms=settings.heartbeat_ms, keys=keys_for(settings, Role.COORDINATOR, {"--bind": settings.bind})
            ),
        )

        self._begin_counting(before)

    def _begin_counting(self, before: "Coordinator | None") -> None:
        if before is None:
            self.metrics = CoordinatorMetrics(self.core.state, clock.now)
            self.metrics.registry.introduce(name=self.name)
            self.links = {"control": self.server.counters}
            link_counters(self.metrics.registry, self.links)
        else:
            self.metrics, self.links = before.metrics, before.links
            self.metrics.begin_anew(self.core.state, before.complete(status.status(before.core.state)))
            self.links["control"] = self.server.counters

        self.load = lambda: (self.driver.events, len(self.core.cluster.requests))

    # --- the core, as `CoreDriver` drives it ----------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> Iterable[Action]:
        """Record the event, and what comes of it. After an absence, or without the lease, act on nothing."""
        if self.stall_detector.was_away(now) or not self._leads(now):
            return ()
        if self.attempts is not None:
            self.attempts.on_event(event, now)
        return (self.recorder or self.core).handle(event, now)

    def next_deadline(self) -> float | None:
        return None if self.stall_detector.away_s or not self._leads(clock.now()) else self.core.next_deadline()

    def _leads(self, now: float) -> bool:
        return self.lease is None or self.lease.is_held(now)

    # --- the process ----------------------------------------------------------------------------------------------------

    async def run(self, stop: asyncio.Event, bind_within_s: float = 0.0) -> int:
        """Serve until `stop`, a failure, or an absence. `bind_within_s`: how long a predecessor may take to let the port go."""
        watching: list[asyncio.Task[None]] = []
        lost = [self.lease.lost] if self.lease is not None else []
        ends: list[asyncio.Task[Any]] = [asyncio.create_task(end.wait()) for end in (self.failure, stop, *lost)]
        try:
            if self.recorder is not None:
                self.recorder.open()
        except OSError as error:
            raise ConfigError(f"--event-log: {error}") from error
        try:
            await self.observed.listen()
            policies = await self._configured(ends)
            if policies is None:
                return 0 if stop.is_set() else 1
            watching.append(watched(policies.serve(self._arms, self._revisions)))
            if self.tenants is not None:
                watching.append(watched(self.tenants.watch(policies.file_changed)))
            address = await self.server.start(bind_within_s)
        except (TenantsError, PolicyStoreError) as error:
            await self._close_ledger(watching)
            option = "--tenants" if isinstance(error, TenantsError) else self._storage_option
            raise ConfigError(f"{option}: {error}") from error
        except (CannotBind, StorageError) as error:
            await self._close_ledger(watching)
            if isinstance(error, CannotBind):
                machine.check_listening("--bind", error)
            why = f"--bind: {error.strerror}" if isinstance(error, CannotBind) else f"{self._storage_option}: {error}"
            self.log.error("cannot start", error=why)
            return 1
        self.stall_detector.begin(clock.now())
        watching.append(watched(garbage_collector.collect_seldom(self.load, clock.now)))
        ends.append(asyncio.create_task(self._absent()))
        own = (Role.COORDINATOR, self.name, self.observed.address)
        pages = {"/targets": lambda: status.targets(own, [peer.hello for peer in self.peers.values()])}
        self.observed.show(self.metrics.registry, lambda: None, pages, (site.PATH, self._dashboard()))
        self.log.info("listening", address=address)
        notify.ready(f"listening on {address}")
        await self.observed.serve()
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        leads = self._leads(clock.now())
        if self.stall_detector.away_s:
            self.log.warning("was away, and begins anew", away_s=round(self.stall_detector.away_s, 2))
        elif not leads:
            self.log.warning("has lost the lease, and stands by")
        self.log.info("stopping", running=len(self.core.cluster.requests))
        if not leads:
            await self.server.close()
        # Close the ledger first, so that rows of streams that go on without this process stay open for the next coordinator.
        await self._close_ledger(watching, leads)
        if leads:
            await self.server.close()
        await self.observed.close()
        self.driver.close()
        if self.recorder is not None:
            self.recorder.close("was away" if self.stall_detector.away_s else "stopped")
        for end in ends:
            end.cancel()
        return 1 if self.failure.is_set() else 0

    # --- the dashboard --------------------------------------------------------------------------------------------------

    def _dashboard(self) -> site.DashboardSite:
        log_path = str(self.recorder.path) if self.recorder is not None else ""
        explain = ("nice", "-n19", sys.executable, "-P", "-m", "launcher.cli", "explain", "--json", log_path)
        return site.DashboardSite(self._shown, self._carry_out, self._admin_key, explain if log_path else ())

    def _shown(self) -> dict[str, object]:
        """A snapshot for the dashboard. It reads the core's state without an event, as metrics do."""
        now = clock.now()
        own = {
            "name": self.name,
            "version": version_of(),
            "unix_s": clock.unix_time(),
            "uptime_s": now - self._started,
            "can_act": self._admin_key.given,
            "can_explain": self._admin_key.given and self.recorder is not None,
        }
        return own | snapshot(self.core.state, self.metrics.recent, self.recent_events.events, now)

    async def _carry_out(self, order: Message) -> str:
        """Carry out an order of the dashboard as one that came on an observer's link. Returns why it was refused, or an empty
        string."""
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()

        def on_frames(_peer: Peer, frames: list[bytes]) -> bool:
            message = codec.decode(frames)[0]
            if isinstance(message, DrainAnswer | FlipAnswer | PolicyAnswer) and not answer.done():
                answer.set_result(message)
            return True

        hello = Hello(limits.PROTOCOL_VERSION, Role.OBSERVER, clock.new_incarnation(), "dashboard")
        peer = Peer(hello.incarnation, hello, on_frames)
        self.log.info("ordered on the dashboard", order=type(order).__name__)
        self._up(peer)
        try:
            self._message(peer, order, b"")
            async with asyncio.timeout(_ORDER_S):
                return str(getattr(await answer, "refusal"))  # noqa: B009 (of all three)
        except TimeoutError:
            return f"nothing was heard in {_ORDER_S:.0f} s"
        finally:
            self._down(peer, "answered")

    async def _absent(self) -> None:
        while True:
            if self.stall_detector.was_away(clock.now()):
                return
            self._look_at_wall_clock()
            if self.outbox.uncommitted:
                self._refuse_uncommitted()
            await asyncio.sleep(self.stall_detector.limit_s / 8)

    def _arms(self) -> tuple[ArmStatus, ...]:
        return status.arms(self.core.state)

    def _revisions(self) -> tuple[RevisionStatus, ...]:
        return status.revisions(self.core.state, clock.now())

    async def _configured(self, ends: "list[asyncio.Task[Any]]") -> PolicyKeeper | None:
        """As `_configure`. None: one of `ends` came while the ledger's storage was waited for."""
        configuring = asyncio.create_task(self._configure())
        await asyncio.wait((configuring, *ends), return_when=asyncio.FIRST_COMPLETED)
        if configuring.done():
            return configuring.result()
        await self._close_ledger([configuring, *ends])
        return None

    async def _configure(self) -> PolicyKeeper:
        """Tell the core who its tenants are and what they used, before anyone joins. Raises `TenantsError`, `StorageError`,
        `PolicyStoreError`."""
        settings = self.settings
        if settings.tenants:
            self.tenants = TenantsFile(settings.tenants)
        past = None
        usage, kept = self.lease.stores() if self.lease is not None else _files(settings.usage_db)
        if usage is not None:
            self.ledger = Ledger(
                usage, on_committed=self._committed, on_failed=self._ledger_failed, keep_days=settings.usage_keep_days
            )
            past = await self.ledger.start(int(clock.unix_time() // DAY_S))
        options = {name: getattr(settings, name) for name in sorted(_LIMITS)}
        self.policies = policies = PolicyKeeper(kept, self.tenants, options, self._put_in_force)
        tenants, policy = await policies.start()
        if usage is None and any(
            level.limits.tokens_per_day for policy in tenants.policies.values() for level in policy.levels
        ):
            self.log.warning("tokens_per_day begins anew at each start: no --usage-db is given")
        self._put_in_force(tenants, policy, past)
        return policies

    def _put_in_force(self, tenants: Tenants, policy: PolicyInForce, past: Past | None = None) -> None:
        self._utc_offset_s = clock.unix_time() - clock.now()
        self.driver.post(Configured(tenants, self._utc_offset_s, past, policy))

    def _look_at_wall_clock(self) -> None:
        """Tell the core when the wall clock was set, since days begin by it."""
        step_s = clock.unix_time() - clock.now() - self._utc_offset_s
        if abs(step_s) > _CLOCK_STEP_S:
            self.log.warning("the wall clock was set", step_s=round(step_s, 1))
            self._put_in_force(self.core.accounts.billing.quotas.tenants, self.core.accounts.goodput.policy)

    def _committed(self, request_ids: list[str]) -> None:
        for send in self.outbox.committed(request_ids):
            self._send(send)

    def _ledger_failed(self, error: StorageError) -> None:
        self.log.critical("usage cannot be written any more", error=str(error))
        self.failure.set()

    async def _close_ledger(self, watching: "Iterable[asyncio.Task[Any]]", wait: bool = True) -> None:
        await cancelled(*watching)
        if self.ledger is not None:
            await self.ledger.close(wait)

    @property
    def _storage_option(self) -> str:
        return "--usage-db" if self.lease is None else "--database"

    def _record_usage(self, entry: Opened | Closed) -> None:
        if self.ledger is None:
            return
        if isinstance(entry, Opened):
            self.outbox.opened(entry.request_id)
        try:
            self.ledger.write(entry)
        except StorageError as error:
            self._ledger_failed(error)

    def _up(self, peer: Peer) -> None:
        earlier = self.peers.get(peer.incarnation)
        if earlier is not None:
            self.server.drop(earlier, "connected again")
        self.outbox.forget(peer.incarnation)
        self.peers[peer.incarnation] = peer
        emit = self.log.debug if peer.hello.role is Role.OBSERVER else self.log.info
        emit("joined", peer=peer.hello.name, role=peer.hello.role.value, model=peer.hello.model)
        self.recent_events.on_process(peer.hello, "joined", clock.now())
        if peer.hello.role is Role.GATEWAY:
            self.hash_key = self.hash_key or peer.hello.hash_key or secrets.token_bytes(32)
        # Keep the key from the core, since the core's events are recorded.
        self.driver.post(PeerUp(peer.incarnation, msgspec.structs.replace(peer.hello, hash_key=b"")))

    def _down(self, peer: Peer, reason: str) -> None:
        if self.peers.get(peer.incarnation) is peer:
            del self.peers[peer.incarnation]
            self.outbox.forget(peer.incarnation)
            quiet = peer.hello.role is Role.OBSERVER
            emit = self.log.debug if quiet else self.log.info if is_orderly(reason) else self.log.warning
            emit("left", peer=peer.hello.name, role=peer.hello.role.value, reason=reason)
            self.recent_events.on_process(peer.hello, f"left: {reason}", clock.now())
            self.driver.post(PeerDown(peer.incarnation, reason))

    def _message(self, peer: Peer, message: Message, blob: bytes) -> None:
        if self.peers.get(peer.incarnation) is not peer:
            raise RemoteProtocolError("this link was replaced by a newer one")
        if isinstance(message, Submit):
            if self._is_too_much(message):
                self._refuse(peer, message)
                return
            if message.traced and self.attempts is None:
                self.attempts = AttemptClock(self.core.cluster.requests)
        keeper = self.policies if peer.hello.role is Role.OBSERVER else None
        if keeper is not None and isinstance(message, PolicyRequest | RolloutRequest):
            keeper.on_request(message, peer.send)
            return
        self.driver.post(Received(peer.incarnation, message, blob))

    def _is_too_much(self, submit: Submit) -> bool:
        """Whether a submit is refused because the ledger is behind. Only new submits are; the core answers repeated ones."""
        if self.ledger is None or not self.ledger.behind:
            return False
        return (
            submit.request_id not in self.core.cluster.requests
            and submit.attempt > self.core.state.last(submit.request_id).attempt
        )

    def _refuse(self, peer: Peer, submit: Submit) -> None:
        """Refuse a submit past the outbox, which waits for the ledger."""
        self.metrics.refused_behind += 1
        why = self.ledger.trouble(clock.now()) if self.ledger is not None else ""
        peer.send(Rejected(submit.request_id, submit.attempt, Reject.STORAGE, why, _BEHIND_RETRY_S))

    def _refuse_uncommitted(self) -> None:
        """Refuse requests that came just before the ledger was behind: no other process has heard of them."""
        if self.ledger is None or not self.ledger.behind:
            return
        waiting = [
            self.core.cluster.requests[name] for name in self.outbox.uncommitted if name in self.core.cluster.requests
        ]
        for request in waiting:
            peer = self.peers.get(request.gateway_incarnation)
            if peer is not None and request.attempt == 1:
                self._refuse(peer, request.submit)
                withdrawn = Cancel(request.id, request.attempt, CancelReason.ABANDONED)
                self.driver.post(Received(peer.incarnation, withdrawn))

    def _send(self, send: Send) -> None:
        peer, message = self.peers.get(send.incarnation), send.message
        if isinstance(message, StatusReport):
            message = self.complete(message)
        elif isinstance(message, ClusterState):
            message = msgspec.structs.replace(message, hash_key=self.hash_key)
        if peer is not None:
            peer.send(message, send.blob)

    def _perform(self, action: Action) -> None:
        if self.attempts is not None:
            for times in self.attempts.on_action(action, self.core.state.now):
                self._send(times)
        match action:
            case Send():
                if self.outbox.pass_or_hold(action):
                    self._send(action)
            case Opened():
                self.metrics.on_opened(action)
                self._record_usage(action)
            case Closed():
                self.metrics.on_closed(action)
                self._record_usage(action)
            case StateChanged(request_id, attempt, state, why):
                self.metrics.on_state_changed(action)
                self.recent_events.on_state_changed(action, clock.now())
                emit = self.log.info if state in TERMINAL else self.log.debug
                emit("request", request_id=request_id, attempt=attempt, state=state.value, why=why)
            case ProtocolViolation(incarnation, reason, bug):
                peer = self.peers.get(incarnation)
                self.server.counters.protocol_errors += not bug
                self.server.counters.failed_checks += bool(bug)
                if bug:
                    self.log.error("a bug met by a peer's message; its link ends", peer=incarnation, traceback=bug)
                if peer is not None:
                    # Do not drop the peer inside the core's own event, since dropping makes another event.
                    asyncio.get_running_loop().call_soon(self.server.drop, peer, reason)

    def complete(self, said: StatusReport) -> StatusReport:
        """Add figures that the core does not have, since its answers depend on its events alone."""
        links, metrics = self.server.counters, self.metrics
        own_counters = {"protocol_errors": links.protocol_errors, "failed_checks": links.failed_checks}
        own_counters |= {f"turned_away_{reason}": count for reason, count in links.turned_away().items()}
        counters, finished = status.summed((said.counters | own_counters, said.finished), metrics.earlier)
        counters["absences"] = metrics.absences
        own = {self.name: self.observed.address} if self.observed.address else {}
        now = clock.now()
        return msgspec.structs.replace(
            said,
            counters=counters,
            finished=finished,
            metrics=own | said.metrics,
            recent=metrics.recent.figures() | metrics.recent.rates(now, self._started),
            tenants=tuple(status.with_ttft(said.tenants, metrics.recent.ttft_of_tenants())),
            version=version_of(),
            uptime_ms=1000 * (now - self._started),
        )


def _files(usage_db: str) -> tuple[UsageStore | None, PolicyStore | None]:
    if not usage_db:
        return None, None
    return SqliteStore(usage_db), PolicyFile(Path(f"{usage_db}.policies.json"))
