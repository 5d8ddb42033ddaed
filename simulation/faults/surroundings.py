"""What simulated processes may use of the cluster that they run in."""

from coordinator.policy.versions import Versions
from simulation.faults.ledger import Ledger
from simulation.faults.oracles import Oracles
from simulation.faults.plan import Plan
from simulation.world.network import NetworkedWorld
from simulation.world.world import Process


class Surroundings(NetworkedWorld):
    plan: Plan
    versions: Versions
    """Versions of the policy: they outlast the coordinator."""
    ledger: Ledger
    oracles: Oracles
    slow_disk_s: float
    restart_s = 0.5
    """A worker that ended itself is started again within so long."""

    def end(self, process: Process, for_s: float) -> None:
        """End a process without warning; it is started again after `for_s`."""
        raise NotImplementedError

    def worker_goes(self, worker: Process, why: str) -> None:
        """A worker ends in order."""
        raise NotImplementedError

    def worker_flips(self, worker: Process) -> None:
        """A worker ends in its role, and begins in the other, in one process."""
        raise NotImplementedError

    def begins_anew(self, coordinator: Process) -> None:
        """The coordinator has stalled for so long that its peers left it: it starts again."""
        raise NotImplementedError
