"""The processes that the coordinator knows, and what it remembers of those that are gone. Pure."""

from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence

from proto.messages import Hello, Role
from proto.status import AutopilotStatus
from scheduler.request import LOST_PROCESSES_MAX, LostProcess, Request
from scheduler.workers.flip import RunningFlip
from scheduler.workers.worker import Worker

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
