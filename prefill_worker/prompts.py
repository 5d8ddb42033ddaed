"""The prompts a prefill worker holds, and when their blocks may be given back. Pure.

A prompt's blocks are in use while a step computes into them (`in_step`), while they are sent or copied (`sending`, `saving`)
and while what is loaded or fetched may be written to them (`fetch`). However the attempt ends, its blocks are freed and the
coordinator is told only when all of these uses are over. `close` sets the final report, and the end of the last use frees the
blocks.

A prompt may begin with blocks that others have computed, up to what the coordinator believes to be here. Its own are made
known as they become full, and stay, as long as there is room, when the prompt is gone.
"""

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import msgspec

from engine.kv.allocator import BlockAllocator, OutOfBlocks
from proto.codec import split_hashes
from proto.errors import Interrupt
from proto.messages import Chunk, Finished, HandedOver, Prefill, Released, WorkFailed
from proto.parts import Held

Key = tuple[str, int]
FinalReport = Released | WorkFailed | HandedOver | Finished

_NO_ROOM = "no free KV blocks; the coordinator's count and ours differ"


class FetchPhase(Enum):
    """See `prefill_worker.fetches`."""

    NONE = auto()
    LOADING = auto()  # from the second tier; see `prefill_worker.tier`
    ASKED = auto()
    RECEIVING = auto()


@dataclass(eq=False)
class PrefillRequest:
    order: Prefill
    tokens: list[int]
    blocks: list[int]
    hashes: list[bytes] = field(default_factory=list)  # of its full blocks, as far as they may be shared
    cached_tokens: int = 0  # found here: computed for another prompt
    computed_tokens: int = 0  # the cached ones included
    known_blocks: int = 0  # in the cache under their hashes
    saved_blocks: int = 0  # already considered for the second tier
    saving: int = 0  # copies of its blocks to the second tier under way
    sent_blocks: int = 0
    in_step: bool = False
    sending: bool = False
    fetch: FetchPhase = FetchPhase.NONE
    fetch_began: float = 0.0
    fetched_tokens: int = 0
    fetch_ms: float = 0.0
    output_tokens: int = 0  # first tokens passed on to the gateway
    constraint: Any = None  # where the order has a grammar: None until that is compiled
    logits: Any = None  # of its last token, while its grammar is compiled
    final_report: FinalReport | None = None  # set once the attempt is over here

    @property
    def key(self) -> Key:
        return (self.order.request_id, self.order.attempt)

    @property
    def done(self) -> bool:
        return self.computed_tokens == self.order.prompt_tokens

    @property
    def can_be_drawn(self) -> bool:
        return self.constraint is not None or not self.order.sampling.grammar


