"""vLLM's own options."""

from collections.abc import Sequence
from typing import Any

from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser


def make_config(
    model: str,
    *,
    dtype: str,
    context_tokens_max: int,
    kv_bytes: int | None,
    gpu_share: float,
    step_tokens: int,
    rows: int,
    options: Sequence[str],
) -> Any:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    args = EngineArgs.from_cli_args(parser.parse_args(["--model", model, *options]))
    args.dtype = dtype
    if context_tokens_max:
        args.max_model_len = context_tokens_max
    args.max_num_seqs = rows
    args.max_num_batched_tokens = max(step_tokens, rows)
    args.enable_prefix_caching = False
    args.async_scheduling = False
    args.disable_hybrid_kv_cache_manager = True
    if kv_bytes is not None:
        args.kv_cache_memory_bytes = kv_bytes
    else:
        args.gpu_memory_utilization = gpu_share
    return args.create_engine_config()
