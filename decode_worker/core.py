"""A decode worker's handling of its orders, offers and steps. Pure: the driver of the worker runs steps and owns links."""

from collections.abc import Callable, Sequence
from typing import Generic, Protocol

from decode_worker.batch import DecodeRequest, Draw, S, StepOutcome, StepPlan
from decode_worker.lending import Lending
from decode_worker.progress import ProgressReport
from decode_worker.requests import Attempt, AttemptTable, FinalReport, Phase, failed
from decode_worker.suffixes import Slice, Suffixes
from kvtransfer.ports import KvOut
from kvtransfer.session.session import OfferAccepted
from proto.codec import split_hashes
from proto.errors import Interrupt, RemoteProtocolError, no_token_drawn
from proto.kv import Commit, FetchRefused, FirstToken, Offer
from proto.limits import MAX_CHOICES
from proto.messages import Message, Prefill, Release, Released, Reserve, Step, TokenItem, Tokens
from proto.progress import AnswerNames, EndPrefix
from worker.ports import CoordinatorLink, Gateways

MakeState = Callable[[Reserve, FirstToken, list[int]], S]
"""A choice's sampler, its first token taken in; the prompt's ids, resumed output among them, are there where needed."""


class DecodeKvIn(Protocol):
    """`kvtransfer.receiver.KvReceiver` is the real one."""

    def decide(self, request_id: str, attempt: int, answer: OfferAccepted | str) -> None: ...

    def abort(self, request_id: str, attempt: int, reason: str) -> None: ...


class DecodePorts(Protocol):
    """The part of `decode_worker.worker` that the core uses."""

    @property
    def registration(self) -> CoordinatorLink: ...
    @property
    def gateways(self) -> Gateways: ...
    @property
    def receiver(self) -> DecodeKvIn: ...
    @property
    def sender(self) -> KvOut: ...

    def refuse_fetch(self, incarnation: int, message: FetchRefused) -> None: ...