@dataclass
class PromptTable:
    allocator: BlockAllocator
    block_size: int
    prefix_cache: bool = True
    prompts: dict[Key, PrefillRequest] = field(default_factory=dict)
    taken_tokens: int = 0  # of all prompts
    found_tokens: int = 0  # of these, in the cache here or on a decode worker
    fetched_tokens: int = 0  # of these, from a decode worker

    def take_in(self, order: Prefill, tokens: list[int]) -> PrefillRequest | WorkFailed | None:
        """A new prompt with its blocks; a failure if there is no room; None if the order is a repetition.

        Fewer tokens may be cached than the order expects; more are never used. Raises `RemoteProtocolError` on hashes cut
        short.
        """
        key = (order.request_id, order.attempt)
        if key in self.prompts:
            return None
        hashes = split_hashes(order.block_hashes)[: order.prompt_tokens // self.block_size] if self.prefix_cache else []
        cached = self.allocator.match_prefix(hashes[: self.believed_blocks(order)])
        try:
            fresh = self.allocator.allocate(-(-order.prompt_tokens // self.block_size) - len(cached))
        except OutOfBlocks:
            self.allocator.free(cached)
            return WorkFailed(*key, Interrupt.ENGINE_ERROR, _NO_ROOM)
        done = len(cached) * self.block_size
        self.taken_tokens += order.prompt_tokens
        self.found_tokens += done
        prompt = self.prompts[key] = PrefillRequest(order, tokens, cached + fresh, hashes, done, done, len(cached))
        return prompt

    def believed_blocks(self, order: Prefill) -> int:
        """Returns how many of a prompt's blocks need not be computed, according to the order. The last token is computed in
        any case: the first token of the answer is drawn from its logits."""
        return min(order.cached_tokens, order.prompt_tokens - 1) // self.block_size

    def runnable(self, chunks: tuple[Chunk, ...]) -> list[tuple[PrefillRequest, Chunk]]:
        """Returns the chunks of a step that can still run: at most one for each prompt that is not over, starting where its
        computed tokens end."""
        found: dict[Key, tuple[PrefillRequest, Chunk]] = {}
        for chunk in chunks:
            prompt = self.prompts.get((chunk.request_id, chunk.attempt))
            if (
                prompt is None
                or prompt.key in found
                or prompt.final_report is not None
                or prompt.in_step
                or chunk.start != prompt.computed_tokens
            ):
                continue
            if chunk.start + chunk.length > prompt.order.prompt_tokens:
                continue
            found[prompt.key] = prompt, chunk
        return list(found.values())

    def found_later(self, prompt: PrefillRequest, blocks: int) -> None:
        """Count the next `blocks` blocks, now here and verified, as cached."""
        tokens = blocks * self.block_size
        prompt.computed_tokens = prompt.cached_tokens = prompt.cached_tokens + tokens
        self.found_tokens += tokens
        self._make_known(prompt)

    def fetched(self, prompt: PrefillRequest, blocks: int) -> None:
        """Counts blocks that came from a decode worker, here and as `found_later`."""
        prompt.fetched_tokens = blocks * self.block_size
        self.fetched_tokens += prompt.fetched_tokens
        self.found_later(prompt, blocks)

    def begin_step(self, work: list[tuple[PrefillRequest, Chunk]]) -> None:
        for prompt, _ in work:
            prompt.in_step = True

    def end_step(
        self, work: list[tuple[PrefillRequest, Chunk]], broken: frozenset[Key] = frozenset()
    ) -> list[FinalReport]:
        """Record the computed chunks. Returns the final reports of prompts that were waiting only for this step. The blocks of
        `broken` prompts are suspect, shared ones included, and are not found by others from now on."""
        said = []
        for prompt, chunk in work:
            prompt.in_step = False
            prompt.computed_tokens += chunk.length
            if prompt.key in broken:
                self.allocator.forget(prompt.blocks)
            else:
                self._make_known(prompt)
            said += self._release(prompt)
        return said

    def fresh_blocks(self, prompt: PrefillRequest) -> tuple[int, list[int]]:
        """(index of the first, pool blocks) that became final and were not yet passed on; marks them as passed on."""
        final = len(prompt.blocks) if prompt.done else prompt.computed_tokens // self.block_size
        first, prompt.sent_blocks = prompt.sent_blocks, max(final, prompt.sent_blocks)
        return first, prompt.blocks[first:final]

    def close(self, prompt: PrefillRequest, final_report: FinalReport) -> list[FinalReport]:
        """End the attempt here; the first final report given counts. Returns it if it can be sent now."""
        if prompt.final_report is None:
            prompt.final_report = final_report
        if prompt.fetch is FetchPhase.ASKED:
            prompt.fetch = FetchPhase.NONE
        return self._release(prompt)

    def sent(self, prompt: PrefillRequest, final_report: FinalReport) -> list[FinalReport]:
        """The KV sender has let go of the prompt's blocks."""
        prompt.sending = False
        return self.close(prompt, final_report)

    def held(self) -> tuple[Held, ...]:
        return tuple(
            Held(*prompt.key, len(prompt.blocks), 1, prompt.order.resumed_tokens) for prompt in self.prompts.values()
        )

    def _make_known(self, prompt: PrefillRequest) -> None:
        full = min(prompt.computed_tokens // self.block_size, len(prompt.hashes))
        if full > prompt.known_blocks:
            self.allocator.insert(prompt.hashes[:full], prompt.blocks[:full], prompt.known_blocks)
            prompt.known_blocks = full

    def _release(self, prompt: PrefillRequest) -> list[FinalReport]:
        is_used = prompt.in_step or prompt.sending or prompt.saving or prompt.fetch is not FetchPhase.NONE
        if prompt.final_report is None or is_used:
            return []
        if self.prompts.pop(prompt.key, None) is None:
            return []
        self.allocator.free(prompt.blocks, prompt.order.returns)
        if isinstance(prompt.final_report, Released | WorkFailed):
            return [msgspec.structs.replace(prompt.final_report, output_tokens=prompt.output_tokens)]
        return [prompt.final_report]
