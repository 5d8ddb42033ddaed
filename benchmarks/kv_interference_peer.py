"""The prefill side of `python -m benchmarks kv-interference`; takes orders (`remote_peer`).

Run as `python -m benchmarks.kv_interference_peer MODEL TOKENS`. It computes the KV of one prompt with the real engine,
once, keeps it, and sends it again and again.
"""

import sys
from typing import Any

import torch
import uvloop

from benchmarks import remote_peer
from benchmarks.remote_replayer import Replayer
from engine.engine import Engine, ModelInfo, SeqChunk
from engine.model.loader import load_engine
from kvtransfer.memory.layout import KvLayout
from kvtransfer.session.limits import KvSettings, segment_bytes_on
from kvtransfer.transports.registry import allowed_on
from proto import limits
from proto.messages import Hello, Role
from proto.parts import Capacity
from runtime.process import clock

_COPIES = 4  # copies of the prompt's KV, which are sent in turn, so that none is in a cache
_CHUNK_TOKENS = 256


class Store:
    def __init__(self, model: str, tokens: int) -> None:
        engine = load_engine(model, kv_bytes=1 << 30)
        self.info: ModelInfo = engine.info
        self.blocks = -(-tokens // self.info.block_size)
        self.pool = torch.empty((_COPIES * self.blocks, *engine.pool.shape[1:]), dtype=engine.pool.dtype)
        _compute(engine, tokens, self.blocks)
        for copy in range(_COPIES):
            self.pool[copy * self.blocks : (copy + 1) * self.blocks] = engine.pool[: self.blocks]
        self._turn = 0
        self._replayer: Replayer | None = None

    async def connect(self, address: str, incarnation: int, transport: str) -> int:
        """Connects to this decode worker; returns the incarnation that it must expect."""
        info = self.info
        hello = Hello(
            limits.PROTOCOL_VERSION, Role.PREFILL, clock.new_incarnation(), "replayer", fingerprint=info.fingerprint,
            capacity=Capacity(self.pool.shape[0], info.block_size, 1, info.context_tokens),
        )  # fmt: skip
        layout = KvLayout(info.layers, info.kv_heads, info.head_dim, info.block_size, info.dtype)
        settings = KvSettings(transports=allowed_on(transport, "cpu"), segment_bytes=segment_bytes_on("cpu"))
        self._replayer = Replayer(address, hello, incarnation)
        await self._replayer.start()
        await self._replayer.set_up(layout, self.pool, settings)
        return hello.incarnation

    async def session(self, request_id: str, blocks: int) -> dict[str, Any]:
        """Send the first `blocks` blocks of the prompt."""
        assert self._replayer is not None
        self._turn += 1
        first = self._turn % _COPIES * self.blocks
        took_s = await self._replayer.session(request_id, list(range(first, first + blocks)))
        return {"took_s": took_s, "kv_bytes": blocks * self.info.block_bytes}

    async def close(self) -> None:
        if self._replayer is not None:
            await self._replayer.close()


def _compute(engine: Engine, tokens: int, blocks: int) -> None:
    for start in range(0, tokens, _CHUNK_TOKENS):
        part = [100 + index * 7 % 150 for index in range(start, min(start + _CHUNK_TOKENS, tokens))]
        engine.forward([SeqChunk(part, start, range(blocks), start + len(part) == tokens)])


async def main(model: str, tokens: int) -> None:
    store = Store(model, tokens)
    await remote_peer.serve({"connect": store.connect, "session": store.session})
    await store.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    uvloop.run(main(sys.argv[1], int(sys.argv[2])))
