"""A prefill worker's handling of its orders, its steps and the results of its transfers. Pure: the driver of
the worker runs the steps and owns the links.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvtransfer.session.session import KvFailed, KvSent
from prefill_worker.fetches import Fetches
from prefill_worker.ports import PrefillPorts
from prefill_worker.prompts import FetchPhase, FinalReport, Key, PrefillRequest, PromptTable
from prefill_worker.tier import Copies, KvTier
from proto.codec import split_hashes, unpack_tokens
from proto.errors import Interrupt, RemoteProtocolError, no_token_drawn
from proto.kv import FirstToken
from proto.messages import (
    CacheMiss,
    Chunk,
    Destination,
    Finished,
    HandedOver,
    Message,
    Prefill,
    Release,
    Released,
    Step,
    StepDone,
    TokenItem,
    Tokens,
    WorkFailed,
)
from proto.progress import EndPrefix, PromptLogprobs
from proto.sampling import Sampling

STEPS_QUEUED_MAX = 64
Work = list[tuple[PrefillRequest, Chunk]]


@dataclass(frozen=True)
class PrefillStepResult:
    step_ms: float
    first_tokens: dict[Key, list[TokenItem]]  # of each choice, for each prompt that is complete now
    broken: frozenset[Key]  # logits were not finite: nothing could be drawn
    undrawn: Mapping[Key, Any] = field(default_factory=dict)  # logits of prompts whose grammar is compiled
    prompt_logprobs: dict[Key, list[PromptLogprobs]] = field(default_factory=dict)


@dataclass(frozen=True)
class Begun:
    """A step to run. Until its result comes, the blocks of its prompts may be written to."""

    step: Step
    work: Work
    link: int  # of the coordinator that asked for it


class PrefillCore:
    def __init__(
        self,
        ports: PrefillPorts,
        table: PromptTable,
        *,
        vocab_size: int,
        step_tokens_max: int,
        tokens_forwarded: Callable[[], int],
        prepare_grammar: Callable[[PrefillRequest], None] | None = None,
    ) -> None:
        """`prepare_grammar` is told of prompts with a grammar, and leads to `grammar_ready`."""
        self.table = table
        self.steps: deque[Step] = deque()
        self.links_lost = 0
        self.receiver_of: dict[int, Destination] = {}
        self._ports = ports
        self._vocab_size = vocab_size
        self._step_tokens_max = step_tokens_max
        self._tokens_forwarded = tokens_forwarded
        self._prepare_grammar = prepare_grammar
        self._to_draw: list[PrefillRequest] = []
        self.fetches = Fetches(ports, table, self._say, self._blocks_ready)
        self.tier: KvTier | None = None

    def use_tier(self, copies: Copies, slots: int) -> KvTier:
        self.tier = KvTier(copies, self.table, slots, self._say, self._tier_looked_at)
        return self.tier

    def tier_counts(self) -> tuple[int, int, int]:
        return self.tier.counts() if self.tier is not None else (0, 0, 0)

    def take_changes(self, most: int) -> tuple[bytes, bytes]:
        return (self.tier or self.table.allocator).take_changes(most)

    # --- orders ---------------------------------------------------------------------------------------------------------

    def order(self, message: Message, blob: bytes) -> None:
        """Carry out an order of the coordinator. Raises `RemoteProtocolError`."""
        match message:
            case Prefill():
                self._take_in(message, blob)
            case Step():
                if len(self.steps) >= STEPS_QUEUED_MAX:
                    raise RemoteProtocolError(f"more than {STEPS_QUEUED_MAX} steps in flight")
                self.steps.append(message)
            case Release():
                self._release(message)
            case EndPrefix():
                self.table.allocator.end(split_hashes(message.block_hashes))
                self._ports.registration.report_cache(self.take_changes)
            case _:
                raise RemoteProtocolError(f"unexpected {type(message).__name__}")

    def _take_in(self, order: Prefill, blob: bytes) -> None:
        try:
            tokens = unpack_tokens(blob, order.prompt_tokens)
            fault = "a token id outside the vocabulary" if max(tokens) >= self._vocab_size else ""
        except RemoteProtocolError as error:
            # The gateway is at fault: the coordinator passed the ids on unread, so its link is not closed.
            tokens, fault = [], str(error)
        if fault:
            self._say([WorkFailed(order.request_id, order.attempt, Interrupt.ENGINE_ERROR, fault)])
            return
        prompt = self.table.take_in(order, tokens)
        if isinstance(prompt, WorkFailed):
            self._say([prompt])
        elif prompt is not None:
            self.receiver_of[order.decode.incarnation] = order.decode
            self._ports.gateways.connect(order.gateway)
            prompt.sending = True
            if order.sampling.grammar and self._prepare_grammar is not None:
                self._prepare_grammar(prompt)
            # Blocks cross in the smaller of the two block sizes, so count the prompt's blocks in that size.
            size = min(self.table.block_size, order.decode_block_size)
            self._ports.sender.open(*prompt.key, order.decode.incarnation, -(-order.prompt_tokens // size), size)
            if self.tier is None or not self.tier.begin_load(prompt):
                self._tier_looked_at(prompt)

    def _tier_looked_at(self, prompt: PrefillRequest) -> None:
        """Continue after the second tier was checked: fetch missing blocks that the coordinator believes cached, or report the
        miss so that they are computed."""
        self._blocks_ready(prompt)
        order = prompt.order
        if order.fetches and prompt.known_blocks < self.table.believed_blocks(order):
            self.fetches.begin(prompt)
        elif prompt.cached_tokens < order.cached_tokens:
            self._ports.registration.send(CacheMiss(*prompt.key, prompt.cached_tokens))

    def _blocks_ready(self, prompt: PrefillRequest) -> None:
        self._ports.sender.blocks_ready(*prompt.key, *self.table.fresh_blocks(prompt))
        if self.tier is not None:
            self.tier.computed(prompt)

    def _release(self, message: Release) -> None:
        prompt = self.table.prompts.get((message.request_id, message.attempt))
        released = Released(message.request_id, message.attempt)
        if prompt is None:
            self._say([released])
        else:
            self._close(prompt, released, "released")

    def coordinator_lost(self, _: str) -> None:
        """Drop queued steps and close unfinished prompts. Hand-overs of complete prompts continue."""
        self.links_lost += 1
        (self.tier or self.table.allocator).report_all()
        self.steps.clear()
        for prompt in list(self.table.prompts.values()):
            if not prompt.done:
                self._close(prompt, Released(*prompt.key), "coordinator lost")

    def gateway_lost(self, incarnation: int, reason: str) -> None:
        for prompt in [p for p in self.table.prompts.values() if p.order.gateway.incarnation == incarnation]:
            self._fail(prompt, Interrupt.GATEWAY_LINK_LOST, reason)

    # --- steps ----------------------------------------------------------------------------------------------------------

    def begin_step(self) -> Begun | None:
        """Returns the next step to run, or None. A step without remaining work is answered at once. A step that waits for a
        fetch lets others go first."""
        self.table.allocator.tick(self._ports.now())
        while (step := self._ready_step()) is not None:
            self.steps.remove(step)
            work = self.table.runnable(step.chunks)
            if sum(chunk.length for _, chunk in work) > self._step_tokens_max:
                for prompt, _ in work:
                    self._fail(prompt, Interrupt.ENGINE_ERROR, f"a step over --step-tokens-max {self._step_tokens_max}")
                work = []
            if work:
                self.table.begin_step(work)
                return Begun(step, work, self.links_lost)
            self._step_done(self.links_lost, step, (), 0.0)
        return None

    def _ready_step(self) -> Step | None:
        """Returns the first step that need not wait. A prompt's chunks keep their order: a step is held back if one of its
        prompts is also in an earlier waiting step."""
        held_up: set[Key] = set()
        for step in self.steps:
            keys = {(chunk.request_id, chunk.attempt) for chunk in step.chunks}
            prompts = (self.table.prompts.get(key) for key in keys)
            is_fetching = any(prompt is not None and prompt.fetch is not FetchPhase.NONE for prompt in prompts)
            if not is_fetching and not keys & held_up:
                return step
            held_up |= keys
        return None

    def step_done(self, begun: Begun, result: PrefillStepResult) -> None:
        done = tuple(chunk for _, chunk in begun.work)
        self._step_done(begun.link, begun.step, done, result.step_ms)
        self._say(self.table.end_step(begun.work, result.broken))
        if self.tier is not None:
            self._tell_tier(self.tier, begun.work, result)
        self._ports.registration.report_cache(self.take_changes)
        self._pass_on((prompt for prompt, _ in begun.work), result)

    def _tell_tier(self, tier: KvTier, work: Work, result: PrefillStepResult) -> None:
        tier.measured(sum(chunk.length for _, chunk in work), result.step_ms)
        for prompt, _ in work:
            if prompt.key in result.broken:
                tier.forget(prompt.hashes)
            elif prompt.final_report is None:
                tier.computed(prompt)

    def step_failed(self, begun: Begun, error: str) -> None:
        self._step_done(begun.link, begun.step, (), 0.0)
        for prompt, _ in begun.work:
            prompt.in_step = False
            self._fail(prompt, Interrupt.ENGINE_ERROR, f"the model failed: {error[:300]}")

    def _step_done(self, link: int, step: Step, done: tuple[Chunk, ...], step_ms: float) -> None:
        """Step ids begin anew with each registration: one from before the last loss means nothing to the coordinator now."""
        if link == self.links_lost:
            self._ports.registration.send(StepDone(step.step_id, done, step_ms, self._tokens_forwarded()))

    def grammar_ready(self, prompt: PrefillRequest, constraint: Any, fault: str = "") -> None:
        """Takes the compiled grammar, or `fault`. Draws the first token if the prompt has been computed meanwhile."""
        if prompt.final_report is not None:
            return
        if fault:
            self._fail(prompt, Interrupt.GRAMMAR, f"the grammar: {fault}")
            return
        prompt.constraint = constraint
        if prompt.logits is not None:
            self._to_draw.append(prompt)

    def begin_draw(self) -> list[PrefillRequest]:
        """Complete prompts that have waited for their grammar."""
        found, self._to_draw = [prompt for prompt in self._to_draw if prompt.final_report is None], []
        return found

    def drawn(self, prompts: list[PrefillRequest], result: PrefillStepResult) -> None:
        for prompt in prompts:
            prompt.logits = None
        self._pass_on(prompts, result)

    def draw_failed(self, prompts: list[PrefillRequest], error: str) -> None:
        for prompt in prompts:
            self._fail(prompt, Interrupt.ENGINE_ERROR, f"the sampler failed: {error[:300]}")

    def _pass_on(self, prompts: Iterable[PrefillRequest], result: PrefillStepResult) -> None:
        """Blocks to the KV sender, first tokens to gateways."""
        by_gateway: dict[int, tuple[Destination, list[TokenItem]]] = {}
        for prompt in prompts:
            if prompt.final_report is not None:
                continue
            if prompt.key in result.broken:
                self._fail(prompt, *no_token_drawn(prompt.order.sampling.grammar))
                continue
            if prompt.key in result.undrawn:
                prompt.logits = result.undrawn[prompt.key]
                if prompt.constraint is not None:  # since the step began
                    self._to_draw.append(prompt)
            first, blocks = self.table.fresh_blocks(prompt)
            for scores in result.prompt_logprobs.get(prompt.key, ()):
                self._ports.gateways.send(prompt.order.gateway, scores)
            items = result.first_tokens.get(prompt.key)
            if items is not None:
                prompt.output_tokens = len(items)
                gateway = prompt.order.gateway
                by_gateway.setdefault(gateway.incarnation, (gateway, []))[1].extend(items)
            self._ports.sender.blocks_ready(*prompt.key, first, blocks)
            if items is not None:
                self._first_tokens_drawn(prompt, items)
        for gateway, tokens in by_gateway.values():
            self._ports.gateways.send(gateway, Tokens(tuple(tokens)))

    def _first_tokens_drawn(self, prompt: PrefillRequest, items: list[TokenItem]) -> None:
        going_on = [FirstToken(item.choice, item.tokens[0]) for item in items if item.finish is None]
        if going_on:
            needs_prompt = needs_tokens(prompt.order.sampling, prompt.order.resumed_tokens)
            self._ports.sender.commit(*prompt.key, going_on, prompt.tokens if needs_prompt else ())
        else:
            resumed_tokens = prompt.order.resumed_tokens
            final_report = Finished(*prompt.key, len(items), self._tokens_forwarded(), resumed_tokens)
            self._close(prompt, final_report, "ended with its first token")

    # --- the end of an attempt ------------------------------------------------------------------------------------------

    def kv_result(self, result: KvSent | KvFailed) -> None:
        """The KV sender has let go of a prompt's blocks."""
        prompt = self.table.prompts.get((result.request_id, result.attempt))
        if prompt is None:
            return
        if isinstance(result, KvSent):
            final_report: FinalReport = HandedOver(
                *prompt.key, result.kv_bytes, result.transfer_ms, prompt.fetched_tokens, prompt.fetch_ms
            )
        else:
            final_report = WorkFailed(*prompt.key, Interrupt.TRANSFER_FAILED, result.reason[:500])
        self._say(self.table.sent(prompt, final_report))

    def _fail(self, prompt: PrefillRequest, reason: Interrupt, message: str) -> None:
        self._close(prompt, WorkFailed(*prompt.key, reason, message[:500]), message)

    def _close(self, prompt: PrefillRequest, final_report: FinalReport, why: str) -> None:
        self._say(self.table.close(prompt, final_report))
        if prompt.sending:
            self._ports.sender.abort(*prompt.key, why)
        if prompt.fetch is FetchPhase.RECEIVING:
            self._ports.receiver.abort(*prompt.key, why)

    def _say(self, final_reports: list[FinalReport]) -> None:
        for final_report in final_reports:
            self._ports.registration.send(final_report)


def needs_tokens(sampling: Sampling, resumed_tokens: int) -> bool:
    """Whether decode must know the prompt's ids (or the resumed output among them) to sample."""
    penalised = sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0
    output = penalised or bool(sampling.bad_words) or bool(sampling.grammar)
    return sampling.repetition_penalty != 1.0 or (output and resumed_tokens > 0)
