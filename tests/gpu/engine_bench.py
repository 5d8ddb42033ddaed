"""The engine on one GPU beside what the GPU can do: `python -m tests.gpu.engine_bench`. Prints one line of JSON.

A model of 8B parameters' shape, with random weights made on the device, decodes at several batches: beside the bytes of a step
over the measured bandwidth. It computes prompts: beside the measured rate of matrix products. And it decodes while another
process computes prompts on the same card (`python -m tests.gpu.engine_bench prefill`).
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from engine.attention.forward_batch import SeqChunk
from engine.attention.interface import AttentionCall
from engine.gpu.choose import make_ops
from engine.gpu.runner import GpuRunner
from engine.gpu.weights import DecoderWeights, LayerWeights, Product
from engine.pipeline import DecodeRow
from engine.sampling.sampler import SamplerState
from proto.sampling import Sampling
from tests.gpu.bench import ROOT, gpu_seconds

LAYERS, HIDDEN, HEADS, KV_HEADS, DIM, INNER, VOCAB = 32, 4096, 32, 8, 128, 14336, 128_256
BLOCK_SIZE, CONTEXT, STEPS = 16, 1024, 40
BATCHES = (1, 8, 32, 64)
BLOCKS_OF_ONE = (CONTEXT + 2 * STEPS) // BLOCK_SIZE + 1
READY = "ready"
DEVICE = "cuda"


def make_runner(rows: int, layers: int = LAYERS) -> tuple[GpuRunner, torch.Tensor]:
    def product(outputs: int, inputs: int) -> Product:
        return Product(torch.randn(outputs, inputs, dtype=torch.bfloat16, device=DEVICE) * 0.02, None)

    ones, call = torch.ones(HIDDEN, device=DEVICE), AttentionCall(None, None, None)
    made = tuple(
        LayerWeights(
            product((HEADS + 2 * KV_HEADS) * DIM, HIDDEN), product(HIDDEN, HEADS * DIM), product(2 * INNER, HIDDEN),
            product(HIDDEN, INNER), ones, ones, None, None, call,
        )
        for _ in range(layers)
    )  # fmt: skip
    head = product(VOCAB, HIDDEN)
    tables = torch.ones(2 * CONTEXT + 2048, DIM, device=DEVICE)
    weights = DecoderWeights(made, head.weight, head, ones, tables, tables, HEADS, KV_HEADS, DIM, 0, 1e-5)
    shape = (max(rows, 2) * BLOCKS_OF_ONE + 64, layers, 2, BLOCK_SIZE, KV_HEADS, DIM)
    pool = torch.zeros(shape, dtype=torch.bfloat16, device=DEVICE)
    return GpuRunner(weights, pool, make_ops(pool), len(tables), rows), pool


def floors() -> dict[str, float]:
    """Bytes/s of a copy, counted twice, and operations/s of a product in bfloat16."""
    source = torch.zeros(1 << 30, dtype=torch.uint8, device=DEVICE)
    target, a = torch.empty_like(source), torch.randn(8192, 8192, dtype=torch.bfloat16, device=DEVICE)
    return {
        "bytes_per_s": 2 * source.numel() / gpu_seconds(lambda: target.copy_(source)),
        "operations_per_s": 2 * 8192**3 / gpu_seconds(lambda: a @ a),
    }


def decode_steps(runner: GpuRunner, rows: int, sampling: Sampling) -> list[float]:
    """Seconds from one step's tokens to the next one's, at CONTEXT tokens, as a decode worker runs them."""
    pipeline = runner.pipeline
    assert pipeline is not None
    states = [SamplerState(sampling, 0, VOCAB, [], start_index=1) for _ in range(rows)]
    tables = [tuple(range(row * BLOCKS_OF_ONE, (row + 1) * BLOCKS_OF_ONE)) for row in range(rows)]
    found, began = [], 0.0
    for step in range(STEPS + 1):
        if step < STEPS:
            pipeline.launch(
                [DecodeRow((rows, row), 7, CONTEXT + step, tables[row], states[row], step + 1) for row in range(rows)],
                (),
            )
        if step:
            pipeline.collect()
            found.append(time.perf_counter() - began)
        began = time.perf_counter()
    return found[5:-1]


def decode(runner: GpuRunner, floor: dict[str, float]) -> list[dict[str, Any]]:
    pipeline = runner.pipeline
    assert pipeline is not None
    weights = 2 * sum(one.weight.numel() for layer in pipeline_layers(runner) for one in layer) + 2 * VOCAB * HIDDEN
    kv_of_one = CONTEXT * LAYERS * 2 * KV_HEADS * DIM * 2
    found = []
    for rows in BATCHES:
        floor_s = (weights + rows * kv_of_one) / floor["bytes_per_s"]
        for name, sampling in (
            ("greedy", Sampling(max_tokens=CONTEXT, temperature=0.0)),
            ("top_p", Sampling(max_tokens=CONTEXT, temperature=1.0, top_p=0.9)),
        ):
            step_s = statistics.median(decode_steps(runner, rows, sampling))
            found.append({"rows": rows, "sampling": name, "step_ms": 1e3 * step_s, "floor_ms": 1e3 * floor_s,
                          "ratio": step_s / floor_s})  # fmt: skip
    return found


def pipeline_layers(runner: GpuRunner) -> list[list[Product]]:
    return [[layer.qkv, layer.out, layer.gate_up, layer.down] for layer in runner.weights.layers]


def prefill_step(runner: GpuRunner, tokens: int) -> Callable[[], object]:
    return lambda: runner.forward([SeqChunk([7] * tokens, 0, range(-(-tokens // BLOCK_SIZE)), True)])


def prefill(runner: GpuRunner, floor: dict[str, float], tokens: int = CONTEXT) -> dict[str, float]:
    parameters = sum(one.weight.numel() for layer in pipeline_layers(runner) for one in layer)
    seconds = gpu_seconds(prefill_step(runner, tokens))
    floor_s = 2 * parameters * tokens / floor["operations_per_s"]
    return {"tokens": tokens, "ms": 1e3 * seconds, "floor_ms": 1e3 * floor_s, "ratio": seconds / floor_s}


def isolation(runner: GpuRunner) -> dict[str, float]:
    """Of 32 greedy streams, alone and beside a process that computes prompts without end."""
    greedy = Sampling(max_tokens=CONTEXT, temperature=0.0)
    alone = [seconds for _ in range(5) for seconds in decode_steps(runner, 32, greedy)]
    command = [sys.executable, "-m", "tests.gpu.engine_bench", "prefill"]
    other = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None and other.stdout.readline().strip() == READY, "the other process did not begin"
        beside = [seconds for _ in range(5) for seconds in decode_steps(runner, 32, greedy)]
    finally:
        other.kill()
        other.wait(timeout=30)

    def p99(values: list[float]) -> float:
        return statistics.quantiles(values, n=100)[98]

    return {
        "p50_alone_ms": 1e3 * statistics.median(alone), "p99_alone_ms": 1e3 * p99(alone),
        "p50_beside_ms": 1e3 * statistics.median(beside), "p99_beside_ms": 1e3 * p99(beside),
    }  # fmt: skip


@torch.inference_mode()
def measure() -> dict[str, Any]:
    floor = floors()
    runner, _ = make_runner(max(BATCHES))
    began = time.perf_counter()
    runner.capture()
    result: dict[str, Any] = {"floor": floor, "backend": runner.backend, "capture_s": time.perf_counter() - began}
    parts: dict[str, Callable[[], Any]] = {
        "decode": lambda: decode(runner, floor),
        "prefill": lambda: prefill(runner, floor),
        "isolation": lambda: isolation(runner),
    }
    for name, part in parts.items():
        try:
            result[name] = part()
        except (RuntimeError, AssertionError) as error:  # the others are still worth a figure
            result[name] = {"error": f"{type(error).__name__}: {str(error)[:1000]}"}
    return result


@torch.inference_mode()
def prefill_for_ever() -> None:
    runner, _ = make_runner(1, layers=8)
    step = prefill_step(runner, CONTEXT)
    step()
    torch.cuda.synchronize()
    sys.stdout.write(READY + "\n")
    sys.stdout.flush()
    while True:
        step()
        torch.cuda.synchronize()


if __name__ == "__main__":
    if sys.argv[1:2] == ["prefill"]:
        prefill_for_ever()
    else:
        sys.stdout.write(json.dumps(measure()) + "\n")
