"""Loses workers: their requests come back as production interrupts them, with the tokens that were sent."""

from collections.abc import Sequence
from typing import Protocol

from tuning.simulator.batch import SimulatedBatch
from tuning.simulator.job import NOT_YET, SimulatedRequest
from tuning.simulator.order import FairOrder
from tuning.simulator.prefill import SimulatedPrefillWorker


class FailingCluster(Protocol):
    """`tuning.simulator.cluster.Simulator`."""

    now: float
    jobs: Sequence[SimulatedRequest]
    prefill: Sequence[SimulatedPrefillWorker]
    batches: Sequence[SimulatedBatch]
    closed: dict[int, SimulatedRequest]
    order: FairOrder
    step_tokens: int

    def stop_worker(self, worker: SimulatedPrefillWorker) -> None: ...

    def enqueue(self, job: SimulatedRequest) -> None: ...


def lose(cluster: FailingCluster, number: int) -> None:
    prefill = next((worker for worker in cluster.prefill if worker.number == number), None)
    batch = next((batch for batch in cluster.batches if batch.number == number), None)
    if prefill is None and batch is None:
        return
    lost: dict[int, tuple[SimulatedRequest, int]] = {}
    for job in cluster.jobs:
        if job.placed_s == NOT_YET or job.end_s != NOT_YET:
            continue
        if (job.left_s == NOT_YET and job.prefill is prefill is not None) or job.decode is batch is not None:
            lost[job.number] = job, int(job.first_token)
    if batch is not None:
        lost.update((job.number, (job, 1 + forwarded)) for job, forwarded in batch.lose_all(cluster.now))
        batch.up, batch.version = False, batch.version + 1
    if prefill is not None:
        cluster.stop_worker(prefill)
    for job, emitted in lost.values():
        _interrupt(cluster, job, emitted)


def _interrupt(cluster: FailingCluster, job: SimulatedRequest, emitted: int) -> None:
    worker: SimulatedPrefillWorker = job.prefill
    batch: SimulatedBatch = job.decode
    if job.left_s == NOT_YET and worker is not None:
        worker.placed.pop(job.number, None)
        worker.undispatched -= job.prompt - job.dispatched
        worker.release_blocks(job)
    if job.entry is not None:
        cluster.order.remove(job)
    batch.held_seqs -= 1
    batch.room.release(job.number)
    job.again(cluster.now, emitted, cluster.step_tokens)
    cluster.enqueue(job)


def come_back(cluster: FailingCluster, number: int) -> None:
    for worker in cluster.prefill:
        if worker.number == number:
            worker.up = True
    for batch in cluster.batches:
        if batch.number == number:
            batch.up, batch.begin_s = True, cluster.now
    cluster.closed.clear()
