"""The processes that the coordinator knows, and what it remembers of those that are gone. Pure."""

from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf

from proto.messages import Hello, Role
from proto.status import AutopilotStatus, FlipStatus
from scheduler.request import LOST_PROCESSES_MAX, LostProcess, Request
from scheduler.workers.worker import Worker


class FlipState(StrEnum):
    DRAINING = "draining"  # it serves in its old role to the end of what it has
    REGISTERING = "registering"  # it holds nothing, was told so, and is to come back in the new role
    DONE = "done"
    FAILED = "failed"


@dataclass(eq=False)
class RunningFlip:
    hellos: Sequence[Hello]  # the process's messages in its old role: one, or two of a mixed worker
    role: Role  # the new one
    force: bool
    why: str
    ordered_at: float
    state: FlipState = FlipState.DRAINING
    failure: str = ""
    drained_at: float = 0.0
    registered_at: float = 0.0
    first_step_at: float = 0.0  # 0: none has run yet
    registered: set[Role] = field(default_factory=set)  # roles in which it has come back
    kept: list[tuple[str, int]] = field(default_factory=list)
    """Interrupted streams of this process whose gateways are not told yet. Their next attempts use the KV that the process has
    kept, once it prefills."""
    kept_until: float = inf

    @property
    def name(self) -> str:
        return self.hellos[0].process or self.hellos[0].name

    @property
    def before(self) -> Role:
        return Role.MIXED if len(self.hellos) > 1 else Role(self.hellos[0].role)

    @property
    def incarnations(self) -> tuple[int, ...]:
        """Its incarnations in the old role."""
        return tuple(hello.incarnation for hello in self.hellos)

    def keeps(self, role: Role) -> bool:
        """Whether the KV of streams on its worker of this role is of use to the process afterwards."""
        return role is Role.DECODE and Role.PREFILL in self.role.registers_as

    def came_back(self, hello: Hello) -> bool:
        """Note that the process has come back in this role. Returns True once it has registered in all its new roles."""
        self.registered.add(hello.role)
        return self.registered == set(self.role.registers_as)

    def status(self) -> FlipStatus:
        def ms(since: float, until: float) -> float:
            return max(0.0, 1000 * (until - since)) if until else 0.0

        return FlipStatus(
            self.name,
            self.hellos[0].pid,
            self.before,
            self.role,
            self.state.value,
            self.why,
            self.failure,
            ms(self.ordered_at, self.drained_at),
            ms(self.drained_at, self.registered_at),
            ms(self.registered_at, self.first_step_at if self.state is FlipState.DONE else 0.0),
            self.hellos[0].model,
        )


FLIPS_SHOWN = 64


class Members:
    def __init__(self, workers: Mapping[int, Worker]) -> None:
        self._workers = workers
        self.peers: dict[int, Hello] = {}  # processes with a connection
        self.fenced: OrderedDict[int, Hello] = OrderedDict()  # the last workers that hung, oldest first
        self.names: OrderedDict[str, int] = OrderedDict()
        """Names of the last processes that joined, and their incarnations."""
        self.lost_processes: deque[LostProcess] = deque(maxlen=LOST_PROCESSES_MAX)
        self.lost_gateways: dict[int, Hello] = {}  # those with requests that have not ended yet
        self.orphans: dict[str, Request] = {}  # these requests
        self.empty_pools: OrderedDict[str, float] = OrderedDict()
        """Models without a worker, and since when; longest first."""
        self.drain_orders: OrderedDict[int, float | None] = OrderedDict()
        """The last drain orders from people, by the worker's incarnation: the time after which running requests are handed
        over; None: the drain was undone."""
        self.flipping: dict[int, RunningFlip] = {}
        """Workers that are changing their role, by their incarnations in the old role; at most `flips_at_once` for each
        model."""
        self.flips: deque[RunningFlip] = deque(maxlen=FLIPS_SHOWN)  # the last role changes, also those in `flipping`
        self.unproven: dict[int, RunningFlip] = {}
        """Role changes that are done, by the new incarnation, until its first step in the new role."""
        self.keeping: dict[RunningFlip, None] = {}
        """Role changes whose streams wait to be resumed from the KV that the process has kept."""
        self.autopilots: dict[str, tuple[AutopilotStatus, float]] = {}
        """The last status of each model's autopilot, and its time."""

    def gateways(self) -> list[int]:
        return [incarnation for incarnation, hello in self.peers.items() if hello.role is Role.GATEWAY]

    def named(self, name: str) -> list[Worker]:
        """Those that people mean by a name: one, or both roles of a mixed worker; more if several processes have it."""
        own = [worker for worker in self._workers.values() if worker.hello.name == name]
        return own or [worker for worker in self._workers.values() if worker.hello.process == name]

    def why_ambiguous(self, name: str, found: Sequence[Worker]) -> str:
        """Returns why a name does not mean one worker, if `found` have it; empty if it does."""
        if not found:
            names = sorted({worker.process_name for worker in self._workers.values()})
            return f"no worker is called {name!r}; there are {', '.join(names) or 'none'}"
        is_process = found[0].hello.name != name
        processes = {(worker.hello.host, worker.hello.pid) if is_process else worker.incarnation for worker in found}
        if len(processes) > 1:
            return f"{len(processes)} workers are called {name!r}: give each a --name of its own"
        return ""

    def running_flips(self) -> list[RunningFlip]:
        """Returns each running change once; a mixed worker's change is stored under both its incarnations."""
        return list(dict.fromkeys(self.flipping.values()))

    def confirm_flip(self, incarnation: int, now: float) -> None:
        """A worker has run a step, which confirms a role change of its process."""
        flip = self.unproven.pop(incarnation, None)
        if flip is not None and not flip.first_step_at:
            flip.first_step_at = now
