"""The engine on one GPU beside what the GPU can do: `python -m tools.gpu.engine_bench`.

A model of 8B parameters' shape, with random weights made on the device, is first compared with plain torch. It decodes at
several batches and in several ways of drawing: beside the bytes of a step over the measured bandwidth. It computes prompts:
beside the measured rate of matrix products. And it decodes while another process computes prompts on the same card
(`python -m tools.gpu.engine_bench prefill`); two processes without MPS take turns of milliseconds there.
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.attention.forward_batch import SeqChunk
from engine.attention.interface import AttentionCall
from engine.gpu.ops import Ops, TorchOps, make_ops
from engine.gpu.runner import GpuRunner
from engine.gpu.weights import DecoderWeights, LayerWeights, Product
from engine.pipeline import DecodeRow
from engine.sampling.sampler import SamplerState
from proto.sampling import Sampling
from tools.gpu.device import DTYPE, memory, seconds_of, synchronize
from tools.gpu.record import DEVICE, ON_GPU, attempt, record

ROOT = Path(__file__).parents[2]
LAYERS, HIDDEN, HEADS, KV_HEADS, DIM, INNER, VOCAB = (
    (32, 4096, 32, 8, 128, 14336, 128_256) if ON_GPU else (2, 64, 4, 2, 16, 96, 320)
)
BLOCK_SIZE, CONTEXT, STEPS = (16, 1024, 40) if ON_GPU else (16, 32, 9)
BATCHES = (64, 1, 8, 256) if ON_GPU else (2,)
PROMPTS = (1024, 2048, 8192) if ON_GPU else (32, 70)
CHUNK = 2048
BLOCKS_OF_ONE = (CONTEXT + 2 * STEPS) // BLOCK_SIZE + 1
READY = "ready"
SAMPLINGS = {
    "greedy": Sampling(max_tokens=CONTEXT, temperature=0.0),
    "temperature": Sampling(max_tokens=CONTEXT, temperature=1.0),
    "top_p": Sampling(max_tokens=CONTEXT, temperature=1.0, top_p=0.9),
    "top_k": Sampling(max_tokens=CONTEXT, temperature=1.0, top_k=50),
    "grammar": Sampling(max_tokens=CONTEXT, temperature=1.0, grammar="all"),
}


class Everything:
    """A grammar that forbids one token."""

    def mask(self, row: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        masked = row.copy()
        masked[0] = -np.inf
        return masked

    def accept(self, token: int) -> None: ...


def ops_over(pool: torch.Tensor) -> Ops:
    return make_ops(pool) if ON_GPU else TorchOps(pool)


def make_weights(layers: int) -> DecoderWeights:
    def product(outputs: int, inputs: int) -> Product:
        return Product(torch.randn(outputs, inputs, dtype=DTYPE, device=DEVICE) * 0.02, None)

    ones, call = torch.ones(HIDDEN, device=DEVICE), AttentionCall(None, None, None)
    made = tuple(
        LayerWeights(
            product((HEADS + 2 * KV_HEADS) * DIM, HIDDEN), product(HIDDEN, HEADS * DIM), product(2 * INNER, HIDDEN),
            product(HIDDEN, INNER), ones, ones, None, None, call,
        )
        for _ in range(layers)
    )  # fmt: skip
    head = product(VOCAB, HIDDEN)
    tables = torch.ones(max(2 * CONTEXT + 2048, max(PROMPTS)), DIM, device=DEVICE)
    return DecoderWeights(made, head.weight, head, ones, tables, tables, HEADS, KV_HEADS, DIM, 0, 1e-5)


def make_runner(rows: int, weights: DecoderWeights, blocks: int = 0) -> GpuRunner:
    shape = (blocks or rows * BLOCKS_OF_ONE + 64, len(weights.layers), 2, BLOCK_SIZE, KV_HEADS, DIM)
    pool = torch.zeros(shape, dtype=DTYPE, device=DEVICE)
    return GpuRunner(weights, pool, ops_over(pool), len(weights.cosine), rows)


def floors() -> dict[str, float]:
    """Bytes/s of a copy, counted twice, and operations/s of a product in bfloat16."""
    size = 8192 if ON_GPU else 64
    source = torch.zeros(16 * size * size, dtype=torch.uint8, device=DEVICE)
    target, a = torch.empty_like(source), torch.randn(size, size, dtype=DTYPE, device=DEVICE)
    return {
        "bytes_per_s": 2 * source.numel() / seconds_of(lambda: target.copy_(source)),
        "operations_per_s": 2 * size**3 / seconds_of(lambda: a @ a),
    }


def as_torch_computes(weights: DecoderWeights) -> dict[str, float]:
    """Compares the last logits of a prompt of 300 tokens, computed in three parts, with those in float32. The kernels may not
    differ from them by more than plain torch does in the same type."""
    few = replace(weights, layers=weights.layers[:8])
    kernels, torchs = _last_logits(few, ops_over), _last_logits(few, TorchOps)
    exact = _last_logits(_in_float32(few), TorchOps)
    found = {"kernels": _difference(kernels, exact), "torch": _difference(torchs, exact)}
    assert found["kernels"] < 1.2 * found["torch"] + 1e-4, f"from float32, of the logits: {found}"
    return found


def _last_logits(weights: DecoderWeights, make: Callable[[torch.Tensor], Ops]) -> torch.Tensor:
    tokens = min(300, CONTEXT)
    blocks = range(-(-tokens // BLOCK_SIZE))
    shape = (len(blocks), len(weights.layers), 2, BLOCK_SIZE, KV_HEADS, DIM)
    pool = torch.zeros(shape, dtype=weights.embedding.dtype, device=DEVICE)
    runner = GpuRunner(weights, pool, make(pool), len(weights.cosine))
    prompt = torch.randint(VOCAB, (tokens,), generator=torch.Generator().manual_seed(1)).tolist()
    for start, end in ((0, tokens // 2), (tokens // 2, tokens - 1), (tokens - 1, tokens)):
        last = runner.forward([SeqChunk(prompt[start:end], start, blocks, True)])
    return last


def _in_float32(weights: DecoderWeights) -> DecoderWeights:
    names = ("qkv", "out", "gate_up", "down")
    layers = [
        replace(layer, **{name: Product(getattr(layer, name).weight.float(), None) for name in names})  # type: ignore[arg-type]
        for layer in weights.layers
    ]
    head = weights.head.weight.float()
    return replace(weights, layers=tuple(layers), embedding=head, head=Product(head, None))


def _difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


def as_the_graph_computes(runner: GpuRunner, rows: int) -> dict[str, float]:
    """Returns the difference between the logits of one step from its CUDA graph and from the same calls without the graph."""
    pipeline = runner.pipeline
    assert pipeline is not None
    decode_steps(runner, rows, SAMPLINGS["greedy"], steps=2)
    pipeline.replay.run(rows)
    synchronize()
    by_graph = pipeline._logits[:rows].clone()
    pipeline._forward(rows)
    synchronize()
    difference = _difference(pipeline._logits[:rows], by_graph)
    assert difference < 0.02, f"the logits differ by {difference:.2g}"
    return {"difference": difference, "graphs": pipeline.replay.graphs}


def decode_steps(
    runner: GpuRunner, rows: int, sampling: Sampling, rest: Sampling | None = None, steps: int = STEPS
) -> list[float]:
    """Returns the seconds from one step's tokens to the next one's, at CONTEXT tokens, as a decode worker runs them. All rows
    use `sampling`; if `rest` is given, only the first row does."""
    pipeline = runner.pipeline
    assert pipeline is not None
    pipeline.abandon()  # what ran before has ended: these rows join with their own sampling
    asked = [sampling if rest is None or not row else rest for row in range(rows)]
    states = [
        SamplerState(one, 0, VOCAB, [], start_index=1, constraint=Everything() if one.grammar else None)
        for one in asked
    ]
    tables = [tuple(range(row * BLOCKS_OF_ONE, (row + 1) * BLOCKS_OF_ONE)) for row in range(rows)]
    waits = any(state.forbids for state in states)  # a mask needs the last token
    found, began = [], time.perf_counter()
    for step in range(steps):
        if step and waits:
            pipeline.collect()
        pipeline.launch(
            [DecodeRow(row, 7, CONTEXT + step, tables[row], states[row], step + 1) for row in range(rows)], ()
        )
        if step and not waits:
            pipeline.collect()
        found.append(time.perf_counter() - began)
        began = time.perf_counter()
    pipeline.collect()
    return found[min(5, steps - 1) :]


def decode(runner: GpuRunner, rows: int, sampling: str, floor: dict[str, float]) -> dict[str, Any]:
    weights = 2 * sum(one.weight.numel() for layer in products(runner) for one in layer) + 2 * VOCAB * HIDDEN
    kv_of_one = CONTEXT * LAYERS * 2 * KV_HEADS * DIM * 2
    floor_s = (weights + rows * kv_of_one) / floor["bytes_per_s"]
    first, _, rest = sampling.partition(" beside ")
    step_s = statistics.median(decode_steps(runner, rows, SAMPLINGS[rest or first], SAMPLINGS[first] if rest else None))
    return {
        "step_ms": 1e3 * step_s,
        "floor_ms": 1e3 * floor_s,
        "ratio": step_s / floor_s,
        "tokens_per_s": rows / step_s,
    }


def products(runner: GpuRunner) -> list[list[Product]]:
    return [[layer.qkv, layer.out, layer.gate_up, layer.down] for layer in runner._decoder.weights.layers]


def prefill_step(runner: GpuRunner, tokens: int) -> Callable[[], object]:
    """Returns a function that computes a prompt in chunks, as a prefill worker has them."""
    blocks = range(-(-tokens // BLOCK_SIZE))

    def step() -> None:
        for start in range(0, tokens, CHUNK):
            count = min(CHUNK, tokens - start)
            runner.forward([SeqChunk([7] * count, start, blocks, start + count == tokens)])

    return step


def prefill(runner: GpuRunner, tokens: int, floor: dict[str, float]) -> dict[str, float]:
    parameters = sum(one.weight.numel() for layer in products(runner) for one in layer)
    seconds = seconds_of(prefill_step(runner, tokens), 8)
    operations = 2 * parameters * tokens + 2 * LAYERS * HEADS * DIM * tokens * tokens
    floor_s = operations / floor["operations_per_s"]
    return {
        "ms": 1e3 * seconds,
        "floor_ms": 1e3 * floor_s,
        "ratio": seconds / floor_s,
        "tokens_per_s": tokens / seconds,
    }


def recompiles(runner: GpuRunner) -> dict[str, Any]:
    """Returns the first and second time of batches of new sizes after the warm-up, when nothing may be compiled any more."""
    sizes = (1, 2, 17, 63, 64, 65, 130, 250, 256, 777, 1009, 1024) if ON_GPU else (3, 17)
    first, second = [], []
    for times in (first, second):
        for tokens in sizes:
            began = time.perf_counter()
            prefill_step(runner, tokens)()
            synchronize()
            times.append(round(1e3 * (time.perf_counter() - began), 2))
    slowest = max(a - b for a, b in zip(first, second, strict=True))
    assert slowest < 300, f"a batch was {slowest:.0f} ms slower the first time: {first}, {second}"
    return {"first_ms": first, "second_ms": second, "slower_ms": slowest}


def kernels_of(work: Callable[[], object]) -> dict[str, Any]:
    """Milliseconds of the GPU by kernel, of one call; the most first."""
    from torch.profiler import ProfilerActivity, profile

    work()
    synchronize()
    with profile(activities=[ProfilerActivity.CUDA if ON_GPU else ProfilerActivity.CPU]) as seen:
        work()
        synchronize()
    name = "self_device_time_total" if ON_GPU else "self_cpu_time_total"
    times = {event.key[:60]: getattr(event, name) / 1e3 for event in seen.key_averages()}
    most = sorted(times.items(), key=lambda one: -one[1])[:16]
    return {"total_ms": round(sum(times.values()), 3), "ms": {key: round(value, 3) for key, value in most}}


def isolation(runner: GpuRunner) -> dict[str, float]:
    """Measures 32 greedy streams, alone and beside a process that computes prompts without end."""
    rows, greedy = min(32, max(BATCHES)), SAMPLINGS["greedy"]
    alone = [seconds for _ in range(5) for seconds in decode_steps(runner, rows, greedy)]
    command = [sys.executable, "-m", "tools.gpu.engine_bench", "prefill"]
    other = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None and other.stdout.readline().strip() == READY, "the other process did not begin"
        beside = [seconds for _ in range(5) for seconds in decode_steps(runner, rows, greedy)]
    finally:
        other.kill()
        other.wait(timeout=30)

    def p99(values: list[float]) -> float:
        return statistics.quantiles(values, n=100)[98]

    return {
        "p50_alone_ms": 1e3 * statistics.median(alone),
        "p99_alone_ms": 1e3 * p99(alone),
        "p50_beside_ms": 1e3 * statistics.median(beside),
        "p99_beside_ms": 1e3 * p99(beside),
    }


@torch.inference_mode()
def main() -> None:
    floor = floors()
    record("engine", "floor", **floor)
    record("engine", "memory before", **memory())
    weights = make_weights(LAYERS)
    record("engine", "memory with weights", **memory())
    attempt("engine", "as torch computes", lambda: as_torch_computes(weights))
    runner = make_runner(max(BATCHES), weights)
    record("engine", "memory with pool", **memory())
    began = time.perf_counter()
    attempt("engine", "capture", lambda: {"backend": [runner.capture(), runner.backend][1]})
    record("engine", "memory with graphs", **memory(), capture_s=time.perf_counter() - began)
    attempt("engine", "as the graph computes", lambda: as_the_graph_computes(runner, max(BATCHES)))
    attempt("engine", "recompiles", lambda: recompiles(runner))
    for rows in BATCHES:
        for sampling in ("greedy", "top_p", *(("temperature", "top_k", "top_p beside greedy", "grammar beside greedy")
                         if rows == BATCHES[0] else ())):  # fmt: skip
            attempt("engine", f"decode {rows}, {sampling}", lambda of=(rows, sampling): decode(runner, *of, floor))  # type: ignore[call-arg]
    for tokens in PROMPTS:
        attempt("engine", f"prefill {tokens}", lambda n=tokens: prefill(runner, n, floor))
    attempt(
        "engine",
        "kernels of decode",
        lambda: kernels_of(lambda: decode_steps(runner, BATCHES[0], SAMPLINGS["greedy"], steps=1)),
    )
    attempt("engine", "kernels of prefill", lambda: kernels_of(prefill_step(runner, PROMPTS[1])))
    attempt("engine", "isolation", lambda: isolation(runner))


@torch.inference_mode()
def prefill_for_ever() -> None:
    step = prefill_step(make_runner(1, make_weights(8 if ON_GPU else 1)), CONTEXT)
    step()
    synchronize()
    sys.stdout.write(READY + "\n")
    sys.stdout.flush()
    while True:
        step()
        synchronize()


if __name__ == "__main__":
    if sys.argv[1:2] == ["prefill"]:
        prefill_for_ever()
    else:
        main()
