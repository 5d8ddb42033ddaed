"""Targets for the time per output token (`tpot_ms` of a priority class): how many sequences a decode worker may have. Pure.

A decode step takes longer with every sequence, and each sequence waits for it. So where a stream with a target runs, the batch
is *capped*: at the number of sequences whose step, as learnt from this worker, takes no longer than `MARGIN` of the strictest
target there. Streams without a target are capped only beside such streams, or while one with a target waits without room, or
they would take every place that it waits for. A worker with nothing on it takes whatever fits, so nothing waits for ever.

A target that no worker could keep with a single stream caps nothing. A mixed worker is not capped either: it computes prompts
between its steps, so its step times are not learnt.

Streams with different targets are kept apart where there are several workers (`DecodeSide.other_targets`): a worker has *other
targets* for a request to a degree of 0 where all streams have the request's target or there are none, 1 where some have, and 2
where none has. Streams of two targets that share workers separate by themselves, since new streams prefer a worker with only
their own target as long as there is one.
"""

from collections.abc import Iterable
from itertools import islice

from scheduler.request import Request
from scheduler.workers.ordered import Ordered
from scheduler.workers.worker import Worker

MARGIN = 0.95
"""Part of a target that steps may take; the rest is for a stream's wait for its first step, and for error."""
UNMEASURED_MAX = 8
"""Sequences under a target on a worker that has not reported yet."""
GROWTH = 2.0
"""The cap is at most so many times the largest batch that was measured."""


class TokenTargets:
    """The targets for the time per token of one pool's streams. Until a request with a target comes, this costs nothing and
    decides nothing."""

    def __init__(self) -> None:
        self.used = False
        self._alone = Ordered()
        """Decode workers by how long a step of one sequence takes; the fastest first."""
        self._alike: dict[float, Ordered] = {}
        """Decode workers with a sequence free where all streams have the same target, by that target, the least busy first."""
        self._target_of: dict[int, float] = {}
        """The target under which a worker is listed."""

    def begin(self, workers: Iterable[Worker]) -> None:
        """A request with a target has come."""
        self.used = True
        for worker in workers:
            self.changed(worker)

    def changed(self, worker: Worker) -> None:
        """List a decode worker anew after its sequences, or whether it takes work, have changed."""
        if not self.used:
            return
        incarnation, held = worker.incarnation, worker.seqs_by_target
        self._take_out(incarnation)
        if len(held) == 1 and not worker.draining and worker.free_seqs > 0:
            [(target, seqs)] = held.items()
            self._target_of[incarnation] = target
            self._alike.setdefault(target, Ordered()).put(incarnation, seqs / worker.capacity.max_seqs, 0.0)

    def leave(self, worker: Worker) -> None:
        self._take_out(worker.incarnation)
        self._alone.drop(worker.incarnation)

    def _take_out(self, incarnation: int) -> None:
        before = self._target_of.pop(incarnation, None)
        if before is not None:
            self._alike[before].drop(incarnation)
            if not len(self._alike[before]):
                del self._alike[before]

    def alike(self, request: Request, count: int) -> list[int]:
        """A few workers that run only streams with the same target."""
        return list(islice(self._alike.get(request.tpot_ms, ()), count))

    def measured(self, worker: Worker, sequences: float, kv_tokens: float, step_ms: float) -> None:
        """Mean of some steps of a decode worker."""
        if self.used:
            worker.step_fit.add(sequences, kv_tokens, step_ms)

    def other_targets(self, worker: Worker, request: Request) -> int:
        """How far the streams there have other targets than this request: 0, 1 or 2."""
        held = worker.seqs_by_target
        if not self.used or not held or held.keys() == {request.tpot_ms}:
            return 0
        return 1 if request.tpot_ms in held else 2

    def free_seqs(self, worker: Worker, request: Request, waiting_ms: float) -> int:
        """Returns how many sequences a decode worker can take for a request without missing a target.

        `waiting_ms`: the strictest target of those that wait without room; 0: none."""
        taken = worker.capacity.max_seqs - worker.free_seqs
        if not self.used or worker.hello.process or not taken:
            return worker.free_seqs
        targets = [target for target in (*worker.seqs_by_target, request.tpot_ms, waiting_ms) if target]
        return min(worker.free_seqs, max(self.cap(worker, min(targets)) - taken, 0)) if targets else worker.free_seqs

    def cap(self, worker: Worker, target_ms: float) -> int:
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
