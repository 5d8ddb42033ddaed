"""Finds a model, loads its weights, refuses what crossdock cannot run, and checks the rest before anything is served."""

import inspect
import math
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging as transformers_logging

from engine.attention import paged
from engine.attention.paged import AttentionCall, Recorder, UnsupportedAttention, forward_context
from engine.engine import Engine, ModelInfo
from engine.gpu.memory import GpuShare
from engine.model import room
from engine.model.backend import BackendCandidate, make_engine
from engine.model.errors import ContextUnsupported, ModelUnsupported, PoolTooSmall, WeightsUnsupported
from engine.model.fingerprint import model_fingerprint
from engine.model.work import attention_tokens
from proto.limits import context_tokens

MIN_BLOCKS, MIN_TOKENS = 8, 256  # a smaller pool would refuse nearly every request
_CONTEXT_TOKENS_MIN = 16
_ALIGNMENT = 64  # a cache line, and the widest vector load
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_WHOLE_GPU = GpuShare()
_LFS_POINTER = b"version https://git-lfs"
_PACKED = (".qweight", ".weight_packed", ".absmax", ".qzeros")  # in names of quantized weights
_DOWNLOAD = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]


def load_engine(
    model: str,
    *,
    device: str = "cpu",
    dtype: str = "auto",
    weights: str = "float32",
    block_size: int = 16,
    context_tokens_max: int = 0,
    kv_bytes: int | None,
    gpu: GpuShare = _WHOLE_GPU,
    allocate: Callable[[int], torch.Tensor] | None = None,
    host_bytes: int | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> Engine:
    """Loads `model` (a folder, or ORG/NAME from the hub) and makes a KV pool of at most `kv_bytes`, or, if that is None,
    of what its share `gpu` of a GPU leaves. `allocate(bytes)` may provide its memory, as a tensor of zero bytes on the device.
    `dtype` is `auto` (float32 on the CPU, as stored on a GPU), `float32`, `bfloat16` or `float16`. `weights` says how the CPU
    kernels keep the weights: `float32`, `bfloat16` or `int8`. `context_tokens_max` bounds the context if it is not 0.
    `block_size` is in tokens. `host_bytes` is what the host has free, if that is known. Raises ModelUnsupported."""
    progress = on_progress or (lambda _: None)
    _check_options(device, dtype, weights, block_size)
    asked = _DTYPES.get(dtype, None if device != "cpu" else torch.float32)
    room.check_gpu(torch.device(device))
    folder = _resolve(model, progress)
    room.check_weights(model, folder, torch.device(device), asked, kv_bytes, gpu, host_bytes)
    loaded, config = _load_weights(folder, model, device, asked, progress)
    text_config = loaded.config.get_text_config()
    paged.register()
    progress("checking the model")
    calls, kv_heads, head_dim = _examine(loaded, model, text_config)
    layers, weights_dtype, kv_dtype = len(calls), loaded.dtype, str(loaded.dtype).removeprefix("torch.")
    block_bytes = layers * 2 * block_size * kv_heads * head_dim * weights_dtype.itemsize
    info = ModelInfo(
        model_path=str(folder),
        model_type=str(config.model_type),
        context_tokens=_at_most(context_tokens_max, _context_tokens(text_config, model)),
        vocab_size=loaded.get_output_embeddings().weight.shape[0],
        layers=layers,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=kv_dtype,
        block_size=block_size,
        block_bytes=block_bytes,
        eos_token_ids=_eos_token_ids(folder, text_config),
        attention_tokens=attention_tokens(loaded, text_config, layers, head_dim),
        fingerprint=model_fingerprint(
            folder, config.to_dict(), str(weights_dtype).removeprefix("torch."), (layers, kv_heads, head_dim), weights
        ),
    )

    if kv_bytes is not None:
        _pool_blocks(kv_bytes, info)

    def make_pool(pool_bytes: int) -> torch.Tensor:
        shape = (_pool_blocks(pool_bytes, info), layers, 2, block_size, kv_heads, head_dim)
        return _make_pool(shape, weights_dtype, loaded.device, allocate)

    return make_engine(BackendCandidate(loaded, text_config, info, calls, weights, kv_bytes, gpu), make_pool, progress)


def _check_options(device: str, dtype: str, weights: str, block_size: int) -> None:
    if dtype not in ("auto", *_DTYPES):
        raise ModelUnsupported(f"dtype {dtype!r} is not one of auto, {', '.join(_DTYPES)}")
    if weights != "float32" and (device != "cpu" or dtype not in ("auto", "float32")):
        raise WeightsUnsupported(f"{weights} weights are for the CPU, with a dtype of float32")
    if block_size < 1:
        raise ModelUnsupported(f"block_size {block_size} must be at least 1")


def _pool_blocks(kv_bytes: int, info: ModelInfo) -> int:
    blocks, context = kv_bytes // info.block_bytes, -(-info.context_tokens // info.block_size)
    least = max(MIN_BLOCKS, min(context, -(-MIN_TOKENS // info.block_size)))
    if blocks < least:
        gib = [math.ceil(count * info.block_bytes / (1 << 30) * 1e4) / 1e4 for count in (least, max(context, least))]
        raise PoolTooSmall(
            f"a KV cache of {kv_bytes} bytes holds {blocks * info.block_size} tokens of this model; give it at least {gib[0]}"
            f" GiB ({gib[1]} GiB hold one context of {info.context_tokens} tokens)"
        )
    return blocks


def _resolve(model: str, progress: Callable[[str], None]) -> Path:
    """The folder of a model, fetched from the hub when `model` is not a local one."""
    folder = Path(model).expanduser()
    if not folder.is_dir():
        name, _, revision = model.partition("@")
        if name.count("/") != 1 or name.startswith((".", "/", "~")):
            raise ModelUnsupported(f"{model}: no such folder, and not an ORG/NAME of the hub")
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

        progress(f"fetching {model}")
        try:
            folder = Path(snapshot_download(name, revision=revision or None, allow_patterns=_DOWNLOAD))
        except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
            raise ModelUnsupported(f"{model}: cannot be fetched from the hub: {_first_line(error)}") from error
    if not (folder / "config.json").is_file():
        raise ModelUnsupported(f"{model}: {folder} has no config.json")
    if not any(folder.glob("*.safetensors")):
        raise ModelUnsupported(f"{model}: {folder} has no safetensors weights; other formats are not loaded")
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as opened:
            if opened.read(len(_LFS_POINTER)) == _LFS_POINTER:
                raise ModelUnsupported(
                    f"{model}: {file.name} is a pointer of Git LFS, and the weights themselves were not fetched; "
                    f"run git lfs install && git lfs pull in {folder}, or pass ORG/NAME to fetch the model from the hub"
                )
    return folder


def _load_weights(
    folder: Path, model: str, device: str, dtype: torch.dtype | None, progress: Callable[[str], None]
) -> tuple[Any, Any]:
    """(model in eval mode, its config). The generic except turns whatever a broken checkpoint raises into one sentence."""
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (ValueError, KeyError, OSError, ImportError) as error:
        raise ModelUnsupported(f"{model}: its configuration cannot be read: {_first_line(error)}") from error
    if getattr(config, "is_encoder_decoder", False):
        raise ModelUnsupported(f"{model}: {config.model_type} is an encoder-decoder; crossdock serves causal models")
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise ModelUnsupported(f"{model}: transformers has no causal language model for {config.model_type}")
    quantized = getattr(config, "quantization_config", None)
    progress("loading weights")
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        # Typed as the model alone; with output_loading_info it is a pair.
        # A GPU gets the weights from the file, without a copy of them all on the host.
        placed = {"device_map": device} if device != "cpu" and find_spec("accelerate") is not None else {}
        pair: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype or "auto",
            attn_implementation="eager",
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            **placed,
        )
        loaded, report = pair[0].to(device), pair[1]
    except (ValueError, KeyError, OSError, ImportError, RuntimeError, SafetensorError) as error:
        if quantized is not None:
            raise ModelUnsupported(f"{model}: {_quantized(quantized)}") from error
        raise ModelUnsupported(f"{model}: its weights cannot be loaded: {_first_line(error)}") from error
    if any(str(name).endswith(_PACKED) for name in report["unexpected_keys"]):
        raise ModelUnsupported(f"{model}: {_quantized(quantized or {})}")
    absent = sorted({str(name) for name in [*report["missing_keys"], *report["mismatched_keys"]]})
    if absent:
        raise ModelUnsupported(
            f"{model}: {len(absent)} weights are missing or of another shape, the first is {absent[0]}"
        )
    if loaded.dtype not in _DTYPES.values():
        raise ModelUnsupported(f"{model}: weights of {loaded.dtype} are not supported")
    loaded.requires_grad_(False)
    return loaded.eval(), config


def _quantized(settings: Any) -> str:
    """A sentence about a checkpoint whose weights are quantized."""
    given = settings if isinstance(settings, dict) else settings.to_dict()
    method, bits = given.get("quant_method") or "a method that its configuration does not name", given.get("bits")
    method = f"{getattr(method, 'value', method)}{f' to {bits} bits' if bits else ''}"
    return (
        f"its weights are quantized by {method}, which crossdock does not load; use the model's checkpoint in float32, bfloat16"
        " or float16 (--weights int8 makes that smaller on a CPU)"
    )


@torch.inference_mode()
def _examine(loaded: Any, model: str, text_config: Any) -> tuple[list[AttentionCall], int, int]:
    """(how each layer calls its attention, kv_heads, head_dim) as a first forward shows them."""
    parameters = inspect.signature(loaded.forward).parameters
    if "position_ids" not in parameters:
        raise ModelUnsupported(f"{model}: {text_config.model_type} takes no position_ids, so prompts cannot be packed")
    if "chunked_attention" in (getattr(text_config, "layer_types", None) or ()):
        raise ModelUnsupported(f"{model}: chunked attention is not supported")
    before = loaded.config._attn_implementation
    loaded.set_attn_implementation(paged.EXAMINED)
    if loaded.config._attn_implementation != paged.EXAMINED:
        raise ModelUnsupported(f"{model}: {text_config.model_type} does not use transformers' attention interface")
    recorder = Recorder()
    reset = forward_context.set(recorder)
    try:
        tokens = torch.zeros(1, 2, dtype=torch.int64, device=loaded.device)
        loaded(input_ids=tokens, position_ids=torch.tensor([[0, 1]], device=loaded.device), use_cache=False)
    except UnsupportedAttention as error:
        raise ModelUnsupported(f"{model}: {error}") from error
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise ModelUnsupported(f"{model}: a plain forward of two tokens fails: {_first_line(error)}") from error
    finally:
        forward_context.reset(reset)
        loaded.set_attn_implementation(before)
    layers = int(text_config.num_hidden_layers)
    if set(recorder.shapes) != set(range(layers)):
        raise ModelUnsupported(
            f"{model}: {len(recorder.shapes)} of its {layers} layers have attention over a KV cache; "
            "recurrent and hybrid models are not supported"
        )
    shapes = set(recorder.shapes.values())
    if len(shapes) > 1:
        raise ModelUnsupported(f"{model}: its layers have KV of different shapes: {sorted(shapes)}")
    if recorder.dtypes != {loaded.dtype}:
        raise ModelUnsupported(f"{model}: its KV is of {recorder.dtypes}, its weights of {loaded.dtype}")
    kv_heads, head_dim = shapes.pop()
    return [recorder.calls[layer] for layer in range(layers)], kv_heads, head_dim


def _context_tokens(text_config: Any, model: str) -> int:
    found = context_tokens(
        {"max_position_embeddings": getattr(text_config, "max_position_embeddings", None), **text_config.to_dict()}
    )
    if found is None:
        raise ModelUnsupported(f"{model}: its configuration does not say how long a context may be")
    return found


def _at_most(asked: int, limit: int) -> int:
    if asked > limit or 0 < asked < _CONTEXT_TOKENS_MIN:
        raise ContextUnsupported(f"{asked} tokens; the model takes {_CONTEXT_TOKENS_MIN} to {limit}")
    return asked or limit


def _eos_token_ids(folder: Path, text_config: Any) -> tuple[int, ...]:
    ids = getattr(text_config, "eos_token_id", None)
    if (folder / "generation_config.json").is_file():
        generation = GenerationConfig.from_pretrained(folder, trust_remote_code=False)
        ids = generation.eos_token_id if generation.eos_token_id is not None else ids
    if ids is None:
        return ()
    return tuple(int(token) for token in ids) if isinstance(ids, list | tuple) else (int(ids),)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


def _make_pool(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, allocate: Callable[[int], torch.Tensor] | None
) -> torch.Tensor:
    """Zeros; on the CPU in pages that the kernel provides when they are first written, so that a large pool costs neither
    start-up time nor memory before it is used (`torch.zeros` writes every page)."""
    pool_bytes = math.prod(shape) * dtype.itemsize
    if allocate is not None:
        return allocate(pool_bytes).view(dtype).view(shape)
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    raw = np.zeros(pool_bytes + _ALIGNMENT, dtype=np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return torch.from_numpy(raw[start : start + pool_bytes]).view(dtype).view(shape)
