"""Drives a worker in one role: its link to the coordinator, its links to gateways, its steps, its metrics, its end.

The role-specific part of a worker is a `WorkerRole`. The driver asks it for steps, runs them on the compute thread one after
the other, and hands the results back. A mixed worker has two drivers, one for each role, whose steps take turns on that
thread.

A change of role makes other drivers, each with a role and an incarnation of its own, over the same engine and thread. They get
ready while the present ones are drained. Then these end and those register (`worker.changeover`).
"""

import asyncio
import contextlib
import faulthandler
import logging
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from engine.engine import Engine
from proto import limits
from proto.errors import CrossdockError
from proto.messages import Hello, Message, Role, StatusRequest
from proto.parts import Capacity, Held
from proto.progress import Hung
from proto.status import KvHeld
from runtime.link.connection_pool import ConnectionPool
from runtime.link.peer import LinkCounters, LinkSettings
from runtime.metrics.common import link_counters
from runtime.metrics.registry import MetricsRegistry
from runtime.metrics.server import MetricsPage
from runtime.process import clock
from runtime.process.driver import Stop, watched
from runtime.process.exits import HUNG_EXIT
from runtime.process.log import Log
from runtime.process.zmq_sockets import close_sockets
from runtime.settings.workers import WorkerSettings
from worker.changeover import Changeover
from worker.gpu_faults import end_if_gpu_is_lost
from worker.registration import Registration
from worker.step_watch import StepWatch

_STEP_END_S = 5.0

NOTHING_HELD = KvHeld(0, 0, 0)

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class ComputeStep(Generic[ResultT]):
    tokens: int
    compute: Callable[[], ResultT]  # called on the compute thread
    done: Callable[[ResultT], Callable[[], None]]  # takes the result; returns what can wait until the next step runs
    failed: Callable[[str], None]
    log_fields: Mapping[str, object] = field(default_factory=dict)


class WorkerRole(Protocol):
    """The differences between prefill and decode: `prefill_worker.worker.PrefillRole`,
    `decode_worker.worker.DecodeRole`."""

    @property
    def registry(self) -> MetricsRegistry: ...
    @property
    def ports(self) -> Mapping[str, LinkCounters]:
        """Counters of the ports that this role listens on, by name."""

    async def start(self) -> str:
        """Open those ports. Returns the address that others connect to; empty if there is none. Raises `CannotBind`."""

    def registered(self) -> None:
        """The coordinator knows this worker, for the first time or again."""

    def order(self, message: Message, blob: bytes) -> None:
        """Carry out an order of the coordinator. Raises `RemoteProtocolError`."""

    def held(self) -> tuple[Held, ...]: ...
    def kv_held(self) -> KvHeld: ...
    def coordinator_lost(self, reason: str) -> None: ...
    def gateway_lost(self, incarnation: int, reason: str) -> None: ...
    def gateway_said(self, incarnation: int, message: Message) -> None:
        """A gateway has sent this on the link that the worker has made to it. Raises `RemoteProtocolError`."""

    def next_step(self) -> ComputeStep[Any] | None:
        """The next step to run; None while there is none. `WorkerDriver.wake` says when that changes."""

    async def close_transfers(self) -> None:
        """Ends what is under way. May raise `TimeoutError`."""

    async def close(self) -> None: ...


