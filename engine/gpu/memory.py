"""Computes the size of the KV pool on a GPU: the allowed share of its memory, less the weights and one forward pass."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

from engine.attention.forward_batch import SeqChunk
from engine.engine import Runner

_LIBRARIES_BYTES: Final = 512 << 20  # for CUDA graphs, and what libraries allocate on first use
_DRAW_BYTES: Final = 64  # of each logit drawn from: itself, weights, sums and copies in float64, penalties


MakeRunner = Callable[[int], tuple[Runner, int]]


@dataclass(frozen=True)
class GpuShare:
    """The part of its GPU that a worker may use."""

    memory: float = 0.9  # of the GPU, for all that this process has there
    step_tokens: int = 2048  # of the largest forward pass
    decode_rows: int = 64  # most sequences that decode at once


def pool_bytes(*, total: int, free: int, own: int, forward: int, draw: int, share: float) -> int:
    """Returns the bytes for the pool, at most the free memory, because other processes may use the GPU. `own` is the memory
    that this process holds; `forward` and `draw` are the temporary memory of a forward pass and of drawing tokens; all in
    bytes. Negative if there is no room at all."""
    return min(int(total * share) - own, free) - forward - draw - _LIBRARIES_BYTES


@torch.inference_mode()
def measure(
    share: GpuShare, context_tokens: int, vocab_size: int, make_runner: MakeRunner, device: torch.device
) -> int:
    """Bytes for the pool, after a forward pass as large as any. `make_runner(tokens)` makes a runner over a pool of its own for
    that many tokens, and says how many blocks that has."""
    tokens = min(share.step_tokens, context_tokens)
    runner, blocks = make_runner(tokens)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    runner.forward([SeqChunk([0] * tokens, 0, range(blocks), True)])
    torch.cuda.synchronize(device)
    forward = torch.cuda.max_memory_allocated(device) - before
    del runner
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    own = torch.cuda.memory_reserved(device)
    draw = share.decode_rows * vocab_size * _DRAW_BYTES
    return pool_bytes(total=total, free=free, own=own, forward=forward, draw=draw, share=share.memory)
