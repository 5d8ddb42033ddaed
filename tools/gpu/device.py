"""The device that the parts of `scripts/gpu_check` run on: its clock and its memory."""

import statistics
import time
from collections.abc import Callable

import torch

from tools.gpu.record import ON_GPU

DTYPE = torch.bfloat16 if ON_GPU else torch.float32


def synchronize() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def seconds_of(work: Callable[[], object], rounds: int = 20) -> float:
    """Returns the median time of one call, from the device's clock."""
    found = []
    for _ in range(rounds if ON_GPU else 3):
        synchronize()
        if ON_GPU:
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            began.record()
            work()
            ended.record()
            torch.cuda.synchronize()
            found.append(began.elapsed_time(ended) / 1e3)
        else:
            start = time.perf_counter()
            work()
            found.append(time.perf_counter() - start)
    return statistics.median(found[2:])


def memory() -> dict[str, float]:
    """GiB on the GPU: free for all, reserved and allocated by torch."""
    if not ON_GPU:
        return {}
    free, _ = torch.cuda.mem_get_info()
    sizes = {"free": free, "reserved": torch.cuda.memory_reserved(), "allocated": torch.cuda.memory_allocated()}
    return {name: round(size / (1 << 30), 3) for name, size in sizes.items()}
