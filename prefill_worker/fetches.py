"""Fetches the beginning of a prompt from its decode worker, if that has the KV and this worker does not. Pure.

    NONE → ASKED → RECEIVING → NONE

The decode worker offers its blocks, and the hand-over of `kvtransfer.session` runs the other way. Until it ends, the prompt's
blocks may be written to, and steps with a chunk of the prompt wait. KV that does not arrive is computed: the coordinator is
told by a `CacheMiss`.
"""

from collections.abc import Callable

from kvtransfer.session.session import OfferAccepted
from prefill_worker.ports import PrefillPorts
from prefill_worker.prompts import FetchPhase, FinalReport, Key, PrefillRequest, PromptTable
from proto.kv import Commit, Fetch, FetchRefused, Offer
from proto.messages import CacheMiss


class Fetches:
    def __init__(
        self,
        ports: PrefillPorts,
        table: PromptTable,
        say: Callable[[list[FinalReport]], None],
        blocks_ready: Callable[[PrefillRequest], None],
    ) -> None:
        """`say` sends final reports of ended attempts. `blocks_ready` passes on blocks that are final now."""
        self._ports, self._table, self._say, self._blocks_ready = ports, table, say, blocks_ready

    def begin(self, prompt: PrefillRequest) -> None:
        """Ask the decode worker for the blocks that the order believes cached but that are missing here."""
        prompt.fetch_began = self._ports.now()
        first = prompt.cached_tokens // self._table.block_size
        prompt.fetch = FetchPhase.ASKED
        missing = self._table.believed_blocks(prompt.order) - first
        self._ports.fetch(prompt.order.decode, Fetch(*prompt.key, first, missing))

    def offered(self, incarnation: int, offer: Offer) -> OfferAccepted | str:
        """Returns the target blocks for an offer, or the reason for refusing it."""
        prompt = self._table.prompts.get((offer.request_id, offer.attempt))
        if prompt is None or prompt.fetch is not FetchPhase.ASKED or prompt.order.decode.incarnation != incarnation:
            return "nothing was asked for"
        first = prompt.cached_tokens // self._table.block_size
        if first + offer.blocks > self._table.believed_blocks(prompt.order):
            return f"{offer.blocks} blocks from block {first} on are more than was asked for"
        prompt.fetch = FetchPhase.RECEIVING
        return OfferAccepted(tuple(prompt.blocks[first : first + offer.blocks]))

    def committed(self, commit: Commit, blocks: list[int]) -> None:
        """Handle a complete fetch, whose blocks are here and verified."""
        prompt = self._table.prompts[(commit.request_id, commit.attempt)]
        self._table.fetched(prompt, len(blocks))
        prompt.fetch_ms = 1000 * (self._ports.now() - prompt.fetch_began)
        self._end(prompt, "")

    def not_received(self, request_id: str, attempt: int, reason: str) -> None:
        """Nothing writes to its blocks any more."""
        prompt = self._table.prompts.get((request_id, attempt))
        if prompt is not None and prompt.fetch is FetchPhase.RECEIVING:
            self._end(prompt, reason)

    def refused(self, incarnation: int, message: FetchRefused) -> None:
        prompt = self._table.prompts.get((message.request_id, message.attempt))
        if prompt is not None and prompt.order.decode.incarnation == incarnation:
            self._give_up(prompt, "")

    def expire(self, key: Key) -> None:
        """Give up a fetch for which no offer came in time."""
        prompt = self._table.prompts.get(key)
        if prompt is not None:
            self._give_up(prompt, "no offer came")

    def peer_lost(self, incarnation: int) -> None:
        for prompt in list(self._table.prompts.values()):
            if prompt.order.decode.incarnation == incarnation:
                self._give_up(prompt, "the decode worker was lost")

    def _give_up(self, prompt: PrefillRequest, reason: str) -> None:
        if prompt.fetch is FetchPhase.ASKED:
            self._end(prompt, reason)

    def _end(self, prompt: PrefillRequest, failure: str) -> None:
        prompt.fetch = FetchPhase.NONE
        if prompt.final_report is not None:
            self._say(self._table.close(prompt, prompt.final_report))
            return
        self._blocks_ready(prompt)
        if prompt.cached_tokens < prompt.order.cached_tokens:
            self._ports.registration.send(CacheMiss(*prompt.key, prompt.cached_tokens, bool(failure)))