class DecodeCore(Generic[S]):
    def __init__(
        self, ports: DecodePorts, table: AttemptTable[S], *, vocab_size: int, make_state: MakeState[S]
    ) -> None:
        self.table = table
        self.batch = table.batch
        self.undecided: dict[tuple[str, int], tuple[int, Offer]] = {}
        """Offers, each with its sender's incarnation, that arrived before their reservations. The two come over different
        links."""
        self.suffixes: Suffixes[S] = Suffixes(ports, table, vocab_size, self._close, self._join)
        self.lending: Lending[S] = Lending(ports, table, self._say)
        self._with_slice = False  # the last step computed a part of a prompt
        self._progress = ProgressReport(table)
        self._ports = ports
        self._vocab_size = vocab_size
        self._make_state = make_state

    # --- orders ---------------------------------------------------------------------------------------------------------

    def order(self, message: Message, blob: bytes = b"") -> None:
        """Carry out an order of the coordinator. Raises `RemoteProtocolError`."""
        match message:
            case Reserve():
                self._reserve(message)
            case Prefill():
                self.suffixes.take_in(message, blob)
            case Step():
                self.suffixes.add(message)
            case Release():
                self._release(message)
            case EndPrefix():
                self.table.allocator.end(split_hashes(message.block_hashes))
                self._ports.registration.report_cache(self.table.allocator.take_changes)
            case _:
                raise RemoteProtocolError(f"unexpected {type(message).__name__}")

    def _reserve(self, order: Reserve) -> None:
        self.table.reserve(order)
        self._ports.gateways.connect(order.gateway)
        waiting = self.undecided.pop((order.request_id, order.attempt), None)
        if waiting is not None:
            answer = self.table.target_blocks((order.request_id, order.attempt), waiting[0], waiting[1].blocks)
            assert answer is not None
            self._ports.receiver.decide(order.request_id, order.attempt, answer)

    def _release(self, message: Release) -> None:
        attempt = self.table.attempts.get((message.request_id, message.attempt))
        released = Released(message.request_id, message.attempt)
        if attempt is None:
            self._say([released])
        else:
            self._close(attempt, released, "released")

    def coordinator_lost(self, now: float) -> None:
        """Keep running answers and reservations: some of their first tokens are already sent, and their KV is about to be
        offered. The next coordinator learns of the others from their gateways. Reservations without an offer end with
        `expire`."""
        self.suffixes.coordinator_lost()
        self.table.allocator.report_all()
        self.table.coordinator_lost(now)

    def expire(self, until: float) -> None:
        """End reservations whose coordinator was lost at or before `until` and that have received no offer since."""
        for attempt in self.table.unoffered_since(until):
            self._close(attempt, Released(*attempt.key), "nothing was offered")

    def gateway_lost(self, incarnation: int, reason: str) -> None:
        for attempt in self.table.of_gateway(incarnation):
            self._close(attempt, failed(attempt, Interrupt.GATEWAY_LINK_LOST, reason), reason)

    def answer_named(self, gateway_incarnation: int, message: AnswerNames) -> None:
        """Handle a gateway's hashes for the blocks of an ended answer."""
        attempt = self.table.attempts.get((message.request_id, message.attempt))
        if attempt is None or attempt.is_over:
            self.table.ended_streams.name(gateway_incarnation, message)
        elif attempt.order.gateway.incarnation == gateway_incarnation and message.choice < MAX_CHOICES:
            attempt.answer_names[message.choice] = message  # it has ended at the gateway and will soon end here
        self._ports.registration.report_cache(self.table.allocator.take_changes)

    def _close(self, attempt: Attempt[S], final_report: FinalReport, why: str) -> None:
        self._say(self.table.close(attempt, final_report))
        if attempt.phase is Phase.RECEIVING:
            self._ports.receiver.abort(*attempt.key, why)
        if attempt.lent:
            self._ports.sender.abort(*attempt.key, why)

    def _say(self, final_reports: list[FinalReport]) -> None:
        for final_report in final_reports:
            self._ports.registration.send(final_report)

    # --- KV in ----------------------------------------------------------------------------------------------------------

    def offered(self, incarnation: int, offer: Offer) -> OfferAccepted | str | None:
        """Answer an offer. An undecided offer is kept until its reservation comes, or until `not_received` removes it."""
        answer = self.table.target_blocks((offer.request_id, offer.attempt), incarnation, offer.blocks)
        if answer is None:
            self.undecided[(offer.request_id, offer.attempt)] = (incarnation, offer)
        return answer

    def committed(self, _: int, commit: Commit, blocks: list[int], prompt_tokens: list[int]) -> None:
        """The KV is verified and here: the attempt's choices join the batch."""
        attempt = self.table.attempts.get((commit.request_id, commit.attempt))
        if attempt is None or attempt.final_report is not None:
            final_report = Released(commit.request_id, commit.attempt)
            self._say(self.table.received_nothing((commit.request_id, commit.attempt), blocks, final_report))
            return
        order = attempt.order
        fault = self._fault(order, commit, prompt_tokens)
        if fault:
            broken = failed(attempt, Interrupt.TRANSFER_FAILED, fault)
            self._say(self.table.received_nothing(attempt.key, blocks, broken))
            return
        self._join(attempt, blocks, commit.first_tokens, prompt_tokens)

    def _join(
        self, attempt: Attempt[S], blocks: list[int], first_tokens: Sequence[FirstToken], prompt_tokens: list[int]
    ) -> None:
        """All KV of its prompt is in these blocks."""
        order, tables = attempt.order, self.table.fork(attempt, blocks, len(first_tokens))
        sequences = [
            DecodeRequest(
                attempt.key,
                first.choice,
                order.gateway,
                order.sampling,
                table,
                self._make_state(order, first, prompt_tokens),
                first.token,
                order.resumed_tokens + 1,
            )
            for first, table in zip(first_tokens, tables, strict=True)
        ]
        self.table.start(attempt, sequences)
        self._ports.registration.report_cache(self.table.allocator.take_changes)

    def cannot_run(self, commit: Commit, blocks: list[int], why: str) -> None:
        """The KV is verified and here, but nothing can be drawn with it."""
        key = (commit.request_id, commit.attempt)
        attempt = self.table.attempts.get(key)
        over = Released(*key) if attempt is None else failed(attempt, Interrupt.GRAMMAR, why)
        self._say(self.table.received_nothing(key, blocks, over))

    def _fault(self, order: Reserve, commit: Commit, prompt_tokens: list[int]) -> str:
        """Returns how a commit does not fit its reservation; empty if it fits."""
        choices = [first.choice for first in commit.first_tokens]
        if len(set(choices)) < len(choices) or not set(choices) <= set(
            range(order.first_choice, order.first_choice + order.choices)
        ):
            return f"choices {choices} committed"
        if order.resumed_tokens + 1 >= order.sampling.max_tokens:
            return f"committed with {order.resumed_tokens + 1} of {order.sampling.max_tokens} tokens"
        if prompt_tokens and len(prompt_tokens) != order.prompt_tokens:
            return f"{len(prompt_tokens)} prompt tokens committed, {order.prompt_tokens} reserved"
        if max([*prompt_tokens, *(first.token for first in commit.first_tokens)]) >= self._vocab_size:
            return "a token id outside the vocabulary"
        return ""

    def not_yet_free(self, request_id: str, attempt: int, blocks: list[int]) -> None:
        """The receiver has given up, but the sender may still write to `blocks`; `not_received` follows when it cannot."""
        self.table.quarantine((request_id, attempt), blocks)

    def not_received(self, request_id: str, attempt: int, blocks: list[int]) -> None:
        """The receiver has given up, and `blocks` are untouched from now on."""
        self.undecided.pop((request_id, attempt), None)
        # The prefill worker reports whether the attempt failed, because its session ends with ours. The attempt may have ended
        # normally with its first token.
        final_report = Released(request_id, attempt)
        self._say(self.table.received_nothing((request_id, attempt), blocks, final_report))

    # --- steps ----------------------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan[S] | None:
        return self.batch.plan(self._stuck)

    def next_slice(self, tokens_max: int, now: float) -> Slice[S] | None:
        """The part of a prompt that the next step is to compute beside its streams; None: nothing."""
        return self.suffixes.next_slice(tokens_max, now)

    def slice_computed(self, done: Slice[S], items: list[TokenItem] | None, now: float) -> None:
        self._with_slice = True
        self.suffixes.computed(done, items, now)
        self._ports.registration.report_cache(self.table.allocator.take_changes)

    def tpot_targets(self) -> set[float]:
        """The targets of the streams that run; 0 is among them if one has none."""
        attempts = (self.table.attempts.get(one.key) for one in self.batch.running)
        return {attempt.order.tpot_ms if attempt is not None else 0.0 for attempt in attempts}

    def apply(self, drawn: list[Draw]) -> tuple[StepOutcome[S], list[FinalReport]]:
        """Apply the computed step. The blocks of ended sequences are freed now, for the next plan; `pass_on` reports them once
        the next step runs."""
        outcome = self.batch.apply(drawn)
        for broken in outcome.broken:
            self.table.allocator.forget(broken.blocks.table)
            self._mark_failed(broken, *no_token_drawn(broken.sampling.grammar))
        return outcome, self.table.ended(outcome.ended)

    def pass_on(self, outcome: StepOutcome[S], final_reports: list[FinalReport], now: float) -> None:
        """Send tokens to gateways, and reports to the coordinator."""
        self.table.allocator.tick(now)
        for gateway, items in outcome.by_gateway.values():
            self._ports.gateways.send(gateway, Tokens(tuple(items)))
        self._say(final_reports)
        if self._with_slice:
            self._progress.paused()  # its time says nothing of steps without one
        else:
            self._progress.stepped(outcome, now)
        self._with_slice = False
        progress = self._progress.due(now)
        # A coordinator that reconnects learns from the Hello what is held here, and counts all of it.
        if progress is not None and self._ports.registration.up:
            self._ports.registration.send(progress)

    def step_failed(self, error: str) -> None:
        self._progress.paused()
        ended = self.batch.abandon()
        for sequence in ended:
            self._mark_failed(sequence, Interrupt.ENGINE_ERROR, f"the model failed: {error[:300]}")
        self._say(self.table.ended(ended, is_sound=False))

    def _stuck(self, sequences: list[DecodeRequest[S]]) -> None:
        attempt = self.table.attempts.get(sequences[0].key)
        if attempt is not None and attempt.final_report is None:
            attempt.final_report = failed(attempt, Interrupt.PREEMPTED, "no free KV block")
        self._say(self.table.ended(sequences))

    def _mark_failed(self, sequence: DecodeRequest[S], reason: Interrupt, why: str) -> None:
        """The attempt fails with this sequence; its other choices, if any, are taken out too."""
        attempt = self.table.attempts.get(sequence.key)
        if attempt is not None:
            self._say(self.table.close(attempt, failed(attempt, reason, why), is_sound=False))
