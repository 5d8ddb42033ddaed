"""Starts vLLM's executor on one rank of a model, up to its pool. Every rank does this alike."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from engine.model.errors import ModelUnsupported
from engine.vllm.order import StartOrder, prepare_environment

Allocate = Callable[[int], torch.Tensor]


def start(order: StartOrder, allocate: Allocate | None) -> tuple[Any, Any, torch.Tensor]:
    """(vLLM's configuration, its model runner, this rank's pool as bytes). Raises ModelUnsupported, and what vLLM raises."""
    prepare_environment()
    from vllm.platforms import current_platform

    from engine.vllm.options import make_config

    config = make_config(order)
    if current_platform.is_cpu():
        _refuse_on_cpus(config)
    config.parallel_config.distributed_executor_backend = _executor_class(order)
    executor = config.parallel_config.distributed_executor_backend(config)
    _unname_shared_memory(order)
    pool = _Pool(allocate)
    with _block_outermost(pool):
        _initialize(config, executor, pool)
    assert pool.last is not None
    return config, executor.driver_worker.worker.model_runner, pool.last


def _unname_shared_memory(order: StartOrder) -> None:
    """Drop the names of the memory through which ranks on CPUs reduce, once all ranks have opened it: 8 MiB that would stay in
    /dev/shm when they are killed."""
    if order.port:
        for segment in Path("/dev/shm").glob(f"{order.port}-*-cpushm_{order.rank}"):
            segment.unlink()


def _refuse_on_cpus(config: Any) -> None:
    """Raises ModelUnsupported for what vLLM would fail at with an error that names something else."""
    model = config.model_config
    if model.use_mla:
        raise ModelUnsupported(
            f"{model.model}: latent attention (MLA) needs a GPU: vLLM's kernels for CPUs take no KV cache block by block"
        )
    if model.quantization == "fp8" and getattr(model.hf_config, "quantization_config", None) is None:
        raise ModelUnsupported(f"{model.model}: on CPUs, vLLM computes FP8 weights only if the model's files have them")


def _executor_class(order: StartOrder) -> Any:
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    class OneRank(UniProcExecutor):
        """vLLM's executor of one process, which may be one of several ranks."""

        def _distributed_args(self) -> tuple[str, int, int]:
            if order.ranks == 1:
                return super()._distributed_args()
            return f"tcp://127.0.0.1:{order.port}", order.rank, order.rank

    return OneRank


def _initialize(config: Any, executor: Any, pool: "_Pool") -> None:
    """Measure memory and make the pool, in the steps that vLLM's own engine takes."""
    from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
    from vllm.v1.core.kv_cache_utils import (
        generate_scheduler_kv_cache_config,
        get_kv_cache_configs,
        resolve_kv_cache_block_sizes,
    )

    name = config.model_config.model
    specs = executor.get_kv_cache_specs()
    if not all(specs):
        raise ModelUnsupported(f"{name}: it has no KV cache")
    layouts = [block_outermost_of(of) for of in executor.get_supported_kv_cache_layouts()]
    if not all(layouts):
        raise ModelUnsupported(f"{name}: its attention does not take a KV cache block by block")
    layout = resolve_kv_cache_layout(config, layouts, [spec for of in specs for spec in of.values()])
    executor.set_kv_cache_layout(layout.name)
    configs = get_kv_cache_configs(config, specs, _least_on_all_ranks(executor.determine_available_memory()))
    whole = generate_scheduler_kv_cache_config(configs)
    groups = whole.kv_cache_groups
    if len(groups) != 1:
        raise ModelUnsupported(
            f"{name}: its layers have {len(groups)} kinds of KV cache, which crossdock does not hand over"
        )
    config.cache_config.num_gpu_blocks = whole.num_blocks
    config.cache_config.block_size = groups[0].kv_cache_spec.block_size
    config.validate_block_size()
    for each in configs:
        each.kv_cache_layout = layout.name
        _, each.hash_block_size = resolve_kv_cache_block_sizes(whole, config)
    pool.final = True
    executor.initialize_from_config(configs)
    executor.compile_or_warm_up_model()


def block_outermost_of(layouts: list[str]) -> list[str]:
    """Those in which a block of all layers is one run of bytes. FlashAttention, which takes any, names others first."""
    from vllm.v1.kv_cache_layout import KVCacheLayout

    return [name for name in layouts if KVCacheLayout[name].is_block_outermost]


def _least_on_all_ranks(found: list[int]) -> list[int]:
    from vllm.distributed.parallel_state import get_world_group

    least = torch.tensor(found)
    if get_world_group().world_size > 1:
        torch.distributed.all_reduce(least, op=torch.distributed.ReduceOp.MIN, group=get_world_group().cpu_group)
    return [int(value) for value in least]


class _Pool:
    """Allocates pools in which a block's layers follow each other."""

    def __init__(self, allocate: Allocate | None) -> None:
        self._allocate = allocate
        self.final = False  # no longer one for measuring memory
        self.last: torch.Tensor | None = None

    def kv_caches(
        self, config: Any, device: torch.device, layout: Any, kernel_block_sizes: list[int] | None = None
    ) -> dict[str, torch.Tensor]:
        """Make the views of each layer, by name. It takes the place of the function of vLLM that allocates them."""
        from vllm.v1.worker.utils import create_kv_cache_views

        [kv_bytes] = {tensor.size for tensor in config.kv_cache_tensors}
        if self._allocate is not None and self.final:
            self.last = self._allocate(kv_bytes).view(torch.int8)
        else:
            self.last = torch.zeros(kv_bytes, dtype=torch.int8, device=device)
        spec, caches = config.kv_cache_groups[0].kv_cache_spec, dict[str, torch.Tensor]()
        for tensor in config.kv_cache_tensors:
            blocks = config.num_blocks_of(tensor)
            views = create_kv_cache_views(self.last, spec, blocks, layout, tensor, kernel_block_size=spec.block_size)
            caches.update(zip(tensor.layers, views, strict=True))
        return caches


@contextmanager
def _block_outermost(pool: _Pool) -> Iterator[None]:
    """Have vLLM make such pools within the context."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.kv_cache_layout import KVCacheLayout
    from vllm.v1.worker import gpu_model_runner

    allocate, layouts = gpu_model_runner.allocate_kv_cache, CPUAttentionBackend.supported_kv_cache_layouts
    gpu_model_runner.allocate_kv_cache = pool.kv_caches
    # Its kernels take any distance between blocks, which the layout that it names does not say.
    CPUAttentionBackend.supported_kv_cache_layouts = classmethod(lambda _: (KVCacheLayout.BLHNC,))
    try:
        yield
    finally:
        gpu_model_runner.allocate_kv_cache, CPUAttentionBackend.supported_kv_cache_layouts = allocate, layouts
