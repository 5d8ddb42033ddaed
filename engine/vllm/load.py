"""Makes an engine of vLLM: a model on one or more ranks, and the pool that they share."""

import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from engine.engine import Engine, ModelInfo
from engine.model.errors import ModelUnsupported
from engine.model.fingerprint import model_fingerprint
from engine.model.work import attention_tokens
from engine.vllm.order import StartOrder, prepare_environment
from engine.vllm.start import Allocate, start


def load_engine(
    model: str,
    *,
    device: str,
    dtype: str,
    context_tokens_max: int,
    kv_bytes: int | None,
    gpu_share: float,
    step_tokens: int,
    rows: int,
    args: str = "",
    allocate: Allocate | None = None,
    on_progress: Callable[[str], None],
    on_lost_rank: Callable[[str], None],
) -> Engine:
    """Loads `model` (a folder, or ORG/NAME) with a pool of at most `kv_bytes`, or what `gpu_share` of a GPU leaves. `args` are
    vLLM's own options, as in a shell. `allocate(bytes)` may provide the pool's memory. `on_lost_rank(why)` is called on
    another thread when a process of tensor parallelism has ended. Raises ModelUnsupported."""
    prepare_environment()
    from engine.vllm.options import ranks_of
    from engine.vllm.ranks import Ranks, free_port
    from engine.vllm.runner import VllmRunner

    try:
        split = tuple(shlex.split(args))
    except ValueError as error:
        raise ModelUnsupported(f"--vllm-args: {error}") from error
    ranks = ranks_of(split)
    if ranks > 1 and device != "cpu":
        raise ModelUnsupported("--vllm-args: tensor parallelism on GPUs is not supported yet")
    order = StartOrder(
        model, "float32" if (dtype, device) == ("auto", "cpu") else dtype, context_tokens_max, kv_bytes, gpu_share,
        step_tokens, rows, split, ranks, port=free_port() if ranks > 1 else 0,
    )  # fmt: skip
    on_progress(f"loading weights by vLLM{f' on {ranks} ranks' if ranks > 1 else ''}")
    others = Ranks(order, on_lost_rank) if ranks > 1 else None
    try:
        config, runner, raw = start(order, others.allocate if others is not None else allocate)
    except (ValueError, RuntimeError, NotImplementedError, OSError) as error:
        raise ModelUnsupported(f"{model}: vLLM cannot load it: {_first_line(error)}") from error
    info, pool = _describe(runner, config, raw, ranks)
    numerics = _numerics(config, runner, ranks)
    is_invariant = os.environ.get("VLLM_BATCH_INVARIANT") == "1" and device != "cpu"
    return Engine(
        VllmRunner(runner, pool.shape[0], others, numerics=numerics, is_batch_invariant=is_invariant), info, pool
    )


def _describe(runner: Any, config: Any, raw: torch.Tensor, ranks: int) -> tuple[ModelInfo, torch.Tensor]:
    """(what others need to know, the pool in the shape of crossdock's own). Within a block its bytes lie as vLLM has them."""
    hf, text, kv = config.model_config.hf_config, config.model_config.hf_text_config, runner.kv_cache_config
    spec, names = kv.kv_cache_groups[0].kv_cache_spec, kv.kv_cache_groups[0].layer_names
    pages = len(names) * ranks
    dtype = spec.dtype if spec.dtype.is_floating_point else torch.float8_e4m3fn
    heads, block_bytes = int(spec.num_heads), pages * spec.page_size_bytes
    head_dim = spec.page_size_bytes // (2 * spec.block_size * heads * dtype.itemsize)
    shape = (kv.num_blocks, pages, 2, spec.block_size, heads, head_dim)
    if kv.num_blocks * block_bytes != raw.numel():
        raise ModelUnsupported(f"{config.model_config.model}: its KV cache has a shape that crossdock does not know")
    name, folder = str(dtype).removeprefix("torch."), Path(config.model_config.model)
    fingerprint = model_fingerprint(
        folder, hf.to_dict(), name, (pages, heads, head_dim), f"vllm {spec.block_size}", ranks
    )
    info = ModelInfo(
        model_path=str(folder),
        model_type=str(hf.model_type),
        context_tokens=config.model_config.max_model_len,
        vocab_size=config.model_config.get_vocab_size(),
        layers=pages,
        kv_heads=heads,
        head_dim=head_dim,
        dtype=name,
        block_size=spec.block_size,
        block_bytes=block_bytes,
        eos_token_ids=_eos_token_ids(config),
        attention_tokens=attention_tokens(runner.model, text, len(names), int(config.model_config.get_head_size())),
        fingerprint=fingerprint,
    )
    return info, raw.view(dtype).view(shape)


def _eos_token_ids(config: Any) -> tuple[int, ...]:
    text = config.model_config.hf_text_config
    ids = config.model_config.try_get_generation_config().get("eos_token_id", getattr(text, "eos_token_id", None))
    if ids is None:
        return ()
    return tuple(int(token) for token in ids) if isinstance(ids, list | tuple) else (int(ids),)


def _numerics(config: Any, runner: Any, ranks: int) -> str:
    import vllm

    device = torch.cuda.get_device_name(runner.device) if runner.device.type == "cuda" else "CPU"
    attention = runner.attn_groups[0][0].backend.get_name()
    dtype = str(config.model_config.dtype).removeprefix("torch.")
    quantized = config.model_config.quantization or "unquantized"
    return f"vllm {vllm.__version__}, {dtype}, {quantized}, {attention}, {ranks} ranks, {device}"


def _first_line(error: BaseException) -> str:
    if isinstance(error, ValidationError):  # its own first line only counts errors
        return str(error.errors()[0]["msg"]).removeprefix("Value error, ")
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
