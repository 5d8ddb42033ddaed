"""How large the pool on a GPU becomes."""

from engine.gpu.memory import pool_bytes
from runtime.settings.workers import WorkerSettings

GIB = 1 << 30


def test_memory_share_counts_whole_process() -> None:
    """The share of GPU memory covers weights, forward pass and draws as well as the pool."""
    assert pool_bytes(total=80 * GIB, free=60 * GIB, own=16 * GIB, forward=2 * GIB, draw=GIB, share=0.9) == (
        int(80 * GIB * 0.9) - 16 * GIB - 3 * GIB - GIB // 2
    )


def test_pool_is_limited_by_free_memory() -> None:
    """The pool takes no more than other processes leave free."""
    assert pool_bytes(total=80 * GIB, free=10 * GIB, own=16 * GIB, forward=2 * GIB, draw=0, share=0.9) == 7.5 * GIB


def test_pool_size_without_room_is_negative() -> None:
    """The pool size is negative when there is no room, so that the pool is refused."""
    assert pool_bytes(total=8 * GIB, free=GIB // 4, own=7 * GIB, forward=0, draw=0, share=1.0) < 0


def test_given_pool_size_is_kept() -> None:
    """A given --kv-gib decides the pool size; the default is 2 GiB on a CPU and measured on a GPU."""
    default = WorkerSettings.model_validate({"role": "decode", "model": "m"})
    given = WorkerSettings.model_validate({"role": "decode", "model": "m", "kv_gib": 2.0})
    assert default.kv_bytes_on("cuda") is None and default.kv_bytes_on("cpu") == 2 * GIB
    assert given.kv_bytes_on("cuda") == 2 * GIB
