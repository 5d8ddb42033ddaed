"""The choice of the code that runs a loaded model: the kernels of its device where they know its shape, else transformers'
own, with the attention backend `torch`. This is the one place that decides it; the log has the `backend` of what was chosen.

All are compared with the model as transformers runs it before it serves.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from engine.attention import paged
from engine.attention.paged import AttentionCall
from engine.attention.torch_backend import TorchAttention
from engine.cpu.decoder import CpuDecoder
from engine.cpu.library import KernelsUnavailable, load_kernels
from engine.cpu.recognise import ModelParts, NotRecognised, recognise
from engine.cpu.weights import round_weights
from engine.engine import Engine, ModelInfo, Runner
from engine.gpu.memory import GpuShare, measure
from engine.gpu.ops import make_ops
from engine.gpu.runner import GpuRunner
from engine.gpu.weights import DecoderWeights, fuse
from engine.model import selfcheck
from engine.model.errors import ModelUnsupported, WeightsUnsupported
from engine.model.runner import TransformersRunner
from engine.triton_launch import KernelFailed

Progress = Callable[[str], None]


@dataclass(frozen=True)
class BackendCandidate:
    """A model as transformers has loaded it, with its own attention."""

    model: Any
    text_config: Any
    info: ModelInfo
    calls: list[AttentionCall]
    weights: str  # how the CPU kernels are to keep them
    kv_bytes: int | None  # of the pool; None: what the share of the GPU leaves
    gpu: GpuShare

    @property
    def on_gpu(self) -> bool:
        return bool(self.model.device.type == "cuda")

    @property
    def on_cpu(self) -> bool:
        """The model in float32, which is what the CPU kernels compute in."""
        return bool(self.model.device.type == "cpu" and self.model.dtype == torch.float32)


MakePool = Callable[[int], torch.Tensor]


def make_engine(candidate: BackendCandidate, make_pool: MakePool, progress: Progress) -> Engine:
    """`make_pool(bytes)` raises `PoolTooSmall`. Raises ModelUnsupported."""
    parts = _recognised(candidate, progress) if candidate.on_cpu else None
    windows = {call.window for call in candidate.calls if call.window is not None}
    check = selfcheck.SelfCheck(candidate.model, candidate.info, candidate.text_config, windows)
    check.compute_reference()
    info, fused = candidate.info, _fused(candidate, progress) if candidate.on_gpu else None
    pool_bytes = candidate.kv_bytes
    if pool_bytes is None:
        progress("measuring memory")
        try:
            pool_bytes = _measured(candidate, fused)
        except KernelFailed as error:
            _without_kernels(candidate, str(error), progress)
            fused, pool_bytes = None, _measured(candidate, None)
    pool = make_pool(pool_bytes)
    if parts is not None or fused is not None:
        try:
            return _with_kernels(candidate, parts, fused, pool, check, progress)
        except KernelFailed as error:
            _without_kernels(candidate, str(error), progress)
    engine = Engine(_transformers_runner(candidate, pool), info, pool)
    progress("comparing the paged forward with the model's own")
    difference = check.compare(engine)
    if difference is not None:
        raise ModelUnsupported(f"{info.model_path}: {difference}")
    return engine


def _with_kernels(
    candidate: BackendCandidate, parts: ModelParts | None, fused: DecoderWeights | None, pool: torch.Tensor,
    check: selfcheck.SelfCheck, progress: Progress,
) -> Engine:  # fmt: skip
    """Raises KernelFailed, also for kernels that compute something else than the model."""
    info = candidate.info
    runner: Runner
    if parts is not None:
        progress("preparing the CPU kernels")
        runner = CpuDecoder(parts, pool, info.context_tokens, candidate.weights, torch.get_num_threads())
    else:
        assert fused is not None
        runner = GpuRunner(fused, pool, make_ops(pool), info.context_tokens, candidate.gpu.decode_rows)
    engine = Engine(runner, info, pool)
    difference = check.compare(engine)
    if difference is not None:
        raise KernelFailed(difference)
    if isinstance(runner, GpuRunner):
        progress("capturing CUDA graphs")
        runner.capture()
    return engine


def _fused(candidate: BackendCandidate, progress: Progress) -> DecoderWeights | None:
    """The candidate for the GPU kernels; None where they cannot run it."""
    try:
        return fuse(recognised(candidate), candidate.info.context_tokens)
    except NotRecognised as error:
        _without_kernels(candidate, str(error), progress)
        return None


def _measured(candidate: BackendCandidate, fused: DecoderWeights | None) -> int:
    """Bytes for a pool on a GPU."""
    info, model = candidate.info, candidate.model

    def make_runner(tokens: int) -> tuple[Runner, int]:
        blocks = -(-tokens // info.block_size)
        shape = (blocks, info.layers, 2, info.block_size, info.kv_heads, info.head_dim)
        pool = torch.zeros(shape, dtype=model.dtype, device=model.device)
        if fused is None:
            return _transformers_runner(candidate, pool), blocks
        return GpuRunner(fused, pool, make_ops(pool), info.context_tokens), blocks

    return measure(candidate.gpu, info.context_tokens, info.vocab_size, make_runner, model.device)


def recognised(candidate: BackendCandidate) -> ModelParts:
    """Raises NotRecognised."""
    return recognise(candidate.model, candidate.info.kv_heads, candidate.info.head_dim, candidate.calls)


def _recognised(candidate: BackendCandidate, progress: Progress) -> ModelParts | None:
    """The parts that the CPU kernels run, with weights rounded as they will be; None where the kernels cannot run them."""
    try:
        load_kernels()
        parts = recognised(candidate)
    except (NotRecognised, KernelsUnavailable) as error:
        _without_kernels(candidate, str(error), progress)
        return None
    if candidate.weights != "float32":
        round_weights(parts.linears(), candidate.weights)
    return parts


def _without_kernels(candidate: BackendCandidate, why: str, progress: Progress) -> None:
    if candidate.weights != "float32":
        raise WeightsUnsupported(
            f"{candidate.weights} weights need the CPU kernels, which cannot run this model: {why}"
        )
    slower = ", expect about 10 times slower" if candidate.on_gpu else ""
    progress(
        f"without the CPU kernels: {why}{slower}" if candidate.on_cpu else f"without the GPU kernels: {why}{slower}"
    )


def _transformers_runner(candidate: BackendCandidate, pool: torch.Tensor) -> TransformersRunner:
    candidate.model.set_attn_implementation(paged.NAME)
    return TransformersRunner(candidate.model, candidate.text_config, pool, TorchAttention(pool))
