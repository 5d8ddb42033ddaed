"""Makes an engine of vLLM's executor: model, one pool, and a check that rows are computed where they should be."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from engine.engine import Engine, ModelInfo
from engine.model.errors import ModelUnsupported, PoolTooSmall
from engine.model.fingerprint import model_fingerprint

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the model is in this process
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # crossdock pins the thread that computes
}


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
    options: Sequence[str] = (),
    allocate: Callable[[int], torch.Tensor] | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> Engine:
    for name, value in ENVIRONMENT.items():
        os.environ[name] = value
    from engine.vllm.options import make_config  # after the environment, which vLLM reads when it is imported
    from engine.vllm.runner import VllmRunner

    progress = on_progress or (lambda _: None)
    config = make_config(
        model, dtype="float32" if (dtype, device) == ("auto", "cpu") else dtype, context_tokens_max=context_tokens_max, kv_bytes=kv_bytes, gpu_share=gpu_share,
        step_tokens=step_tokens, rows=rows, options=options,
    )  # fmt: skip
    progress("loading weights by vLLM")
    executor, pools = _start(config, allocate)
    runner = executor.driver_worker.worker.model_runner
    info, pool = _describe(model, runner, config, pools[-1])
    return Engine(
        VllmRunner(runner, pool.shape[0], numerics=_numerics(config, runner), is_batch_invariant=_is_invariant()), info, pool
    )


def _start(config: Any, allocate: Callable[[int], torch.Tensor] | None) -> tuple[Any, list[torch.Tensor]]:
    """(the executor, its pool as bytes)"""
    from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
    from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config, get_kv_cache_configs
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
    from vllm.v1.executor.abstract import Executor

    executor = Executor.get_class(config)(config)
    specs = executor.get_kv_cache_specs()
    if not all(specs):
        raise ModelUnsupported(f"{config.model_config.model}: it has no KV cache")
    with block_outermost() as pools_of:
        layouts = executor.get_supported_kv_cache_layouts()
        layout = resolve_kv_cache_layout(config, layouts, [spec for of in specs for spec in of.values()])
        executor.set_kv_cache_layout(layout.name)
        available = executor.determine_available_memory()
        configs = get_kv_cache_configs(config, specs, available)
        whole = generate_scheduler_kv_cache_config(configs)
        config.cache_config.num_gpu_blocks = whole.num_blocks
        if len(whole.kv_cache_groups) != 1:
            raise ModelUnsupported(
                f"{config.model_config.model}: its layers have {len(whole.kv_cache_groups)} kinds of KV cache"
            )
        config.cache_config.block_size = whole.kv_cache_groups[0].kv_cache_spec.block_size
        config.validate_block_size()
        _, hash_block_size = resolve_kv_cache_block_sizes(whole, config)
        for each in configs:
            each.kv_cache_layout = layout.name
            each.hash_block_size = hash_block_size
        pools_of.allocate = allocate
        executor.initialize_from_config(configs)
        executor.compile_or_warm_up_model()
    return executor, pools_of.made


class _Pools:
    """Allocates pools, and keeps them."""

    def __init__(self) -> None:
        self.allocate: Callable[[int], torch.Tensor] | None = None
        self.made: list[torch.Tensor] = []

    def kv_caches(
        self, config: Any, device: torch.device, layout: Any, kernel_block_sizes: list[int] | None = None
    ) -> dict[str, torch.Tensor]:
        """In place of vLLM's `allocate_kv_cache`."""
        from vllm.v1.worker.utils import create_kv_cache_views

        [kv_bytes] = {tensor.size for tensor in config.kv_cache_tensors}
        if self.allocate is not None:
            raw = self.allocate(kv_bytes).view(torch.int8)
        else:
            raw = torch.zeros(kv_bytes, dtype=torch.int8, device=device)
        self.made.append(raw)
        spec, caches = config.kv_cache_groups[0].kv_cache_spec, {}
        for tensor in config.kv_cache_tensors:
            views = create_kv_cache_views(
                raw, spec, config.num_blocks_of(tensor), layout, tensor, kernel_block_size=spec.block_size
            )
            caches.update(zip(tensor.layers, views, strict=True))
        return caches


@contextmanager
def block_outermost() -> Iterator[_Pools]:
    """Within it vLLM makes pools in which all layers of a block follow each other."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.kv_cache_layout import KVCacheLayout
    from vllm.v1.worker import gpu_model_runner

    pools = _Pools()
    before = gpu_model_runner.allocate_kv_cache, CPUAttentionBackend.supported_kv_cache_layouts
    gpu_model_runner.allocate_kv_cache = pools.kv_caches
    # Its kernels take any distance between blocks, which the layouts that it names do not say.
    CPUAttentionBackend.supported_kv_cache_layouts = classmethod(lambda _: (KVCacheLayout.BLHNC,))
    try:
        yield pools
    finally:
        gpu_model_runner.allocate_kv_cache, CPUAttentionBackend.supported_kv_cache_layouts = before


def _describe(model: str, runner: Any, config: Any, raw: torch.Tensor) -> tuple[ModelInfo, torch.Tensor]:
    hf, text = config.model_config.hf_config, config.model_config.hf_text_config
    kv = runner.kv_cache_config
    spec, layers = kv.kv_cache_groups[0].kv_cache_spec, len(kv.kv_cache_groups[0].layer_names)
    dtype = spec.dtype if spec.dtype.is_floating_point else torch.float8_e4m3fn
    heads = int(spec.num_heads)
    block_bytes = layers * spec.page_size_bytes
    head_dim = spec.page_size_bytes // (2 * spec.block_size * heads * dtype.itemsize)
    shape = (kv.num_blocks, layers, 2, spec.block_size, heads, head_dim)
    pool = raw[: kv.num_blocks * block_bytes].view(dtype).view(shape)
    folder = Path(config.model_config.model)
    name = str(dtype).removeprefix("torch.")
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
        block_bytes=block_bytes,
        eos_token_ids=_eos_token_ids(config),
        attention_tokens=_attention_tokens(runner.model, text, layers, config),
        fingerprint=model_fingerprint(folder, hf.to_dict(), name, (layers, heads, head_dim), "vllm"),
    )
    return info, pool


def _attention_tokens(model: Any, text: Any, layers: int, config: Any) -> int:
    return 4096


def _eos_token_ids(config: Any) -> tuple[int, ...]:
    ids = config.model_config.try_get_generation_config().get("eos_token_id", config.model_config.hf_text_config.eos_token_id)
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list | tuple) else (int(ids),)


def _numerics(config: Any, runner: Any) -> str:
    import vllm

    device = torch.cuda.get_device_name(runner.device) if runner.device.type == "cuda" else "cpu"
    backend = runner.attn_groups[0][0].backend.get_name()
    return f"vllm {vllm.__version__}, {config.model_config.dtype}, {backend}, {device}"


def _is_invariant() -> bool:
    return os.environ.get("VLLM_BATCH_INVARIANT") == "1"
