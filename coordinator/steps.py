"""Which chunks make up one prefill forward pass."""

from collections.abc import Callable

from coordinator.choice import expect_cached, rather_waits
from coordinator.events import Limits
from coordinator.lifecycle import State
from coordinator.placement import room
from coordinator.pool import Pool, Worker
from coordinator.queue import WaitQueue
from coordinator.request import Request
from coordinator.watch import NothingRuns, Watch, watched
from proto import limits
from proto.messages import Chunk, Step

Place = Callable[[Request, Worker, Worker], None]


def compose(
    worker: Worker, pool: Pool, queue: WaitQueue, options: Limits, place: Place, now: float, watch: Watch | None = None
) -> Step | None:
    """The next step of a prefill worker, in the fair order, up to the token budget; None if there is nothing it can do.

    Prompts still queued compete with those already placed here; `place` is called for one whose first chunk is taken. Only
    a prompt's last chunk may end inside a KV block, so that every block is sent once.
    """
    block_size = worker.capacity.block_size
    chunks: list[Chunk] = []
    requests: list[Request] = []
    taken: set[str] = set()
    left = max(options.step_tokens, block_size)
    decode: Worker | None = None

    def length_of(request: Request) -> int:
        """How much of a prompt fits what is left; 0 if none, or if it has no room here or a chunk in this step, if room is
        kept for another, or if it waits for a worker that has more of it cached."""
        nonlocal decode
        if request.id in taken:
            return 0
        if request.state is State.QUEUED:
            if pool.kept_for is not None:
                return 0
            decode = room(request, worker, pool, now)
            if decode is None:
                pool.refuse(request, options.bypasses_max, queue.served_per_s, now)
                return 0
            if rather_waits(request, worker, pool, now):
                pool.cache_waits += 1
                return 0
            expect_cached(request, worker, pool)
        remaining = request.submit.prompt_tokens - request.dispatched_tokens
        return remaining if remaining <= left else left - left % block_size

    look = length_of if watch is None else watched(length_of, watch, worker, pool, taken)
    while left >= block_size and len(chunks) < limits.MAX_CHUNKS_PER_STEP:
        pool.refused.clear()
        found = queue.next_chunk(worker.epoch, look, now, pool.refusals_allowed(worker))
        if found is None:
            pool.found_full(worker)
            if watch is not None:
                watch(NothingRuns(worker))
            break
        request, length = found
        if request.state is State.QUEUED:
            assert decode is not None
            place(request, worker, decode)
            pool.count_bypasses()
        chunks.append(Chunk(request.id, request.attempt, request.dispatched_tokens - length, length))
        requests.append(request)
        taken.add(request.id)
        left -= length
        if request.entry is None:
            worker.placed.pop(request.id, None)
    return worker.begin_step(chunks, requests) if chunks else None
