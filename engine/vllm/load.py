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
from engine.vllm.ranks import MapPool, Ranks, free_port
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
    map_pool: MapPool,
    on_progress: Callable[[str], None],
    on_lost_rank: Callable[[str], None],
) -> Engine:
    """Loads `model` (a folder, or ORG/NAME) with a pool of at most `kv_bytes`, or what `gpu_share` of a GPU leaves. `args` are
    vLLM's own options, as in a shell. `allocate(bytes)` may provide the memory of a pool that is not divided between ranks;
    those of other ranks come by `map_pool`. `on_lost_rank(why)` is called on another thread when a rank's process has ended.
    Raises ModelUnsupported."""
    prepare_environment()
    from engine.vllm.options import ranks_of
    from engine.vllm.runner import VllmRunner

    try:
        split = tuple(shlex.split(args))
    except ValueError as error:
        raise ModelUnsupported(f"--vllm-args: {error}") from error
    ranks = ranks_of(split)
    order = StartOrder(
        model, "float32" if (dtype, device) == ("auto", "cpu") else dtype, context_tokens_max, kv_bytes, gpu_share,
        step_tokens, rows, split, ranks, port=free_port() if ranks > 1 else 0,
    )  # fmt: skip
    on_progress(f"loading weights by vLLM{f' on {ranks} ranks' if ranks > 1 else ''}")
    others = Ranks(order, map_pool, on_lost_rank) if ranks > 1 else None
    try:
        config, runner, raw = start(order, allocate if ranks == 1 else None)
        pools = [raw, *others.pools(raw.numel(), raw.device)] if others is not None else [raw]
    except (ValueError, RuntimeError, NotImplementedError, OSError) as error:
        raise ModelUnsupported(f"{model}: vLLM cannot load it: {_first_line(error)}") from error
    info, shape = _describe(runner, config, raw.numel(), ranks)
    numerics = _numerics(config, runner, ranks)
    is_invariant = os.environ.get("VLLM_BATCH_INVARIANT") == "1" and device != "cpu"
    made = VllmRunner(runner, shape[0], others, numerics=numerics, is_batch_invariant=is_invariant)
    return Engine(made, info, *(pool.view(getattr(torch, info.dtype)).view(shape) for pool in pools))


def _describe(runner: Any, config: Any, rank_bytes: int, ranks: int) -> tuple[ModelInfo, tuple[int, ...]]:
    """(what others need to know, the shape of a rank's pool). Within a block its bytes lie as vLLM has them."""
    hf, text, kv = config.model_config.hf_config, config.model_config.hf_text_config, runner.kv_cache_config
    spec, names = kv.kv_cache_groups[0].kv_cache_spec, kv.kv_cache_groups[0].layer_names
    dtype = spec.dtype if spec.dtype.is_floating_point else torch.float8_e4m3fn
    parts = _parts(config, ranks)  # ranks that share no heads
    heads, layers = int(spec.num_heads) * parts, len(names)
    head_dim = spec.page_size_bytes // (2 * spec.block_size * int(spec.num_heads) * dtype.itemsize)
    if kv.num_blocks * layers * spec.page_size_bytes != rank_bytes:
        raise ModelUnsupported(f"{config.model_config.model}: its KV cache has a shape that crossdock does not know")
    shape: tuple[int, ...] = (kv.num_blocks, layers, 2, spec.block_size, heads, head_dim)
    if ranks > 1:
        outer = {"BLHNC": layers, "BLNHC": layers * spec.block_size, "BHLNC": 1}[kv.kv_cache_layout]
        shape = (kv.num_blocks, outer, layers * spec.page_size_bytes // (outer * dtype.itemsize))
    name, folder = str(dtype).removeprefix("torch."), Path(config.model_config.model)
    weights = f"vllm {spec.block_size} {kv.kv_cache_layout}"
    fingerprint = model_fingerprint(folder, hf.to_dict(), name, (layers, heads, head_dim), weights)
    info = ModelInfo(
        model_path=str(folder),
        model_type=str(hf.model_type),
        context_tokens=config.model_config.max_model_len,
        vocab_size=config.model_config.get_vocab_size(),
        layers=layers,
        kv_heads=heads,
        head_dim=head_dim,
        dtype=name,
        block_size=spec.block_size,
        block_bytes=layers * spec.page_size_bytes * parts,
        eos_token_ids=_eos_token_ids(config),
        attention_tokens=attention_tokens(runner.model, text, len(names), int(config.model_config.get_head_size())),
        fingerprint=fingerprint,
    )
    return info, shape


def _parts(config: Any, ranks: int) -> int:
    """Returns over how many ranks the KV heads are divided. Further ranks have copies."""
    heads = 1 if config.model_config.use_mla else int(config.model_config.get_total_num_kv_heads())
    return min(ranks, heads)


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
