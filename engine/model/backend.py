"""Which code runs a loaded model: the CPU kernels where they know its shape, else transformers' own.

Either is compared with the model as transformers runs it before it serves.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from engine.attention import paged as attention
from engine.attention.paged import AttentionCall
from engine.attention.torch_backend import TorchAttention
from engine.cpu.decoder import CpuDecoder
from engine.cpu.library import KernelsUnavailable
from engine.cpu.library import load as load_kernels
from engine.cpu.recognise import ModelParts, NotRecognised, recognise
from engine.cpu.weights import round_weights
from engine.engine import Engine, ModelInfo
from engine.model import selfcheck
from engine.model.errors import ModelUnsupported, WeightsUnsupported
from engine.model.runner import TransformersRunner

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Candidate:
    """A model as transformers has loaded it, with its own attention."""

    model: Any
    text_config: Any
    info: ModelInfo
    calls: list[AttentionCall]
    """What its layers call their attention with."""
    weights: str
    """How the CPU kernels are to keep its weights."""

    @property
    def on_cpu(self) -> bool:
        """In float32, which is what the CPU kernels compute in."""
        return bool(self.model.device.type == "cpu" and self.model.dtype == torch.float32)


def make_engine(candidate: Candidate, make_pool: Callable[[], torch.Tensor], progress: Progress) -> Engine:
    """Raises ModelUnsupported."""
    parts = _recognised(candidate, progress) if candidate.on_cpu else None
    windows = {call.window for call in candidate.calls if call.window is not None}
    check = selfcheck.SelfCheck(candidate.model, candidate.info, candidate.text_config, windows)
    check.compute_reference()
    pool, info = make_pool(), candidate.info
    if parts is not None:
        progress("preparing the CPU kernels")
        decoder = CpuDecoder(parts, pool, info.context_tokens, candidate.weights, torch.get_num_threads())
        engine = Engine(decoder, info, pool)
        difference = check.compare(engine)
        if difference is None:
            return engine
        _without_kernels(candidate, difference, progress)
    engine = Engine(_transformers_runner(candidate, pool), info, pool)
    progress("comparing the paged forward with the model's own")
    difference = check.compare(engine)
    if difference is not None:
        raise ModelUnsupported(f"{info.model_path}: {difference}")
    return engine


def recognised(candidate: Candidate) -> ModelParts:
    """Raises NotRecognised."""
    return recognise(candidate.model, candidate.info.kv_heads, candidate.info.head_dim, candidate.calls)


def _recognised(candidate: Candidate, progress: Progress) -> ModelParts | None:
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


def _without_kernels(candidate: Candidate, why: str, progress: Progress) -> None:
    if candidate.weights != "float32":
        raise WeightsUnsupported(
            f"{candidate.weights} weights need the CPU kernels, which cannot run this model: {why}"
        )
    progress(f"without the CPU kernels: {why}")


def _transformers_runner(candidate: Candidate, pool: torch.Tensor) -> TransformersRunner:
    candidate.model.set_attn_implementation(attention.NAME)
    return TransformersRunner(candidate.model, candidate.text_config, pool, TorchAttention(pool))
