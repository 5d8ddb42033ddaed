"""vLLM's own options: which are refused, and those that crossdock decides."""

from typing import Any, Final

import vllm
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from engine.model.errors import ModelUnsupported
from engine.vllm.order import VERSIONS, StartOrder


class VllmOption(ModelUnsupported):
    """An option of vLLM that cannot be given, or has no meaning here."""


_DECIDED: Final = {
    "max_num_seqs": "--max-seqs",
    "max_num_batched_tokens": "--step-tokens-max",
    "max_model_len": "--max-model-len",
    "dtype": "--dtype",
    "gpu_memory_utilization": "--gpu-memory-share",
    "kv_cache_memory_bytes": "--kv-gib",
    "served_model_name": "--model-id",
    "model": "--model",
}
"""Options that crossdock has itself."""
_REFUSED: Final = {
    "speculative_config": "speculative decoding draws several tokens in a step",
    "pipeline_parallel_size": "pipeline parallelism is not supported",
    "data_parallel_size": "add workers instead",
    "kv_transfer_config": "crossdock moves the KV",
    "scheduler_cls": "crossdock schedules",
    "enable_lora": "LoRA adapters are not supported",
    "prefill_context_parallel_size": "context parallelism is not supported",
    "decode_context_parallel_size": "context parallelism is not supported",
}


def make_config(order: StartOrder) -> Any:
    """vLLM's configuration. Raises `VllmOption`."""
    if not vllm.__version__.startswith(VERSIONS):
        supported = " and ".join(VERSIONS)
        raise ModelUnsupported(f"vLLM {vllm.__version__} is not supported by this crossdock, which knows {supported}")
    args = _parsed(order)
    args.max_num_seqs = order.rows
    args.max_num_batched_tokens = max(order.step_tokens, order.rows)
    args.dtype = order.dtype
    args.max_model_len = order.context_tokens_max or None
    args.tensor_parallel_size = order.ranks
    args.enable_prefix_caching = False  # crossdock's blocks have their own
    args.async_scheduling = False
    args.enable_chunked_prefill = True
    args.skip_tokenizer_init = True
    args.disable_hybrid_kv_cache_manager = True  # one group of layers
    if order.kv_bytes is None:
        args.gpu_memory_utilization = order.gpu_share
    else:
        args.kv_cache_memory_bytes = order.kv_bytes // order.ranks
    return args.create_engine_config()


def ranks_of(args: tuple[str, ...]) -> int:
    """The tensor parallelism that these options ask for. Raises `VllmOption`."""
    return int(_parse("model", args).tensor_parallel_size)


def _parsed(order: StartOrder) -> EngineArgs:
    given, plain = _parse(order.model, order.args), _parse(order.model, ())
    changed = {name for name in vars(plain) if getattr(given, name, None) != getattr(plain, name)}
    for name, ours in _DECIDED.items():
        if name in changed:
            raise VllmOption(f"--vllm-args: {_option(name)} is crossdock's own {ours}")
    for name, why in _REFUSED.items():
        if name in changed:
            raise VllmOption(f"--vllm-args: {_option(name)} cannot be used: {why}")
    return EngineArgs.from_cli_args(given)


def _parse(model: str, args: tuple[str, ...]) -> Any:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(exit_on_error=False))

    def fail(message: str) -> None:
        raise VllmOption(f"--vllm-args: {message}")

    parser.error = fail
    return parser.parse_args(["--model", model, *args])


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
