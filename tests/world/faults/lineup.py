"""The roles that one simulated worker process has at a time, as `worker.process`: one, or both of a mixed worker."""

from itertools import chain
from operator import itemgetter

from engine.kv.allocator import BlockPool
from engine.kv.split import prefill_blocks
from proto.messages import Role
from tests.world.faults.surroundings import FaultSurroundings
from tests.world.registration import Reports
from tests.world.toy_model import Toy
from tests.world.transfers.connections import PoolProcess
from tests.world.world import Timer
from worker.changeover import Changeover

MIXED_BLOCKS_MIN = 48
"""The least pool for a mixed worker: each of its two parts must have room for any request."""


class Lineup:
    def __init__(
        self,
        cluster: FaultSurroundings,
        name: str,
        role: Role,
        blocks: int,
        block_size: int,
        before: "Lineup | None" = None,
    ) -> None:
        """Makes the roles of a process. `before`: the same process in its last role, whose pool and cache stay."""
        self.cluster, self.name, self.role = cluster, name, role
        self.pool: BlockPool = before.pool if before is not None else BlockPool(blocks)
        self.toy: Toy = before.toy if before is not None else Toy(blocks, block_size)
        self.flipped_from = before.halves[0].incarnation if before is not None else 0
        self._earlier = sorted(chain(*before._reports), key=itemgetter(0)) if before is not None else []
        self._reports: list[Reports] = []
        self.pid: int = before.pid if before is not None else cluster.new_number()
        self.halves: list[PoolProcess] = []
        self.changeover = Changeover(self._prepare, self._drop)
        self.next_role: Role | None = None
        """Ready to register in."""
        self.flip_ends = ""
        """The fault in its next change of role: the change cannot be prepared (`cannot`), or the process dies in it
        (`dies`)."""
        self._preparing: Timer | None = None
        self._goes_over = False

    def name_of(self, role: Role) -> str:
        return f"{self.name}-{role}" if self.role is Role.MIXED else self.name

    def blocks_of(self, role: Role) -> int:
        """Returns how many blocks this role may hold."""
        if self.role is not Role.MIXED:
            return self.pool.total
        prefill = prefill_blocks(self.pool.total, 1)
        return prefill if role is Role.PREFILL else self.pool.total - prefill

    def reports(self) -> Reports:
        """Returns a list for a registration's reports of finished requests. The first takes over those of the last role."""
        self._reports.append(self._earlier)
        self._earlier = []
        return self._reports[-1]

    def flipped(self) -> None:
        """Changes the role, which is decided: all present registrations end."""
        if not self._goes_over:
            self._goes_over = True
            self.halves[0].after(0.0, self._go_over)

    def _go_over(self) -> None:
        head = self.halves[0]
        if self.flip_ends == "dies":
            head.log("dies in its change of role")
            self.cluster.end(head, self.cluster.restart_s)
        else:
            head.log("changes its role")
            self.cluster.worker_flips(head)

    def _prepare(self, role: Role) -> None:
        """Prepares a role as `worker.process` does: after a while it is ready, or has failed."""
        fails = self.flip_ends == "cannot" or (role is Role.MIXED and self.pool.total < MIXED_BLOCKS_MIN)
        delay_s = self.cluster.random.uniform(0.001, 0.05)
        self._preparing = self.halves[0].after(delay_s, self._prepared, role, fails)

    def _prepared(self, role: Role, fails: bool) -> None:
        self._preparing = None
        if fails:
            self.changeover.failed("planted")
        else:
            self.next_role = role
            self.changeover.prepared()

    def _drop(self) -> None:
        if self._preparing is not None:
            self._preparing.cancel()
        self._preparing, self.next_role = None, None
