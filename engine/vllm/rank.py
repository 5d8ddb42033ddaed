"""A rank after the first: it computes what rank 0 sends until that ends. `worker.rank` runs it."""

import ctypes
import os
import signal
import socket
from collections.abc import Callable
from functools import partial
from typing import Final

import msgspec
import torch

from engine.attention.forward_batch import SeqChunk
from engine.vllm.order import StartOrder, prepare_environment
from engine.vllm.ranks import HEADER_BYTES, Row
from engine.vllm.start import start

_PR_SET_PDEATHSIG: Final = 1


def receive(source: socket.socket) -> bytes:
    """Raises `ConnectionError` once rank 0 has ended."""
    return _exactly(source, int.from_bytes(_exactly(source, HEADER_BYTES), "little"))


def _exactly(source: socket.socket, count: int) -> bytes:
    data = bytearray(count)
    view = memoryview(data)
    while view:
        read = source.recv_into(view)
        if not read:
            raise ConnectionError("rank 0 has ended")
        view = view[read:]
    return bytes(data)


def run_rank(descriptor: int, parent: int, make_pool: Callable[[socket.socket, int, int], torch.Tensor]) -> None:
    """Compute what rank 0 sends until it ends. `make_pool(socket, rank, bytes)` makes this rank's pool. Raises
    `ConnectionError` once rank 0 has ended."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        return
    for number in (signal.SIGINT, signal.SIGTERM):  # a terminal and systemd send them to all processes of a worker
        signal.signal(number, signal.SIG_IGN)  # while it drains, all ranks compute; they end with it
    source = socket.socket(fileno=descriptor)
    order = msgspec.json.decode(receive(source), type=StartOrder)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    prepare_environment()
    from engine.vllm.runner import VllmRunner

    _, runner, _ = start(order, partial(make_pool, source, order.rank))
    engine = VllmRunner(runner, runner.kv_cache_config.num_blocks)
    decoder = msgspec.msgpack.Decoder(list[Row])
    with torch.inference_mode():
        while True:
            rows = decoder.decode(receive(source))
            engine.forward(
                [SeqChunk(r.tokens, r.start, r.blocks, False, _ignore if r.shows_all else None) for r in rows]
            )


def _ignore(start: int, logits: torch.Tensor) -> None:
    pass
