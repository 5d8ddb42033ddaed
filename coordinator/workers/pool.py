"""Workers, and what is reserved on them. A pool is the workers of one model.

Room on workers is kept in three ways. A *holding* (`Worker.holdings`) is what an attempt has on a worker; it lasts until
the worker says that it has let go. A *carried reservation* (`Candidates.claims`) is the holding of a decode worker that
goes over to a request whose prefill worker was lost, so that nobody else gets it before the next attempt; it lasts until
the request is placed or ends. A *reservation* (`RoomClasses.reservation`) has no blocks: it closes one worker to everybody
but one large request that was passed over too often, until that request fits there. The first two are counted in blocks,
the third is not.
"""

from coordinator.score import Weights
from coordinator.step_pace import StepLimits, StepPace
from coordinator.workers.candidates import Candidates
from coordinator.workers.step_times import StepSample
from coordinator.workers.traffic import Traffic
from coordinator.workers.worker import Worker
from proto.held import Capacity
from proto.messages import Role, Submit


class Pool(Candidates):
    """The workers that serve one model; `admission` lets in only those between which KV can cross."""

    def __init__(self, model: str, weights: Weights | None = None, steps: StepLimits | None = None) -> None:
        super().__init__(weights or Weights())
        self._step_limits = steps or StepLimits()
        self.model = model
        self.traffic = Traffic()
        self.step_times = {Role.PREFILL: StepSample(), Role.DECODE: StepSample()}
        self.context_tokens = 0
        """The longest prompt + output every worker takes, or took before all were lost."""
        self._lost: dict[Role, tuple[Worker, float]] = {}
        """The last worker of each role that has none now, and when it was lost. A drained worker is not lost."""
        self._tokens_per_s, self._measured = 0.0, 0
        """The sum of the rates of prefill workers, and of how many."""
        self.no_room = self.cache_waits = 0
        """Turns that passed a request over: without room for it, or for a worker that has more of it cached."""
        self.finished = 0
        """Requests."""
        self.eligible_for: tuple[frozenset[Capacity], ...] | None = None
        """The `capacities` for which the requests that wait were last looked through."""

    def add(self, worker: Worker) -> None:
        self._side(worker)[worker.incarnation] = worker
        self._lost.pop(worker.hello.role, None)
        self.locality.join(worker.incarnation, worker.capacity.kv_blocks, worker.hello.role)
        worker.on_change = self.changed
        if worker.hello.role is Role.DECODE:
            worker.shares = self.shares
        limits = self._step_limits
        worker.pace = StepPace(limits._replace(tokens=limits.tokens or worker.capacity.step_tokens))
        self.changed(worker)
        self.wakeups.look_anew()
        self._measure()

    def remove(self, worker: Worker, now: float) -> None:
        side = self._side(worker)
        del side[worker.incarnation]
        if not side and not worker.draining:
            self._lost[worker.hello.role] = worker, now
        self.locality.leave(worker.incarnation)
        self.breakers.leave(worker.incarnation)
        self.wakeups.left(worker)
        self.hosts.pop(worker.incarnation, None)
        self._least_full.drop(worker.incarnation)
        self.targets.leave(worker)
        if worker.shares is not None:
            for key, holding in worker.holdings.items():
                if holding.path:
                    self.shares.remove(holding.path, worker.incarnation, key)
            worker.shares = None
        self._finish.drop(worker.incarnation)
        self.wakeups.look_anew()
        self._measure()

    # --- trouble --------------------------------------------------------------------------------------------------------

    def record_failure(self, worker: Worker) -> None:
        """Something failed on it."""
        failure_rate = self.failure_rate(worker)
        worker.failure_rate, worker.trouble_at = failure_rate + 0.2 * (1.0 - failure_rate), self.finished

    def record_success(self) -> None:
        """Something went well: old troubles count less, for whoever had them, or they would never be tried again."""
        self.finished += 1

    def failure_rate(self, worker: Worker) -> float:
        if not worker.failure_rate:
            return 0.0
        failure_rate = worker.failure_rate * 0.95 ** (self.finished - worker.trouble_at)
        return failure_rate if failure_rate > 0.01 else 0.0

    def hash_block_size(self) -> int:
        """Tokens that one hash of a prompt covers: the smallest block size, of which all others are multiples."""
        return min(worker.capacity.block_size for worker in (*self.prefill.values(), *self.decode.values()))

    def servable(self) -> bool:
        """Whether workers of both roles take new work."""
        return not self.lacks()

    def lacks(self) -> str:
        """What keeps it from taking new work; empty where nothing does."""
        for role, side in ((Role.PREFILL, self.prefill), (Role.DECODE, self.decode)):
            if not side:
                return f"no {role} worker is up"
            if all(worker.draining for worker in side.values()):
                return f"every {role} worker is draining"
        return ""

    def awaits_restart(self, now: float, within_s: float) -> bool:
        """Whether each role has workers that take new work, or lost its last one at most `within_s` ago. Whoever supervises
        that process is about to start it again."""
        for role, side in ((Role.PREFILL, self.prefill), (Role.DECODE, self.decode)):
            if any(not worker.draining for worker in side.values()):
                continue
            if side or role not in self._lost or now >= self._lost[role][1] + within_s:
                return False
        return True

    def measure(self, worker: Worker, tokens: int, step_ms: float) -> None:
        """A prefill step of so many tokens has been computed."""
        before = worker.tokens_per_s
        worker.measure(tokens, step_ms)
        self.changed(worker)
        self._measured += not before
        self._tokens_per_s += worker.tokens_per_s - before

    def tokens_per_s(self) -> float:
        """Prefill rate of all workers together; 0 until something was measured. Those that were not measured count as the
        mean of the others."""
        return self._tokens_per_s * len(self.prefill) / self._measured if self._measured else 0.0

    def fastest_tokens_per_s(self) -> float:
        """Of the workers that take prompts, the highest rate measured with full steps; 0 where there is none."""
        rates = (w.tokens_per_s for w in self.prefill.values() if w.has_run_full and not w.draining)
        return max(rates, default=0.0)

    def least_prefill_s(self, tokens: int) -> float:
        """How long the worker that has it first takes for so much of one prompt behind its steps in flight. One that is not
        measured is taken to be as fast as the fastest; 0 where none is."""
        fastest = self.fastest_tokens_per_s()
        if not fastest:
            return 0.0
        takers = (worker for worker in self.prefill.values() if not worker.draining)
        return min((w.tokens_in_flight + tokens) / (w.tokens_per_s if w.has_run_full else fastest) for w in takers)

    def capacities(self) -> tuple[frozenset[Capacity], ...]:
        """Of prefill and decode workers that take work: all on which it depends what can run at all."""
        sides = (self.prefill, self.decode)
        return tuple(frozenset(w.capacity for w in side.values() if not w.draining) for side in sides)

    def could_ever_fit(self, submit: Submit) -> bool:
        """On workers that are up. Where a role has none, the one that it lost stands for the one that will be started again."""
        for role, side in ((Role.PREFILL, self.prefill), (Role.DECODE, self.decode)):
            workers = side.values() or (self._lost[role][0],)
            if not any(worker.could_ever_take(submit) for worker in workers):
                return False
        return True

    def _measure(self) -> None:
        both = (*self.prefill.values(), *self.decode.values())
        self.context_tokens = min((worker.capacity.context_tokens for worker in both), default=self.context_tokens)
        self._block_sizes = sorted({worker.capacity.block_size for worker in both})
        self._mean_tokens_per_s = 0.0
        rates = [worker.tokens_per_s for worker in self.prefill.values() if worker.tokens_per_s]
        self._tokens_per_s, self._measured = sum(rates), len(rates)

    def _side(self, worker: Worker) -> dict[int, Worker]:
        return self.prefill if worker.hello.role is Role.PREFILL else self.decode
