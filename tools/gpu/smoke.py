"""Shows in 25 seconds what is on this machine, and whether each Triton kernel compiles, fits and computes what plain torch
does, at the shapes of real models: `python -m tools.gpu.smoke`."""

import os
import platform
import shutil
import subprocess
import sysconfig
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from engine import triton_launch
from engine.attention.forward_batch import ForwardBatch, SeqChunk, pack
from engine.attention.interface import AttentionBackend, AttentionCall
from engine.attention.torch_backend import TorchAttention
from engine.gpu.ops import Ops, TorchOps
from engine.gpu.weights import DecoderWeights, LayerWeights, Product
from tools.gpu.device import DTYPE, synchronize
from tools.gpu.record import DEVICE, ON_GPU, attempt, record

PLAIN = AttentionCall(None, None, None)
SHAPES = (
    (64, 1, 16, PLAIN), (96, 4, 16, PLAIN), (128, 4, 16, PLAIN), (128, 8, 24, AttentionCall(100, None, 30.0)),
    (256, 8, 16, AttentionCall(None, 0.06, 50.0)),
)  # fmt: skip
"""(head_dim, query heads of a KV head, block size, call)"""
KV_HEADS, LENGTHS = (8, (700, 131, 64)) if ON_GPU else (2, (70, 9))
TOLERANCE = 2e-2 if ON_GPU else 1e-4
PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "accelerate",
    "safetensors",
    "pyzmq",
    "msgspec",
    "structlog",
    "pytest",
    "ziglang",
)


def machine() -> dict[str, Any]:
    found: dict[str, Any] = {"python": platform.python_version(), "cpus": os.cpu_count(), "device": DEVICE}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    found["compiler"] = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    found["Python.h"] = (Path(sysconfig.get_path("include")) / "Python.h").is_file()
    if ON_GPU:
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "gpu": properties.name, "capability": torch.cuda.get_device_capability(0), "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())), "multiprocessors": properties.multi_processor_count,
            "gib": round(properties.total_memory / (1 << 30), 1),
            "shared_bytes": getattr(properties, "shared_memory_per_block_optin", None),
        }  # fmt: skip
        triton_launch.prepare()
    return found


def said_by(*command: str) -> dict[str, Any]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=15, check=False)
    return {"status": done.returncode, "text": (done.stdout or done.stderr)[-6000:]}


def chunks_of(size: int, decode: bool) -> tuple[list[SeqChunk], int]:
    """Sequences of LENGTHS tokens, of which the last half or the last one is computed; and how many blocks they take."""
    chunks, first = [], 0
    for length in LENGTHS:
        blocks = range(first, first + -(-length // size))
        count = 1 if decode else length // 2
        chunks.append(SeqChunk([7] * count, length - count, blocks, True))
        first = blocks.stop
    return chunks, first


def attention(dim: int, group: int, size: int, call: AttentionCall, decode: bool) -> dict[str, Any]:
    from engine.attention.triton_backend import TritonAttention

    chunks, blocks = chunks_of(size, decode)
    pool = torch.randn(blocks + 1, 2, 2, size, KV_HEADS, dim, dtype=DTYPE, device=DEVICE)
    batch = pack(chunks, pool)
    q = torch.randn(len(batch.positions), KV_HEADS * group, dim, dtype=DTYPE, device=DEVICE)

    def read(backend: AttentionBackend, over: ForwardBatch) -> torch.Tensor:
        return backend.read(1, call, q, backend.plan(over)).float()

    return compared(lambda: read(TritonAttention(pool), batch), lambda: read(TorchAttention(pool), batch))


def compared(ours: Callable[[], torch.Tensor], theirs: Callable[[], torch.Tensor]) -> dict[str, Any]:
    """Raises AssertionError where they differ."""
    began = time.perf_counter()
    got = ours()
    synchronize()
    first_s = time.perf_counter() - began
    want = theirs()
    difference = ((got - want).norm() / want.norm()).item()
    result = {"difference": difference, "max": (got - want).abs().max().item(), "first_s": round(first_s, 2)}
    assert difference <= TOLERANCE, result
    return result


def elementwise(what: str, dim: int = 128, heads: int = 32, kv_heads: int = 8, hidden: int = 4096) -> dict[str, Any]:
    from engine.gpu.triton_ops import TritonOps

    if not ON_GPU:
        dim, heads, kv_heads, hidden = 16, 4, 2, 64

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=DTYPE, device=DEVICE)

    pools = [random(4, 2, 2, 16, kv_heads, dim) for _ in range(2)]
    pools[1].copy_(pools[0])
    norm, tables = random(dim), torch.randn(64, dim, device=DEVICE)
    layer = LayerWeights(*(Product(norm, None),) * 4, norm, norm, norm, norm, PLAIN)
    model = DecoderWeights((layer,), norm, Product(norm, None), norm, tables, tables, heads, kv_heads, dim, 0, 1e-5)
    x, delta, weight, gate = random(33, hidden), random(33, hidden), random(hidden), random(33, 2 * hidden)
    qkv = random(33, (heads + 2 * kv_heads) * dim)

    def of(ops: Ops, pool: torch.Tensor) -> torch.Tensor:
        if what == "add_norm":
            return torch.cat(ops.add_norm(x.clone(), delta, weight, 1e-5)).float()
        if what == "activate":
            return torch.cat([ops.activate(gate, one) for one in (0, 1)]).float()
        metadata = ops.attention.plan(pack([SeqChunk([7] * 33, 0, [2, 0, 3], True)], pool))
        q = ops.rotate_and_write(1, layer, model, qkv, metadata)
        return torch.cat([q.float().flatten(), pool.float().flatten()])

    return compared(lambda: of(TritonOps(pools[0]), pools[0]), lambda: of(TorchOps(pools[1]), pools[1]))


def resources() -> None:
    """Records the resources of each variant of each kernel that was compiled."""
    from engine.attention import triton_kernels
    from engine.gpu import kernels

    for kernel in (
        triton_kernels.prefill, triton_kernels.decode, triton_kernels.join_splits, triton_kernels.write, kernels.add_norm,
        kernels.rotate_and_write, kernels.activate,
    ):  # fmt: skip
        for cache in getattr(kernel, "device_caches", {}).values():
            for made in cache[0].values():
                record(
                    "smoke", f"compiled {kernel.__name__}", registers=made.n_regs, spills=made.n_spills,
                    shared=made.metadata.shared, warps=made.metadata.num_warps,
                )  # fmt: skip


def main() -> None:
    attempt("smoke", "machine", machine)
    for command in (("nvidia-smi", "-q"), ("nvidia-smi", "topo", "-m")) if ON_GPU else ():
        attempt("smoke", " ".join(command), lambda command=command: said_by(*command))
    for dim, group, size, call in SHAPES if ON_GPU else ((16, 2, 4, PLAIN), (24, 1, 3, AttentionCall(20, None, 5.0))):
        for decode in (False, True):
            name = f"{'decode' if decode else 'prefill'} d{dim} group {group} block {size}"
            attempt("smoke", name, lambda a=(dim, group, size, call, decode): attention(*a))
    for what in ("add_norm", "activate", "rotate_and_write"):
        attempt("smoke", what, lambda what=what: elementwise(what))
    resources()


if __name__ == "__main__":
    with torch.inference_mode():
        main()
