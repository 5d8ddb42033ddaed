"""Workers that share cores: with more of them busy than there are cores, each gets its part (processor sharing).

So it is where a small host runs more workers than it has cores. `count` 0: every worker has its own, and nothing is shared.
"""

from collections.abc import Callable

from tuning.simulator.batch import Batch
from tuning.simulator.prefill import PrefillWorker


class PrefillCores:
    def __init__(self, count: int, push: Callable[[float, PrefillWorker, int], None]) -> None:
        """`push`: the step that runs on a worker ends then, unless the worker's version has changed."""
        self._count, self._push = count, push
        self._running: dict[int, PrefillWorker] = {}

    def start(self, worker: PrefillWorker, took_s: float, now: float) -> None:
        worker.running, worker.left_s, worker.since_s = True, took_s, now
        if not self._count:
            worker.version += 1
            self._push(now + took_s, worker, worker.version)
            return
        self._pass(now)
        self._running[worker.number] = worker
        self._push_all(now)

    def stop(self, worker: PrefillWorker, now: float) -> None:
        worker.running = False
        worker.version += 1
        if self._count:
            self._pass(now)
            self._running.pop(worker.number, None)
            self._push_all(now)

    def _share(self) -> float:
        return max(1.0, len(self._running) / self._count)

    def _pass(self, now: float) -> None:
        for worker in self._running.values():
            worker.left_s -= (now - worker.since_s) / self._share()
            worker.since_s = now

    def _push_all(self, now: float) -> None:
        for worker in self._running.values():
            worker.version += 1
            self._push(now + max(worker.left_s, 0.0) * self._share(), worker, worker.version)


class DecodeCores:
    def __init__(self, count: int) -> None:
        self._count = count
        self._busy: dict[int, Batch] = {}

    def changed(self, batch: Batch, now: float) -> list[Batch]:
        """It has begun or ended to run; returns the batches whose ends come at another time now."""
        if not self._count or (batch.sequences > 0) == (batch.number in self._busy):
            return []
        if batch.sequences:
            self._busy[batch.number] = batch
        else:
            del self._busy[batch.number]
        share = max(1.0, len(self._busy) / self._count)
        changed = []
        for other in self._busy.values():
            if other.share != share:
                other.sync(now)
                other.share = share
                changed.append(other)
        return changed
