"""A prefill worker: the production core, prompt table and prefix cache; its steps take the time that `Timing` says."""

from collections import Counter

from engine.kv.allocator import BlockAllocator
from kvtransfer.session.session import OfferAccepted
from lab.cluster.surroundings import (
    FAILED_STEP_S,
    ClusterEngine,
    ClusterGateways,
    ClusterRegistration,
    ClusterSurroundings,
    first_tokens,
)
from lab.cluster.transfers import ClusterKvSender, Transfers
from prefill_worker.core import Begun, PrefillCore, PrefillStepResult
from prefill_worker.prompts import Key, PromptTable
from proto.kv import Commit, Fetch, FetchRefused, Offer
from proto.limits import MAX_VOCAB
from proto.messages import Destination, Message, TokenItem
from proto.parts import Capacity


class ClusterPrefillWorker:
    def __init__(
        self,
        cluster: ClusterSurroundings,
        transfers: Transfers,
        fetches: Transfers,
        incarnation: int,
        capacity: Capacity,
        engine: ClusterEngine,
    ) -> None:
        self.incarnation, self.receiver = incarnation, fetches
        self.computed_tokens = 0
        self.computed: Counter[Key] = Counter()
        self.registration = ClusterRegistration(cluster, incarnation)
        self.gateways = ClusterGateways(cluster)
        self.core = PrefillCore(
            self,
            PromptTable(BlockAllocator(capacity.kv_blocks), capacity.block_size),
            vocab_size=MAX_VOCAB,
            step_tokens_max=capacity.context_tokens,
            tokens_forwarded=lambda: self.computed_tokens,
        )
        self.sender = ClusterKvSender(transfers, incarnation, self.core.kv_result)
        self.computing = False
        self.busy_s = 0.0
        self.engine = engine
        self._cluster = cluster

    def order(self, message: Message, blob: bytes) -> None:
        self.core.order(message, blob)
        self._start_step()

    # --- what is fetched ------------------------------------------------------------------------------------------------

    def now(self) -> float:
        return self._cluster.now

    def fetch(self, decode: Destination, message: Fetch) -> None:
        self._cluster.fetch(self.incarnation, decode.incarnation, message)

    def offered(self, incarnation: int, offer: Offer) -> OfferAccepted | str:
        return self.core.fetches.offered(incarnation, offer)

    def committed(self, incarnation: int, commit: Commit, blocks: list[int], prompt_tokens: list[int]) -> None:
        self.core.fetches.committed(commit, blocks)
        self._start_step()

    def not_received(self, request_id: str, attempt: int, blocks: list[int]) -> None:
        self.core.fetches.not_received(request_id, attempt, "the transfer failed")
        self._start_step()

    def refused(self, incarnation: int, message: FetchRefused) -> None:
        self.core.fetches.refused(incarnation, message)
        self._start_step()

    # --- steps ----------------------------------------------------------------------------------------------------------

    def _start_step(self) -> None:
        begun = None if self.computing else self.core.begin_step()
        if begun is not None:
            self.computing = True
            took_s = self.engine.timing.prefill_s(sum(chunk.length for _, chunk in begun.work))
            fails = self.engine.fails_now()
            took_s = FAILED_STEP_S if fails else took_s
            self.busy_s += took_s
            self.engine.run(took_s, self._step_ended, begun, took_s, fails)

    def _step_ended(self, begun: Begun, took_s: float, fails: bool) -> None:
        if not self.registration.up:
            return
        self.computing = False
        if any(self._cluster.ends_worker(prompt.key[0], 0) for prompt, _ in begun.work):
            self._cluster.on_death(self.incarnation)
            return
        if fails:
            self.core.step_failed(begun, "the step fails")
            self._start_step()
            return
        first: dict[Key, list[TokenItem]] = {}
        for prompt, chunk in begun.work:
            self.computed[prompt.key] += chunk.length
            self.computed_tokens += chunk.length
            if chunk.start + chunk.length == prompt.order.prompt_tokens:
                first[prompt.key] = first_tokens(self._cluster, prompt.order, prompt.cached_tokens)
        self.core.step_done(begun, PrefillStepResult(1000 * took_s, first, frozenset()))
        self._start_step()