class WorkerDriver:
    def __init__(
        self,
        settings: WorkerSettings,
        engine: Engine,
        make_role: "Callable[[Engine, WorkerDriver], WorkerRole]",
        *,
        thread: Executor,
        name: str,
        log: Log,
        links: LinkSettings,
        metrics_server: MetricsPage,
        watch: StepWatch,
        say_ready: Callable[[Role], None],
        changeover: Changeover,
        process: str = "",
        before: "Sequence[WorkerDriver]" = (),
    ) -> None:
        """`thread` is the compute thread, on which `engine` was loaded, and `watch` looks after it. `say_ready(role)` is called
        after each registration. `changeover` is that of all drivers of the process. `process` is the name of the mixed worker
        that this is one role of; `before` are the drivers that this one follows, in another role of the process."""
        self.settings, self.log, self.name, self.links = settings, log, name, links
        self.hello = _hello(settings, engine, name, metrics_server.address, is_mixed=bool(process))
        flipped_from = before[0].hello.incarnation if before else 0
        self.hello = msgspec.structs.replace(self.hello, process=process, flipped_from=flipped_from)
        """The `Hello` of this worker, without its address, which is only known when the role has started."""
        self.registration = Registration(self, settings=settings, hello=self.hello, log=log, links=links)
        self._changeover = changeover
        changeover.add(self.registration)
        self.gateways = ConnectionPool(
            hello=self.hello,
            to=Role.GATEWAY,
            on_message=lambda peer, message, _: self.role.gateway_said(peer.incarnation, message),
            on_lost=lambda incarnation, reason: self.role.gateway_lost(incarnation, reason),
            on_idle=self.registration.look,
            settings=links,
        )
        self._thread = thread
        self._watch = watch
        self._say_ready = say_ready
        self._address: str | None = None  # for others, once the role has started; empty if they need none
        self._work = asyncio.Event()
        self._metrics_server = metrics_server
        self.role = make_role(engine, self)

    def wake(self) -> None:
        """There may be a step to run."""
        self._work.set()

    async def prepare(self) -> None:
        """Open what others connect to. Raises `CannotBind`."""
        self._address = await self.role.start()

    async def run(self, stop: Stop) -> None:
        """Register, and run steps until told to stop or until another role takes over. Before a stop, drain the worker. Raises
        `CannotBind`, errors of a step that are not failures of the model, and `TimeoutError` if a transfer does not end
        although another role needs the pool."""
        if self._address is None:
            await self.prepare()
        self._show_metrics()
        try:
            await self._work_until_stopped(self._address or "", stop)
        finally:
            await self.close()

    async def close(self) -> None:
        await self.role.close()
        await self.gateways.close()

    def _show_metrics(self) -> None:
        registry = self.role.registry
        registry.introduce(name=self.name, model=self.settings.served_model_id)
        ends = {**self.role.ports, "coordinator": self.registration.counters}
        link_counters(registry, ends, lambda: self.registration.up)
        self._metrics_server.show(registry, self.registration.not_ready)

    async def _work_until_stopped(self, address: str, stop: Stop) -> None:
        await self.registration.start(address)
        loop = asyncio.get_running_loop()
        stepping, stopping = watched(self._run_steps()), loop.create_task(stop.wait())
        watching, flipping = watched(self._end_if_hung()), loop.create_task(self.registration.has_flipped())
        try:
            await asyncio.wait({stepping, stopping, flipping}, return_when=asyncio.FIRST_COMPLETED)
            if not (flipping.done() or stepping.done()):
                await self.registration.leave(self.settings.drain_timeout_s, stop)
        finally:
            for task in (stopping, stepping, watching, flipping):
                task.cancel()
            self._changeover.ordered(self.registration, None)
            await asyncio.wait({stepping}, timeout=_STEP_END_S)
            await self.registration.close()
            # A timeout means that a transfer thread is stuck with a dead peer. A process that ends may go on regardless.
            with contextlib.suppress(*(() if self._changeover.is_decided else (TimeoutError,))):
                await self.role.close_transfers()
        if stepping.done() and not stepping.cancelled():
            stepping.result()

    # --- for the registration (`Registered`) --------------------------------------------------------------------------

    def held(self) -> tuple[Held, ...]:
        return self.role.held()

    def is_idle(self) -> bool:
        return self.gateways.idle

    def is_quiet(self) -> bool:
        return self.role.kv_held() == NOTHING_HELD

    def registered(self) -> None:
        self._say_ready(self.hello.role)
        self.role.registered()

    def coordinator_lost(self, reason: str) -> None:
        self.role.coordinator_lost(reason)

    def flip_ordered(self, role: Role | None) -> None:
        self._changeover.ordered(self.registration, role)

    def may_flip(self) -> None:
        self._changeover.look()

    def order(self, message: Message, blob: bytes) -> None:
        if isinstance(message, StatusRequest):
            self.registration.send(self.role.kv_held())
        else:
            self.role.order(message, blob)

    # --- steps ----------------------------------------------------------------------------------------------------------

    async def _run_steps(self) -> None:
        while True:
            running = self._start_step()
            if running is None:
                self._work.clear()
                await self._work.wait()
            while running is not None:
                running = await self._finish_step(*running)

    def _start_step(self) -> "tuple[ComputeStep[Any], asyncio.Future[Any]] | None":
        step = self.role.next_step()
        if step is None:
            return None
        return step, asyncio.get_running_loop().run_in_executor(self._thread, self._compute, step)

    def _compute(self, step: ComputeStep[ResultT]) -> ResultT:
        """Runs on the compute thread."""
        self._watch.begin(step.tokens, clock.now())
        try:
            return step.compute()
        finally:
            self._watch.end(clock.now())

    async def _finish_step(
        self, step: ComputeStep[ResultT], computing: "asyncio.Future[ResultT]"
    ) -> "tuple[ComputeStep[Any], asyncio.Future[Any]] | None":
        """Returns the step that has started next, if any."""
        try:
            result = await computing
        except (CrossdockError, RuntimeError, ValueError, IndexError) as error:
            self.log.exception("step failed", **step.log_fields)
            step.failed(str(error))
            end_if_gpu_is_lost(error, self.log)
            return None
        finish_later = step.done(result)
        following = self._start_step()
        finish_later()
        return following

    async def _end_if_hung(self) -> None:
        """Watch the compute thread, which cannot be interrupted. If its step hangs, tell the coordinator and end the
        process."""
        while self._watch.timeout_s:
            await asyncio.sleep(self._watch.look_every_s)
            ran_s = self._watch.hung_for(clock.now())
            if ran_s is None:
                continue
            self.log.critical("a step hangs (--step-timeout-ms); ending", ran_s=round(ran_s, 1))
            self.registration.send(Hung(1000 * ran_s))
            faulthandler.dump_traceback(sys.stderr)
            logging.shutdown()
            close_sockets()
            os._exit(HUNG_EXIT)


def _hello(settings: WorkerSettings, engine: Engine, name: str, metrics: str, *, is_mixed: bool) -> Hello:
    """`metrics` is where this worker can be observed. `is_mixed`: it is one role of a mixed worker."""
    info = engine.info
    computes = settings.stall_share > 0 and settings.prefix_cache and not engine.on_gpu
    return Hello(
        version=limits.PROTOCOL_VERSION,
        role=Role(settings.role),
        incarnation=clock.new_incarnation(),
        name=name,
        model=settings.pool,
        fingerprint=info.fingerprint,
        capacity=Capacity(
            engine.blocks,
            info.block_size,
            settings.max_seqs,
            info.context_tokens,
            settings.step_tokens_on(engine.on_gpu),
            settings.role == "decode" and computes and not is_mixed,
            settings.prefix_cache,
            settings.tier_blocks(info.block_bytes),
        ),
        host=socket.gethostname(),
        pid=os.getpid(),
        metrics=metrics,
        numerics=engine.numerics,
        attention_tokens=info.attention_tokens,
        revision=settings.revision,
    )
