"""Starts vLLM's executor on one rank of a model, up to its pool. Every rank does this alike."""

import dataclasses
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import msgspec
import torch

from engine.model.errors import ModelUnsupported

_ENVIRONMENT: Final = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the model is in this process
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # crossdock pins the thread that computes
}


class StartOrder(msgspec.Struct, frozen=True):
    """What a rank is to start."""

    model: str
    dtype: str
    context_tokens_max: int  # 0: the model's own
    kv_bytes: int | None  # of all ranks; None: what `gpu_share` leaves
    gpu_share: float
    step_tokens: int
    rows: int
    args: tuple[str, ...]  # vLLM's own options
    ranks: int = 1
    rank: int = 0
    port: int = 0  # of rank 0, on loopback, for vLLM's own groups; 0: one rank


Allocate = Callable[[int], torch.Tensor]


def prepare_environment() -> None:
    """Before vLLM is imported, which reads it then."""
    os.environ.update(_ENVIRONMENT)


def start(order: StartOrder, allocate: Allocate | None) -> tuple[Any, Any, torch.Tensor]:
    """(vLLM's configuration, its model runner, the pool of all ranks as bytes). Raises ModelUnsupported, and what vLLM
    raises."""
    prepare_environment()
    from engine.vllm.options import make_config

    config = make_config(order)
    config.parallel_config.distributed_executor_backend = _executor_class(order)
    executor = config.parallel_config.distributed_executor_backend(config)
    pools = _Pools(order, allocate)
    with _block_outermost(pools):
        _initialize(config, executor, pools)
    assert pools.last is not None
    return config, executor.driver_worker.worker.model_runner, pools.last


def _executor_class(order: StartOrder) -> Any:
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    class OneRank(UniProcExecutor):
        """vLLM's executor of one process, which may be one of several ranks."""

        def _distributed_args(self) -> tuple[str, int, int]:
            if order.ranks == 1:
                return super()._distributed_args()
            return f"tcp://127.0.0.1:{order.port}", order.rank, order.rank

    return OneRank


def _initialize(config: Any, executor: Any, pools: "_Pools") -> None:
    """As `EngineCore._initialize_kv_caches` does, for one group of layers."""
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
    layouts = executor.get_supported_kv_cache_layouts()
    layout = resolve_kv_cache_layout(config, layouts, [spec for of in specs for spec in of.values()])
    if not layout.is_block_outermost:
        raise ModelUnsupported(f"{name}: its attention does not take a KV cache block by block, but as {layout.name}")
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
    pools.final = True
    executor.initialize_from_config(configs)
    executor.compile_or_warm_up_model()


def _least_on_all_ranks(found: list[int]) -> list[int]:
    from vllm.distributed.parallel_state import get_world_group

    least = torch.tensor(found)
    if get_world_group().world_size > 1:
        torch.distributed.all_reduce(least, op=torch.distributed.ReduceOp.MIN, group=get_world_group().cpu_group)
    return [int(value) for value in least]


class _Pools:
    """Allocates pools in which a block's layers, of all ranks, follow each other."""

    def __init__(self, order: StartOrder, allocate: Allocate | None) -> None:
        self._order = order
        self._allocate = allocate
        self.final = False  # no longer one for measuring memory
        self.last: torch.Tensor | None = None

    def kv_caches(
        self, config: Any, device: torch.device, layout: Any, kernel_block_sizes: list[int] | None = None
    ) -> dict[str, torch.Tensor]:
        """In place of vLLM's `allocate_kv_cache`."""
        from vllm.v1.worker.utils import create_kv_cache_views

        ranks, rank = self._order.ranks, self._order.rank
        [own_bytes] = {tensor.size for tensor in config.kv_cache_tensors}
        kv_bytes = own_bytes * ranks
        if self._allocate is not None and self.final:
            self.last = self._allocate(kv_bytes).view(torch.int8)
        else:
            self.last = torch.zeros(kv_bytes, dtype=torch.int8, device=device)
        spec, caches = config.kv_cache_groups[0].kv_cache_spec, dict[str, torch.Tensor]()
        for tensor in config.kv_cache_tensors:
            placed = dataclasses.replace(
                tensor,
                size=kv_bytes,
                block_stride=tensor.block_stride * ranks,
                offset=tensor.offset + rank * tensor.block_stride,
            )
            blocks = config.num_blocks_of(tensor)
            views = create_kv_cache_views(self.last, spec, blocks, layout, placed, kernel_block_size=spec.block_size)
            caches.update(zip(tensor.layers, views, strict=True))
        return caches


@contextmanager
def _block_outermost(pools: _Pools) -> Iterator[None]:
    """Within it vLLM makes such pools."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.kv_cache_layout import KVCacheLayout
    from vllm.v1.worker import gpu_model_runner

    allocate, layouts = gpu_model_runner.allocate_kv_cache, CPUAttentionBackend.supported_kv_cache_layouts
    gpu_model_runner.allocate_kv_cache = pools.kv_caches
    # Its kernels take any distance between blocks, which the layout that it names does not say.
    CPUAttentionBackend.supported_kv_cache_layouts = classmethod(lambda _: (KVCacheLayout.BLHNC,))
    try:
        yield
    finally:
        gpu_model_runner.allocate_kv_cache, CPUAttentionBackend.supported_kv_cache_layouts = allocate, layouts
