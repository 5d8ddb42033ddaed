"""A rank of a model that vLLM divides, after the first (tensor parallelism). Run as `python -m worker.rank`.

Its KV pool is memory that rank 0 maps: an anonymous file on a CPU, and GPU memory with a handle on a GPU."""

import os
import socket
import sys

import torch

from engine.vllm.rank import run_rank
from kvtransfer.memory.cuda import HANDLE_BYTES, CudaError, DeviceMemory, Mapping
from kvtransfer.memory.shared import SharedMemory, map_shared


def make_pool(rank_0: socket.socket, rank: int, kv_bytes: int) -> torch.Tensor:
    """The pool of this rank, which rank 0 is told of."""
    if torch.cuda.is_available():
        memory = DeviceMemory(f"cuda:{rank}")
        pool = memory.allocate(kv_bytes)
        rank_0.sendall(memory.handle)
        return pool
    file = SharedMemory(kv_bytes)
    socket.send_fds(rank_0, [b"file"], [file.descriptor])
    file.close()
    return file.tensor


def map_pool(rank: socket.socket, kv_bytes: int, device: torch.device) -> torch.Tensor:
    """Returns, in rank 0, the pool that this rank has made, readable and writable from `device`. Raises `ConnectionError`, and
    `RuntimeError` where one GPU cannot read another's memory."""
    told, descriptors, _, _ = socket.recv_fds(rank, HANDLE_BYTES, 1)
    if not told:
        raise ConnectionError("a rank ended before it had a pool")
    if descriptors:
        with os.fdopen(descriptors[0], "rb") as file:
            if os.fstat(file.fileno()).st_size != kv_bytes:  # to touch what is missing would end this process
                raise RuntimeError("the ranks' pools have different sizes")
            return torch.frombuffer(map_shared(file.fileno(), kv_bytes), dtype=torch.uint8)
    try:
        pool = Mapping(told, kv_bytes, device, of_peer=True).tensor
    except CudaError as error:
        raise RuntimeError(
            f"tensor parallelism needs GPUs that read each other's memory, which fails: {error}"
        ) from error
    assert pool is not None
    return pool


if __name__ == "__main__":
    try:
        run_rank(int(sys.argv[1]), int(sys.argv[2]), make_pool)
    except ConnectionError:
        sys.exit(0)
