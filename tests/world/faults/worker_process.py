"""Shared base of both kinds of simulated workers: allocator and prefix cache, steps that take time, drain, change of role."""

from collections.abc import Callable, Sequence
from typing import Any

from engine.kv.allocator import BlockAllocator
from proto.errors import RemoteProtocolError
from proto.limits import PROTOCOL_VERSION
from proto.messages import Destination, Hello, Message, Role, Tokens
from proto.parts import Capacity
from proto.progress import Hung
from tests.world.connection_pool import SimulatedConnectionPool
from tests.world.faults.lineup import Lineup
from tests.world.faults.oracles import DRAINED
from tests.world.faults.surroundings import FaultSurroundings
from tests.world.links import Link
from tests.world.registration import SimulatedRegistration
from tests.world.toy_model import Toy
from tests.world.transfers.connections import PoolProcess
from tests.world.transfers.receiver import SimulatedReceiver
from tests.world.transfers.sender import SimulatedSender
from tests.world.world import SimulationViolation
from worker.service import GO_AFTER_S
from worker.step_watch import StepWatch

STEP_TIMEOUT_S = 1.0
MODEL, FINGERPRINT = "toy", "f"


def role_of(name: str) -> Role:
    """The role in which a worker of this name starts."""
    return Role(name.partition("-")[0])


class WorkerGateways(SimulatedConnectionPool):
    """Links to gateways; every token that a worker sends passes here, and none may be sent twice."""

    def send(self, to: Destination, message: Message, blob: bytes = b"") -> None:
        assert isinstance(message, Tokens) and isinstance(self.process, WorkerProcess)
        self.process.cluster.oracles.emitted(self.process.name, message)
        super().send(to, message, blob)


class WorkerProcess(PoolProcess):
    """Shared base of prefill and decode worker processes."""

    role: Role
    registration: SimulatedRegistration
    gateways: WorkerGateways
    transfers: tuple[SimulatedSender | SimulatedReceiver, ...]
    toy: Toy
    allocator: BlockAllocator

    def __init__(self, cluster: FaultSurroundings, lineup: Lineup) -> None:
        super().__init__(cluster, lineup.name)
        self.cluster, self.lineup = cluster, lineup
        lineup.halves.append(self)
        plan = cluster.plan
        self.kv_blocks, self.block_size = lineup.blocks_of(self.role), plan.block_size[role_of(lineup.name)]
        self.slow = 1.0
        self.fail_step = ""
        """Makes the next step fail: in the model (`error`), or with logits that are not finite (`nan`)."""
        self.hang_s = 0.0
        """How much longer the next step takes."""
        self.watch = StepWatch(STEP_TIMEOUT_S)
        self._hangs = False
        self.toy = lineup.toy
        self.allocator = BlockAllocator(self.kv_blocks, lineup.pool)
        self.hello = Hello(
            PROTOCOL_VERSION, self.role, self.incarnation, lineup.name_of(self.role), MODEL, FINGERPRINT, f"{lineup.name}/kv",
            Capacity(
                self.kv_blocks, self.block_size, plan.max_seqs, plan.context_tokens,
                computes_suffixes=self.role is Role.DECODE and lineup.role is Role.DECODE and plan.computes_suffixes,
                fetches=plan.fetches,
                tier_blocks=plan.tier_slots if self.role is Role.PREFILL else 0,
            ),
            host="sim", pid=lineup.pid, flipped_from=lineup.flipped_from,
            process=lineup.name if lineup.role is Role.MIXED else "",
        )  # fmt: skip

    def start(self) -> None:
        self.registration.client.start()
        self.after(self.watch.look_every_s, self._look)

    def _look(self) -> None:
        """As `worker.driver`."""
        ran_s = self.watch.hung_for(self.now())
        if ran_s is None:
            self.after(self.watch.look_every_s, self._look)
            return
        self.log(f"its step hangs for {ran_s:.1f} s")
        if not self._hangs:
            raise SimulationViolation("no false alarm", f"{self.name} ends itself, though its step does not hang")
        self.registration.send(Hung(1000 * ran_s))
        self.cluster.end(self, self.cluster.restart_s)

    def compute(self, tokens: int, seconds: float, then: Callable[..., None], *arguments: Any) -> None:
        """Runs a step on the thread that computes."""
        self.watch.begin(tokens, self.now())
        hang_s, self.hang_s = self.hang_s, 0.0
        self._hangs = hang_s > STEP_TIMEOUT_S
        self.after(seconds + hang_s, self._computed, then, arguments)

    def _computed(self, then: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        if self.resumed_at == self.world.now:
            # The process was stopped in the middle of the step, so the rest of the step still has to run.
            self.after(0.001, self._computed, then, arguments)
            return
        self.watch.end(self.now())
        self._hangs = False
        then(*arguments)

    def drain(self, grace_s: float) -> None:
        """As on SIGTERM."""
        self.registration.leave(grace_s)
        self.after(grace_s + GO_AFTER_S, self._go, "its time is up")

    def may_go(self) -> None:
        self.after(0.0, self._go, DRAINED)

    def is_quiet(self) -> bool:
        return not (self.allocator.held_count or self.allocator.quarantined_count) and self.moves_nothing

    @property
    def moves_nothing(self) -> bool:
        """No KV is on its way here, or from here."""
        return all(end.idle for end in self.transfers)

    def break_pair(self) -> None:
        """A fault: the connection to one peer fails."""
        self.world.random.choice(self.transfers).break_pair()

    def report_cache(self) -> None:
        self.registration.report_cache(self.allocator.take_changes)

    def _go(self, why: str) -> None:
        self.log("goes", why)
        self.cluster.worker_goes(self, why)

    def step_s(self, least: float, most: float) -> float:
        return self.world.random.uniform(least, most) * self.slow

    def check_writable(self, blocks: Sequence[int]) -> None:
        """Checks that no other request holds these blocks, and that none of them can be found in the cache."""
        for block in blocks:
            alone = self.allocator.refs(block) == 1 == self.lineup.pool.holders.get(block)
            if not alone and not self.allocator.is_quarantined(block):
                raise SimulationViolation(
                    "no block is freed early", f"{self.name} receives KV into block {block}, not its own"
                )

    def check_held(self, blocks: list[int] | tuple[int, ...], request_id: str) -> None:
        for block in blocks:
            if not self.allocator.refs(block):
                raise SimulationViolation(
                    "no block is freed early", f"{self.name} computes in block {block}, free", request_id
                )


def unexpected(_: Link, message: Message, __: bytes) -> None:
    raise RemoteProtocolError(f"a gateway sent {type(message).__name__}")
