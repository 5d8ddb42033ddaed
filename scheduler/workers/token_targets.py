"""Targets for the time per output token (`tpot_ms` of a priority class): which streams a decode worker may have. Pure.

A decode step takes longer with every sequence, and each sequence waits for it. So the batch of a decode worker is *capped* at
the number of sequences whose step, as learnt from this worker, takes no longer than `MARGIN` of the strictest target there. A
target that no worker could keep with a single stream caps nothing. A mixed worker is not capped, since its prompts are bounded
instead.

Where there are several decode workers, each is *assigned* to one class of targets, so that a strict target does not cap lax
streams:

- An empty worker is assigned to the class of the first stream that comes.
- Streams of other classes are guests: they leave part of the batch free, and none comes while the worker's own class waits.
- A class that waits without room gets another worker where `target_demand` finds one. Streams that run there end as guests.
- A class that gets no worker of its own shares one. Streams of all classes join there in the fair order, under the strictest
  of the targets that run or wait.

Until a request with a target comes, this costs nothing and decides nothing.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from itertools import islice

from scheduler.fairness.target_demand import TargetLoad, who_gives
from scheduler.request import Request
from scheduler.waiting.queue_keys import target_class
from scheduler.workers.worker import DecodeWorker, Ordered

MARGIN = 0.95  # part of a target that steps may take; the rest is for a stream's wait for its first step, and for error
UNMEASURED_MAX = 8  # sequences under a target on a worker that has not reported yet
GROWTH = 2.0  # the cap is at most so many times the largest batch that was measured
GUESTS = 0.7  # guests join a batch up to this part of its cap
SHARED = -1  # stands for the class of a worker that no class has to itself


class TokenTargets:
    """The targets for the time per token of one pool's streams."""

    def __init__(self, decode: Mapping[int, DecodeWorker]) -> None:
        self._decode = decode
        self.used = False
        self._strictest: dict[int, float] = {}  # the strictest target of each class; 0: none
        self._weights: dict[int, float] = {}  # the largest weight of the priority classes with a target of each class
        self._alone = Ordered()  # decode workers by how long a step of one sequence takes; the fastest first
        self._class_of: dict[int, int] = {}  # the class to which a decode worker is assigned
        self._awaited: dict[int, int] = {}  # the worker that a class was given and has no stream on yet
        self._workers: Counter[int] = Counter()  # how many workers are assigned to each class
        self._listed: dict[int, Ordered] = {}  # workers with a sequence free, by their class, the least busy first

    def came(self, tpot_ms: float, weight: float) -> None:
        """A request of a priority class with this target and weight has come."""
        target = target_class(tpot_ms)
        self._strictest[target] = min(tpot_ms, self._strictest.get(target, tpot_ms))
        self._weights[target] = max(weight, self._weights.get(target, weight))
        if tpot_ms and not self.used:
            self.used = True
            for worker in self._decode.values():
                self.changed(worker)

    def changed(self, worker: DecodeWorker) -> None:
        """Assign a decode worker to a class, and list it anew, after its sequences, or whether it takes work, have changed."""
        if not self.used:
            return
        incarnation, held = worker.incarnation, worker.seqs_by_target
        target = self._class_of.get(incarnation)
        if target is None:
            if held and len(self._decode) > 1 and not worker.hello.process:
                self._assign(worker, target_class(max(held, key=lambda ms: held[ms])))
            return
        if self._awaited.get(target) == incarnation:
            if _seqs(worker, target):
                del self._awaited[target]
        elif not held:
            self._forget(incarnation)
            return
        self._list(worker, target)

    def leave(self, worker: DecodeWorker) -> None:
        self._forget(worker.incarnation)
        self._alone.drop(worker.incarnation)

    def _assign(self, worker: DecodeWorker, target: int) -> None:
        self._forget(worker.incarnation)
        self._class_of[worker.incarnation] = target
        self._workers[target] += 1
        self._list(worker, target)

    def _forget(self, incarnation: int) -> None:
        target = self._class_of.pop(incarnation, None)
        if target is None:
            return
        self._workers[target] -= 1
        self._listed[target].drop(incarnation)
        if self._awaited.get(target) == incarnation:
            del self._awaited[target]

    def _list(self, worker: DecodeWorker, target: int) -> None:
        listed, taken = self._listed.setdefault(target, Ordered()), worker.capacity.max_seqs - worker.free_seqs
        if worker.draining or worker.free_seqs <= 0:
            listed.drop(worker.incarnation)
        else:
            listed.put(worker.incarnation, taken / worker.capacity.max_seqs, 0.0)

    def alike(self, request: Request, count: int) -> list[int]:
        """A few workers that are assigned to the request's class."""
        return list(islice(self._listed.get(target_class(request.tpot_ms), ()), count))

    def has_own(self, tpot_ms: float) -> bool:
        """Whether workers are assigned to the class of a target, and others to other classes."""
        return 0 < self._workers[target_class(tpot_ms)] < self._workers.total() - self._workers[SHARED]

    def is_guest(self, worker: DecodeWorker, request: Request) -> bool:
        """Whether the worker is assigned to another class than the request's, or shared."""
        target = self._class_of.get(worker.incarnation)
        return target is not None and target != target_class(request.tpot_ms)

    def free_seqs(self, worker: DecodeWorker, request: Request, short: Collection[int]) -> int:
        """Returns how many sequences a decode worker can take for a request without missing a target; less than 0: so many
        would have to leave first. `short`: classes that wait without room."""
        free, target = worker.free_seqs, self._class_of.get(worker.incarnation)
        if not self.used or worker.hello.process:
            return free
        waiting, is_guest = short, False
        if target is not None and target != SHARED:
            waiting, is_guest = (target,), target != target_class(request.tpot_ms)
        targets = (*worker.seqs_by_target, request.tpot_ms, *(self._strictest.get(one, 0.0) for one in waiting))
        strictest_ms = min(filter(None, targets), default=0.0)
        if not strictest_ms or (not worker.seqs_by_target and not (is_guest and target in short)):
            return free
        most = worker.capacity.max_seqs
        cap = self.cap(worker, strictest_ms)
        if cap < most and is_guest:
            cap = 0 if target in short else int(GUESTS * cap)
        return min(free, cap + free - most)

    def cap(self, worker: DecodeWorker, target_ms: float) -> int:
        """The largest batch of a decode worker that keeps a target."""
        fit, step_ms = worker.step_fit, MARGIN * target_ms
        if not fit.largest:
            return UNMEASURED_MAX
        alone_ms = fit.step_ms(1)
        self._alone.put(worker.incarnation, alone_ms, 0.0)
        if alone_ms > step_ms and self._alone.least() > step_ms:
            return worker.capacity.max_seqs
        cap = max(int(min(fit.sequences(step_ms), GROWTH * fit.largest)), 1)
        # Always try one more than was measured: until batches of two sizes have run, the fit ascribes all time to the
        # sequences.
        return max(cap, int(fit.largest) + 1) if fit.step_ms(fit.largest) <= step_ms else cap

    # --- by demand ------------------------------------------------------------------------------------------------------

    def reassign(self, short: Collection[int]) -> DecodeWorker | None:
        """Give one decode worker to a class that waits without room, if that is to have more. Returns the worker."""
        workers = [worker for worker in self._decode.values() if not worker.draining and not worker.hello.process]
        by_class: dict[int, list[DecodeWorker]] = {}
        for worker in workers:
            if worker.incarnation in self._class_of:
                by_class.setdefault(self._class_of[worker.incarnation], []).append(worker)
        shared = by_class.pop(SHARED, [])
        running = {target_class(ms) for worker in workers for ms in worker.seqs_by_target}
        without = (running | set(short)) - by_class.keys()
        if shared and len(without) == 1:
            return self._give(shared, without.pop())
        demands = {
            target: TargetLoad(len(owned), sum(self._load(worker, target) for worker in owned))
            for target, owned in by_class.items()
        }
        found = who_gives([target for target in short if target not in self._awaited], demands, self._weights)
        if found is not None:
            return self._give(by_class[found[1]], found[0])
        homeless = [target for target in short if target in without]
        if homeless and by_class and not shared:
            return self._give(by_class[min(by_class, key=lambda other: (abs(other - homeless[0]), other))], SHARED)
        return None

    def _give(self, workers: list[DecodeWorker], target: int) -> DecodeWorker:
        """Assign to a class the worker that has the fewest streams of others."""

        def others(worker: DecodeWorker) -> tuple[int, int]:
            return worker.capacity.max_seqs - worker.free_seqs - _seqs(worker, target), worker.incarnation

        worker = min(workers, key=others)
        self._assign(worker, target)
        if target != SHARED and not _seqs(worker, target):
            self._awaited[target] = worker.incarnation
        return worker

    def _load(self, worker: DecodeWorker, target: int) -> float:
        """The throughput of a worker's streams of its class, as a part of what it is with as many as the target allows; or the
        part of its KV that is taken, if that is more."""
        capacity, fit, ms = worker.capacity, worker.step_fit, self._strictest.get(target, 0.0)
        taken = capacity.max_seqs - worker.free_seqs
        cap = min(self.cap(worker, ms), capacity.max_seqs) if ms else capacity.max_seqs
        part = _seqs(worker, target) / cap
        if fit.largest and taken:
            part *= fit.step_ms(cap) / fit.step_ms(taken)
        return max(part, 1 - worker.free_blocks / capacity.kv_blocks)


def _seqs(worker: DecodeWorker, target: int) -> int:
    """The worker's sequences of a class."""
    return sum(seqs for ms, seqs in worker.seqs_by_target.items() if target_class(ms) == target)
