"""Compiles the Triton kernels for GPUs that are not here: `python -m tests.engine.triton_aot full|batches`.

The production code runs on tensors of the host, over a driver that only names a GPU; each launch compiles its kernel, by the
compilers in Triton's wheel, instead of starting it. A process of its own: tests interpret kernels, which cannot be undone.
Prints a line of JSON for each kernel that was compiled, or one for each kernel's count of variants (`batches`).
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from engine import triton_launch
from engine.attention import triton_backend
from engine.attention.forward_batch import SeqChunk, pack
from engine.attention.interface import AttentionCall
from engine.attention.triton_backend import TritonAttention
from engine.gpu.triton_ops import TritonOps
from engine.gpu.weights import DecoderWeights, LayerWeights, Product

SHARED_BYTES = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
"""Compute capability → shared memory that one program may have (CUDA C++ Programming Guide, technical specifications): A100,
A10, L4, H100, B200, RTX 50."""
DIMS, GROUPS, KV_HEADS = (64, 96, 128, 256), (1, 4, 8), 2
_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+)")
_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


class Driver:
    """In place of the driver of a GPU."""

    def __init__(self) -> None:
        self.capability = 80

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)


class Compiled:
    """What the launches of some code compiled, each kernel's variant once."""

    def __init__(self) -> None:
        self.found: list[tuple[str, Any, float]] = []

    def launch(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        before, began = variants(kernel), time.monotonic()
        made = kernel.warmup(*arguments, grid=grid, **constants)
        if variants(kernel) > before:
            self.found.append((kernel.__name__, made, time.monotonic() - began))

    def rows(self, **of_all: Any) -> Iterator[dict[str, Any]]:
        for name, made, seconds in self.found:
            registers, stack = resources(made.asm["cubin"])
            yield {
                "kernel": name, **of_all, "shared": made.metadata.shared, "registers": registers, "stack": stack,
                "seconds": round(seconds, 2),
            }  # fmt: skip
        self.found.clear()


def variants(kernel: Any) -> int:
    return sum(len(cache[0]) for cache in kernel.device_caches.values())


def resources(cubin: bytes) -> tuple[int, int]:
    """(registers of a thread, bytes of its stack: what did not fit them)"""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [_CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True, timeout=60
        ).stdout
    found = _RESOURCES.search(text)
    assert found is not None, text
    return int(found[1]), int(found[2])


def attend(attention: TritonAttention, pool: torch.Tensor, heads: int, counts: list[int], call: AttentionCall) -> None:
    chunks = [SeqChunk([7] * count, 0, [0] * -(-count // pool.shape[3]), True) for count in counts]
    batch = pack(chunks, pool)
    q = torch.zeros(len(batch.positions), heads, pool.shape[5], dtype=pool.dtype)
    attention.read(0, call, q, attention.plan(batch))


def make_pool(dim: int, dtype: torch.dtype, size: int = 16, kv_heads: int = KV_HEADS) -> torch.Tensor:
    return torch.zeros(2, 2, 2, size, kv_heads, dim, dtype=dtype)


def elementwise(pool: torch.Tensor, heads: int, rows: int = 3) -> None:
    """The kernels between the products, of a model 4,096 wide."""
    ops, dim, dtype = TritonOps(pool), pool.shape[5], pool.dtype
    batch = pack([SeqChunk([7] * rows, 0, [0], True)], pool)
    metadata = ops.attention.plan(batch)
    norm, table, none = torch.ones(dim, dtype=dtype), torch.ones(64, dim), Product(torch.zeros(1, 1), None)
    call = AttentionCall(None, None, None)
    x = torch.zeros(rows, 4096, dtype=dtype)
    for delta in (None, torch.zeros_like(x)):
        ops.add_norm(x, delta, torch.ones(4096, dtype=dtype), 1e-5)
    for of_head in (None, norm):
        layer = LayerWeights(none, none, none, none, norm, norm, of_head, of_head, call)
        model = DecoderWeights((layer,), x, none, norm, table, table, heads, pool.shape[4], dim, 0, 1e-5)
        qkv = torch.zeros(rows, (heads + 2 * pool.shape[4]) * dim, dtype=dtype)
        ops.rotate_and_write(0, layer, model, qkv, metadata)
    for activation in (0, 1):
        ops.activate(torch.zeros(rows, 2 * 14336, dtype=dtype), activation)
    k = torch.zeros(rows, pool.shape[4], dim, dtype=dtype)
    ops.attention.write(0, k, k, metadata)


def attention_cases() -> Iterator[tuple[int, int, int, torch.dtype, AttentionCall, int]]:
    """(capability, head_dim, group, type, call, block size)."""
    plain, capped = AttentionCall(None, None, None), AttentionCall(4096, None, 50.0)
    for capability in SHARED_BYTES:
        for dim in DIMS:
            for group in GROUPS:
                for dtype in (torch.bfloat16, torch.float16, torch.float32):
                    yield capability, dim, group, dtype, plain, 16
            yield capability, dim, 4, torch.bfloat16, capped, 24


def compile_all(driver: Driver) -> Iterator[dict[str, Any]]:
    compiled = Compiled()
    triton_launch.launch = compiled.launch
    for capability, dim, group, dtype, call, size in attention_cases():
        driver.capability = capability
        triton_backend._SHARED_BYTES = SHARED_BYTES[capability]  # type: ignore[misc]
        pool = make_pool(dim, dtype, size)
        for counts in ([1, 1], [5, 1]):
            attend(TritonAttention(pool), pool, KV_HEADS * group, counts, call)
        yield from compiled.rows(capability=capability, dim=dim, group=group, dtype=str(dtype)[6:])
    for capability in SHARED_BYTES:
        driver.capability = capability
        for dim in DIMS:
            for dtype in (torch.bfloat16, torch.float16, torch.float32):
                elementwise(make_pool(dim, dtype), 8)
                yield from compiled.rows(capability=capability, dim=dim, group=4, dtype=str(dtype)[6:])


def count_variants(driver: Driver) -> dict[str, int]:
    """Of each kernel, after batches of all sizes: prompts of 1 to 17 tiles, tables of 1 to 70 blocks, odd counts of tokens."""
    driver.capability = 90
    compiled = Compiled()
    triton_launch.launch = compiled.launch
    pool = make_pool(64, torch.bfloat16)
    attention, call = TritonAttention(pool), AttentionCall(None, None, None)
    tiles = [[tiles * attention.rows] for tiles in range(1, 18)]
    mixed = [[count, 1] for count in (2, 3, 16, 17, 31, 255, 256, 1023, 1024, 1121)]
    for counts in (*tiles, *mixed, [1], [1] * 2, [1] * 7, [1] * 16, [1] * 17):
        attend(attention, pool, 8, counts, call)
    for window in (1, 16, 17, 4096):
        attend(attention, pool, 8, [3], AttentionCall(window, None, None))
        attend(attention, pool, 8, [1], AttentionCall(window, None, None))
    for rows in (1, 2, 3, 7, 8, 15, 16, 17, 63, 64):
        elementwise(make_pool(64, torch.bfloat16, 64), 8, rows)
    return dict(Counter(name for name, _, _ in compiled.found))


def main(what: str) -> None:
    driver = Driver()
    triton.runtime.driver.set_active(driver)
    os.environ.pop("TRITON_INTERPRET", None)
    if what == "batches":
        sys.stdout.write(json.dumps(count_variants(driver)) + "\n")
        return
    for row in compile_all(driver):
        sys.stdout.write(json.dumps(row) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
