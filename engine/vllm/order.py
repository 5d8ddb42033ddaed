"""The order to start a model on one rank. It imports nothing of vLLM, which reads the environment when it is imported."""

import os
from typing import Final

import msgspec

VERSIONS: Final = ("0.32",)  # of vLLM; the tests have run with them
_ENVIRONMENT: Final = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the model is in this process
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # crossdock pins the thread that computes
}


class StartOrder(msgspec.Struct, frozen=True):
    """The model that a rank starts, and its share of it."""

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


def prepare_environment() -> None:
    """Before vLLM is imported, which reads it then."""
    os.environ.update(_ENVIRONMENT)
