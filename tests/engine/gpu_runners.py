"""The GPU runner on a CPU: the same code over plain torch, or over kernels that Triton interprets."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from engine.engine import Engine
from engine.gpu.ops import Ops, TorchOps
from engine.gpu.runner import GpuRunner
from engine.gpu.weights import fuse
from engine.kv.allocator import BlockAllocator
from engine.kv.sequence import SequenceBlocks
from engine.model import loader
from engine.model.backend import BackendCandidate, recognised
from engine.pipeline import DecodeRow
from engine.sampling.sampler import SamplerState
from proto.sampling import Sampling
from tests.engine import support

ROWS_MAX = 6


def candidate_of(path: Path) -> tuple[BackendCandidate, torch.Tensor]:
    """A loaded model and a pool for it."""
    found: list[tuple[BackendCandidate, torch.Tensor]] = []

    class Loaded(Exception): ...

    def keep(candidate: BackendCandidate, make_pool: Callable[[int], torch.Tensor], *_: object) -> Engine:
        found.append((candidate, make_pool(support.KV_BYTES)))
        raise Loaded

    real, loader.make_engine = loader.make_engine, keep  # type: ignore[assignment, attr-defined]
    try:
        support.load(path)
    except Loaded:
        pass
    finally:
        loader.make_engine = real  # type: ignore[attr-defined]
    return found[0]


def gpu_engine(path: Path, make_ops: Callable[[torch.Tensor], Ops] = TorchOps) -> Engine:
    candidate, pool = candidate_of(path)
    weights = fuse(recognised(candidate), candidate.info.context_tokens)
    return Engine(
        GpuRunner(weights, pool, make_ops(pool), candidate.info.context_tokens, ROWS_MAX), candidate.info, pool
    )


class PipelinedStream:
    """A sequence that was computed as a prompt, and then decodes in the engine's pipeline."""

    def __init__(
        self,
        engine: Engine,
        allocator: BlockAllocator,
        prompt: Sequence[int],
        sampling: Sampling,
        state: SamplerState | None = None,
    ) -> None:
        self._prompt = support.Stream(engine, allocator, prompt)
        self.state = state or SamplerState(sampling, 0, engine.info.vocab_size, prompt)
        self.logits = engine.forward([self._prompt.next_chunk(4096)])[0]
        self.blocks: SequenceBlocks = self._prompt.blocks
        self.planned = 0
        self.output: list[int] = []

    def row(self) -> DecodeRow:
        position = self.blocks.length
        assert self.blocks.append_slot() is None
        self.planned += 1
        token = self.output[0]
        return DecodeRow(self, token, position, tuple(self.blocks.table), self.state, self.planned)
