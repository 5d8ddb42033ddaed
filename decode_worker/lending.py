"""KV that prefill workers fetch, of prompts that begin with an answer decoded here. Pure.

Here this worker is the sender of the hand-over. The attempt is not over here until the hand-over has ended.
"""

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from decode_worker.requests import AttemptTable, FinalReport
from kvtransfer.ports import KvOut
from kvtransfer.session.session import KvFailed, KvSent
from proto.kv import NO_FIRST_TOKENS, Fetch, FetchRefused

S = TypeVar("S")


class LendingPorts(Protocol):
    @property
    def sender(self) -> KvOut: ...

    def refuse_fetch(self, incarnation: int, message: FetchRefused) -> None: ...


class Lending(Generic[S]):
    def __init__(self, ports: LendingPorts, table: AttemptTable[S], say: Callable[[list[FinalReport]], None]) -> None:
        """`say` passes on what can be said of attempts that are over."""
        self._ports, self._table, self._say = ports, table, say

    def asked(self, incarnation: int, message: Fetch) -> None:
        """Handle a fetch by this prefill worker: refuse it, or offer and send the blocks."""
        key = (message.request_id, message.attempt)
        blocks = self._table.lend(key, incarnation, message.first_block, message.blocks)
        if isinstance(blocks, str):
            self._ports.refuse_fetch(incarnation, FetchRefused(*key, blocks))
            return
        self._ports.sender.open(*key, incarnation, len(blocks), self._table.block_size)
        self._ports.sender.blocks_ready(*key, 0, blocks)
        self._ports.sender.commit(*key, NO_FIRST_TOKENS, ())

    def sent(self, result: KvSent | KvFailed) -> None:
        key = (result.request_id, result.attempt)
        attempt = self._table.attempts.get(key)
        if attempt is not None and isinstance(result, KvFailed):
            # Perhaps the offer never reached the prefill worker.
            self._ports.refuse_fetch(attempt.order.prefill_incarnation, FetchRefused(*key, result.reason[:512]))
        self._say(self._table.lent_back(key))
