"""The host's work for one decode step, in milliseconds, with the device's work left out: `python -m tools.gpu.host_time`.

The device's work is made tiny: heads of one number, a vocabulary of 64, and for the pipeline a CUDA graph that returns the
same logits each time. Only the calls remain. `before` is a step before the pipeline existed: the lists of one forward, and in
each layer a gather and an attention call for each sequence. It leaves out norms and products, so it is shorter than the real
step was. Figures are medians.
"""

import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from decode_worker.batch import DecodeRequest, RunningBatch
from decode_worker.compute import run_ahead
from engine.attention.interface import AttentionCall
from engine.engine import Engine, ModelInfo
from engine.gpu.ops import TorchOps
from engine.gpu.runner import GpuRunner
from engine.gpu.weights import DecoderWeights, LayerWeights, Product
from engine.kv.allocator import BlockAllocator
from engine.kv.sequence import SequenceBlocks
from engine.sampling.sampler import SamplerState, sample
from proto.messages import Destination
from proto.sampling import Sampling
from tools.gpu.record import attempt

SEQUENCES, CONTEXT, BLOCK_SIZE, LAYERS, HEADS, VOCAB = 64, 1024, 16, 32, 4, 64
BLOCKS = SEQUENCES * (CONTEXT // BLOCK_SIZE + 16)
STEPS, WARM_UP = 30, 5
SAMPLINGS = {
    "greedy": Sampling(max_tokens=CONTEXT, temperature=0.0),
    "top_p": Sampling(max_tokens=CONTEXT, temperature=1.0, top_p=0.9),
}


def requests_of(sampling: Sampling, allocator: BlockAllocator) -> list[DecodeRequest[SamplerState]]:
    found = []
    for number in range(SEQUENCES):
        blocks = SequenceBlocks(allocator, BLOCK_SIZE, allocator.allocate(CONTEXT // BLOCK_SIZE), CONTEXT - 64)
        state = SamplerState(sampling, 0, VOCAB, [], start_index=1)
        found.append(DecodeRequest((f"r{number}", 1), 0, Destination("tcp://a", 1), sampling, blocks, state, 7, 1))
    return found


def median_ms(step: Callable[[], None]) -> float:
    found = []
    for _ in range(STEPS):
        began = time.perf_counter()
        step()
        found.append(1000 * (time.perf_counter() - began))
    return statistics.median(found[WARM_UP:])


def before(sampling: Sampling) -> float:
    pool = torch.zeros(BLOCKS, LAYERS, 2, BLOCK_SIZE, 1, 1)
    token_rows, block_rows = pool.view(-1, 1), pool.view(-1, BLOCK_SIZE)
    batch: RunningBatch[SamplerState] = RunningBatch()
    batch.running = requests_of(sampling, BlockAllocator(BLOCKS))
    query, fresh, logits = torch.zeros(1, HEADS, SEQUENCES, 1), torch.zeros(SEQUENCES, 1), torch.randn(SEQUENCES, VOCAB)

    def attend(layer: int, slots: torch.Tensor, gathers: list[torch.Tensor], lengths: list[int]) -> torch.Tensor:
        token_rows[2 * layer * BLOCK_SIZE :].index_copy_(0, slots, fresh)
        token_rows[(2 * layer + 1) * BLOCK_SIZE :].index_copy_(0, slots, fresh)
        outs = []
        for row, (gather, length) in enumerate(zip(gathers, lengths, strict=True)):
            kv = torch.index_select(block_rows[2 * layer :], 0, gather).view(2, -1, 1, 1)
            key, value = kv[:, :length].transpose(1, 2).unsqueeze(1).unbind(0)
            out = F.scaled_dot_product_attention(query[:, :, row : row + 1].reshape(1, 1, HEADS, 1), key, value)
            outs.append(out.reshape(1, 1, HEADS, 1))
        return torch.cat(outs, dim=1)

    def step() -> None:
        plan = batch.plan(lambda _: None)
        assert plan is not None
        stride = 2 * LAYERS
        slots = [
            row.table[row.position // BLOCK_SIZE] * stride * BLOCK_SIZE + row.position % BLOCK_SIZE for row in plan.rows
        ]
        torch.tensor([[row.token for row in plan.rows]]), torch.tensor([[row.position for row in plan.rows]])
        planes = [torch.tensor(row.table) * stride for row in plan.rows]
        gathers = [torch.cat((one, one + 1)) for one in planes]
        for layer in range(LAYERS):
            attend(layer, torch.tensor(slots), gathers, [row.position + 1 for row in plan.rows])
        drawn = sample(logits, [row.running.state for row in plan.rows])
        batch.apply([None if one is None else (one.token, None) for one in drawn])

    return median_ms(step)


def pipelined(sampling: Sampling) -> float:
    pool = torch.zeros(BLOCKS, 1, 2, BLOCK_SIZE, 1, 2)
    tiny = Product(torch.zeros(2, 2), None)
    layer = LayerWeights(
        tiny, tiny, tiny, tiny, torch.ones(2), torch.ones(2), None, None, AttentionCall(None, None, None)
    )
    tables = torch.zeros(2 * CONTEXT, 2)
    head = Product(torch.zeros(VOCAB, 2), None)
    weights = DecoderWeights((layer,), head.weight, head, torch.ones(2), tables, tables, 1, 1, 2, 0, 1e-5)
    runner = GpuRunner(weights, pool, TorchOps(pool), 2 * CONTEXT, SEQUENCES)
    info = ModelInfo("", "", 2 * CONTEXT, VOCAB, 1, 1, 2, "float32", BLOCK_SIZE, 0, (), 0, "")
    engine, pipeline = Engine(runner, info, pool), runner.pipeline
    assert pipeline is not None
    pipeline._logits.normal_()
    pipeline.replay.run = lambda rows: None  # type: ignore[method-assign]
    batch: RunningBatch[SamplerState] = RunningBatch(depth=2)
    batch.running = requests_of(sampling, BlockAllocator(BLOCKS))

    def step() -> None:
        collects = batch.in_flight is not None
        result = run_ahead(engine, pipeline, batch.plan(lambda _: None), collects)
        if result.drawn is not None:
            batch.apply(result.drawn)

    return median_ms(step)


def of(name: str) -> dict[str, float]:
    old, new = before(SAMPLINGS[name]), pipelined(SAMPLINGS[name])
    return {"before_ms": round(old, 2), "pipeline_ms": round(new, 2), "ratio": round(new / old, 3)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    for one in SAMPLINGS:
        attempt("host", one, lambda one=one: of(one))
