"""Which chunks make up one prefill forward pass."""

from coordinator.pool import Worker
from proto import limits
from proto.messages import Chunk, Step


def compose(worker: Worker, budget_tokens: int) -> Step | None:
    """The next step of a prefill worker: placed prompts in order, up to the token budget; None if there is nothing to do.

    Only a prompt's last chunk may end inside a KV block, so that every block is sent once. Marks what it takes as
    dispatched; prompts that are wholly dispatched leave `worker.placed`.
    """
    block_size = worker.capacity.block_size
    chunks: list[Chunk] = []
    left = max(budget_tokens, block_size)
    for request in list(worker.placed.values()):
        if left <= 0 or len(chunks) == limits.MAX_CHUNKS_PER_STEP:
            break
        start = request.dispatched_tokens
        remaining = request.submit.prompt_tokens - start
        length = remaining if remaining <= left else left - left % block_size
        if length == 0:
            break
        chunks.append(Chunk(request.id, request.attempt, start, length))
        request.dispatched_tokens += length
        left -= length
        if length == remaining:
            del worker.placed[request.id]
    if not chunks:
        return None
    step = Step(worker.next_step_id, tuple(chunks))
    worker.next_step_id += 1
    worker.steps[step.step_id] = step.chunks
    return step
