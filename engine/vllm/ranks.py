"""Tensor parallelism: this process is rank 0, and each further rank is a process that computes the same rows.

Rank 0 sends each step before it computes it; vLLM's own groups carry what the layers exchange. The others draw nothing. Each
has a pool with its heads of every block. Rank 0 maps them all, and hands blocks over and takes them in for all. No other rank
writes then: each layer ends with an exchange, so a step that has ended on rank 0 has written its KV on all ranks. A rank ends
with its worker, and a worker with any of its ranks.
"""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import torch

from engine.attention.forward_batch import SeqChunk
from engine.vllm.order import StartOrder

_SEND_S: Final = 30.0
HEADER_BYTES: Final = 8  # of a message: its length


class Row(msgspec.Struct, array_like=True, frozen=True):
    tokens: list[int]
    start: int
    blocks: list[int]
    shows_all: bool  # the logits of all its tokens are computed, which all ranks do together


MapPool = Callable[[socket.socket, int, torch.device], torch.Tensor]
"""Returns the pool of a rank: its socket, the pool's bytes, and the device that has to reach it."""


class Ranks:
    """The processes of ranks 1 and up. Used by the thread that computes."""

    def __init__(self, order: StartOrder, map_pool: MapPool, on_lost: Callable[[str], None]) -> None:
        self._map_pool = map_pool
        self._sockets: list[socket.socket] = []
        for rank in range(1, order.ranks):
            ours, theirs = socket.socketpair()
            ours.settimeout(_SEND_S)
            command = [sys.executable, "-P", "-m", "worker.rank", str(theirs.fileno()), str(os.getpid())]
            process = subprocess.Popen(command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL)
            theirs.close()
            send(ours, msgspec.json.encode(msgspec.structs.replace(order, rank=rank)))
            self._sockets.append(ours)
            watch = threading.Thread(target=_watch, args=(rank, process, on_lost), daemon=True, name=f"rank-{rank}")
            watch.start()

    def pools(self, kv_bytes: int, device: torch.device) -> list[torch.Tensor]:
        """Those of all other ranks, each of `kv_bytes`."""
        return [self._map_pool(one, kv_bytes, device) for one in self._sockets]

    def send(self, chunks: Sequence[SeqChunk]) -> None:
        rows = [Row(list(c.tokens), c.start, list(c.blocks), c.on_logits is not None) for c in chunks]
        data = msgspec.msgpack.encode(rows)
        for one in self._sockets:
            send(one, data)


def free_port() -> int:
    """A port of loopback that is free now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def _watch(rank: int, process: "subprocess.Popen[bytes]", on_lost: Callable[[str], None]) -> None:
    status = process.wait()
    on_lost(f"rank {rank} ended with status {status}")


def send(to: socket.socket, data: bytes) -> None:
    to.sendall(len(data).to_bytes(HEADER_BYTES, "little") + data)
