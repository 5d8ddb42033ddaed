"""The part of the cluster that simulated processes may use."""

from coordinator.policy_versions import Versions
from tests.world.faults.ledger import CheckedLedger
from tests.world.faults.oracles import Oracles
from tests.world.faults.plan import FaultPlan
from tests.world.network import NetworkedWorld
from tests.world.world import SimulatedProcess


class FaultSurroundings(NetworkedWorld):
    plan: FaultPlan
    versions: Versions
    """Versions of the policy, which outlast the coordinator."""
    ledger: CheckedLedger
    oracles: Oracles
    slow_disk_s: float
    restart_s = 0.5
    """A worker that ended itself is started again after this time."""

    def end(self, process: SimulatedProcess, for_s: float) -> None:
        """End a process without warning; it is started again after `for_s`."""
        raise NotImplementedError

    def worker_goes(self, worker: SimulatedProcess, why: str) -> None:
        """Ends a worker in order."""
        raise NotImplementedError

    def worker_flips(self, worker: SimulatedProcess) -> None:
        """Ends a worker in its present role and begins it in the new one, in the same process."""
        raise NotImplementedError

    def begins_anew(self, coordinator: SimulatedProcess) -> None:
        """Starts a coordinator again that stalled for so long that its peers left it."""
        raise NotImplementedError
