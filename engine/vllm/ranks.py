"""Tensor parallelism: this process is rank 0, and each further rank is a process that computes the same rows.

Rank 0 sends each step before it computes it; vLLM's own groups carry what the layers exchange. The others draw nothing. They
write their part of each block into the one pool, which all map, so that a block is a run of bytes for whoever moves it. A rank
ends with its worker, and a worker with any of its ranks.
"""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import torch

from engine.attention.forward_batch import SeqChunk
from engine.vllm.start import StartOrder
from kvtransfer.memory.shared import SharedMemory, map_shared

_SEND_S: Final = 30.0
_PR_SET_PDEATHSIG: Final = 1
_HEADER: Final = 8


class Row(msgspec.Struct, array_like=True, frozen=True):
    tokens: list[int]
    start: int
    blocks: list[int]
    shows_all: bool  # the logits of all its tokens are computed, which all ranks do together


class Ranks:
    """The processes of ranks 1 and up. Used by the thread that computes."""

    def __init__(self, order: StartOrder, on_lost: Callable[[str], None]) -> None:
        self._sockets: list[socket.socket] = []
        self._memory: SharedMemory | None = None
        for rank in range(1, order.ranks):
            ours, theirs = socket.socketpair()
            ours.settimeout(_SEND_S)
            command = [sys.executable, "-P", "-m", "engine.vllm.ranks", str(theirs.fileno()), str(os.getpid())]
            process = subprocess.Popen(command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL)
            theirs.close()
            send(ours, msgspec.json.encode(msgspec.structs.replace(order, rank=rank)))
            self._sockets.append(ours)
            watch = threading.Thread(target=_watch, args=(rank, process, on_lost), daemon=True, name=f"rank-{rank}")
            watch.start()

    def allocate(self, kv_bytes: int) -> torch.Tensor:
        """Memory that all ranks map."""
        self._memory = SharedMemory(kv_bytes)
        for one in self._sockets:
            socket.send_fds(one, [kv_bytes.to_bytes(_HEADER, "little")], [self._memory.descriptor])
        return self._memory.tensor

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
    to.sendall(len(data).to_bytes(_HEADER, "little") + data)


def receive(source: socket.socket) -> bytes:
    """Raises `ConnectionError` once rank 0 has ended."""
    return _exactly(source, int.from_bytes(_exactly(source, _HEADER), "little"))


def _exactly(source: socket.socket, count: int) -> bytes:
    data = bytearray(count)
    view = memoryview(data)
    while view:
        read = source.recv_into(view)
        if not read:
            raise ConnectionError("rank 0 has ended")
        view = view[read:]
    return bytes(data)


def _mapped(source: socket.socket) -> Callable[[int], torch.Tensor]:
    """The allocator of ranks 1 and up: it maps what rank 0 has allocated."""

    def allocate(kv_bytes: int) -> torch.Tensor:
        data, descriptors, _, _ = socket.recv_fds(source, _HEADER, 1)
        assert int.from_bytes(data, "little") == kv_bytes, "ranks disagree about the size of the pool"
        tensor = torch.frombuffer(map_shared(descriptors[0], kv_bytes), dtype=torch.uint8)
        os.close(descriptors[0])
        return tensor

    return allocate


def run_rank(descriptor: int, parent: int) -> None:
    """Compute what rank 0 sends until it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 says when to end
    source = socket.socket(fileno=descriptor)
    order = msgspec.json.decode(receive(source), type=StartOrder)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    from engine.vllm.runner import VllmRunner
    from engine.vllm.start import start

    _, runner, _ = start(order, _mapped(source))
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


if __name__ == "__main__":
    try:
        run_rank(int(sys.argv[1]), int(sys.argv[2]))
    except ConnectionError:
        sys.exit(0)
