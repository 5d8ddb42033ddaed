"""The interface of the transfer drivers that workers' cores use. The real drivers and the simulated ones implement it."""

from collections.abc import Sequence
from typing import Protocol

from proto.kv import FirstToken


class KvOut(Protocol):
    """`kvtransfer.sender.KvSender` is the real one."""

    def open(self, request_id: str, attempt: int, peer_incarnation: int, blocks: int, block_size: int) -> None: ...

    def blocks_ready(self, request_id: str, attempt: int, first_block: int, block_ids: Sequence[int]) -> None: ...

    def commit(
        self, request_id: str, attempt: int, first_tokens: Sequence[FirstToken], prompt_tokens: Sequence[int]
    ) -> None: ...

    def abort(self, request_id: str, attempt: int, reason: str) -> None: ...
