"""How a mixed worker shares its KV pool out between its two roles. Pure."""


def prefill_blocks(blocks: int, context_blocks: int) -> int:
    """Returns the blocks for the prefill role: a quarter, but at least one whole context. A prompt stays there only until it
    is handed over; the rest is prefix cache. At most half: decode gets the rest, since it holds every stream until its end.

    `context_blocks`: of the longest context."""
    return max(min(max(context_blocks, blocks // 4), blocks // 2), 1)
