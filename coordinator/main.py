"""The coordinator process: one control port, the core, and nothing else."""

import asyncio
import os
import socket

from coordinator.core import Core
from coordinator.events import Action, Event, Limits, Misbehaved, Moved, PeerDown, PeerUp, Received, Send, Tick
from coordinator.lifecycle import TERMINAL
from proto import limits
from proto.errors import RemoteProtocolError
from proto.messages import Hello, Message, Role
from runtime import clock, log, machine
from runtime.driver import CoreDriver, run_process
from runtime.link import CannotBind, LinkServer, LinkSettings, Peer, is_orderly
from runtime.settings import CoordinatorSettings


class Coordinator:
    """Wires the core to its control port."""

    def __init__(self, settings: CoordinatorSettings) -> None:
        name = settings.name or f"coordinator-{os.getpid()}"
        self.log = log.configure(level=settings.log_level, fmt=settings.log_format, process=name)
        self.core = Core(
            Limits(
                queue_requests_max=settings.queue_requests_max,
                queue_tokens_max=settings.queue_tokens_max,
                tenant_queue_requests_max=settings.tenant_queue_requests_max,
                queue_wait_s_max=settings.queue_wait_s_max,
                quantum_tokens=settings.quantum_tokens,
                bypasses_max=settings.bypasses_max,
                step_tokens=settings.step_tokens,
                steps_in_flight=settings.steps_in_flight,
                attempts_max=settings.attempts_max,
            )
        )
        self.driver: CoreDriver[Event, Action] = CoreDriver(self.core, perform=self._perform, tick=Tick())
        self.peers: dict[int, Peer] = {}
        self.server = LinkServer(
            bind=settings.bind,
            hello=Hello(
                limits.PROTOCOL_VERSION,
                Role.COORDINATOR,
                clock.new_epoch(),
                name,
                host=socket.gethostname(),
                pid=os.getpid(),
            ),
            accept=self.core.refusal,
            on_up=self._up,
            on_message=self._message,
            on_down=self._down,
            settings=LinkSettings(heartbeat_ms=settings.heartbeat_ms),
        )

    async def run(self, stop: asyncio.Event) -> int:
        try:
            address = await self.server.start()
        except CannotBind as error:
            machine.check_listening("--bind", error)
            self.log.error("cannot start", error=f"--bind: {error.strerror}")
            return 1
        self.log.info("listening", address=address)
        await stop.wait()
        self.log.info("stopping", running=len(self.core.requests))
        await self.server.close()
        self.driver.close()
        return 0

    def _up(self, peer: Peer) -> None:
        earlier = self.peers.get(peer.epoch)
        if earlier is not None:
            self.server.drop(earlier, "connected again")
        self.peers[peer.epoch] = peer
        emit = self.log.debug if peer.hello.role is Role.OBSERVER else self.log.info
        emit("joined", peer=peer.hello.name, role=peer.hello.role.value, model=peer.hello.model)
        self.driver.post(PeerUp(peer.epoch, peer.hello))

    def _down(self, peer: Peer, reason: str) -> None:
        if self.peers.get(peer.epoch) is peer:
            del self.peers[peer.epoch]
            quiet = peer.hello.role is Role.OBSERVER
            emit = self.log.debug if quiet else self.log.info if is_orderly(reason) else self.log.warning
            emit("left", peer=peer.hello.name, role=peer.hello.role.value, reason=reason)
            self.driver.post(PeerDown(peer.epoch, reason))

    def _message(self, peer: Peer, message: Message, blob: bytes) -> None:
        if self.peers.get(peer.epoch) is not peer:
            raise RemoteProtocolError("this link was replaced by a newer one")
        self.core.counters["protocol_errors"] = self.server.counters.protocol_errors
        self.driver.post(Received(peer.epoch, message, blob))

    def _perform(self, action: Action) -> None:
        match action:
            case Send(epoch, message, blob):
                peer = self.peers.get(epoch)
                if peer is not None:
                    peer.send(message, blob)
            case Moved(request_id, attempt, state, why):
                emit = self.log.info if state in TERMINAL else self.log.debug
                emit("request", request_id=request_id, attempt=attempt, state=state.value, why=why)
            case Misbehaved(epoch, reason):
                self.server.counters.protocol_errors += 1
                peer = self.peers.get(epoch)
                if peer is not None:
                    # Not from inside the core's own event: dropping makes one.
                    asyncio.get_running_loop().call_soon(self.server.drop, peer, reason)


def run(settings: CoordinatorSettings) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code. Raises `ConfigError`."""
    return run_process(lambda stop: Coordinator(settings).run(stop))
