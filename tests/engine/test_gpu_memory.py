"""How large the pool on a GPU becomes."""

from engine.gpu.memory import pool_bytes
from runtime.settings.workers import WorkerSettings

GIB = 1 << 30


def test_the_share_counts_all_of_this_process() -> None:
    assert pool_bytes(total=80 * GIB, free=60 * GIB, own=16 * GIB, forward=2 * GIB, draw=GIB, share=0.9) == (
        int(80 * GIB * 0.9) - 16 * GIB - 3 * GIB - GIB // 2
    )


def test_no_more_than_is_free_beside_other_processes() -> None:
    assert pool_bytes(total=80 * GIB, free=10 * GIB, own=16 * GIB, forward=2 * GIB, draw=0, share=0.9) == 7.5 * GIB


def test_without_room_it_is_negative_so_that_the_pool_is_refused() -> None:
    assert pool_bytes(total=8 * GIB, free=GIB // 4, own=7 * GIB, forward=0, draw=0, share=1.0) < 0


def test_a_size_that_was_given_is_kept() -> None:
    default = WorkerSettings.model_validate({"role": "decode", "model": "m"})
    given = WorkerSettings.model_validate({"role": "decode", "model": "m", "kv_gib": 2.0})
    assert default.kv_bytes_on("cuda") is None and default.kv_bytes_on("cpu") == 2 * GIB
    assert given.kv_bytes_on("cuda") == 2 * GIB
