"""A decode worker's record of each attempt, from the reservation to the last word about it. Pure.

    RESERVED → RECEIVING or COMPUTING → RUNNING → (over)

However an attempt ends, its blocks are given back and the coordinator is told only when neither the KV receiver, nor a step
in flight, nor the KV sender can touch them any more.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Generic, TypeVar

import msgspec

from decode_worker.batch import DecodeRequest, Key, RunningBatch
from decode_worker.chains import BlockChains
from decode_worker.ended import EndedStreams
from engine.kv.allocator import BlockAllocator, OutOfBlocks
from engine.kv.sequence import SequenceBlocks
from kvtransfer.session.session import OfferAccepted
from proto.codec import split_hashes
from proto.errors import Interrupt
from proto.messages import Finished, Prefill, Released, Reserve, WorkFailed
from proto.parts import Held, PrefixPart
from proto.progress import AnswerNames, Joined, SharedPrefix

S = TypeVar("S")
FinalReport = Released | WorkFailed | Finished


class Phase(StrEnum):
    RESERVED = "reserved"
    RECEIVING = "receiving"
    COMPUTING = "computing"
    RUNNING = "running"


@dataclass(eq=False)
class Suffix:
    """The suffix of a prompt whose beginning is here, while it is computed here."""

    order: Prefill
    tokens: list[int]  # of the whole prompt
    blocks: list[int]
    cached_tokens: int
    computed_tokens: int  # the cached ones included
    in_step: bool = False
    is_ready: bool = True
    matchers: list[Any] = field(default_factory=list)


@dataclass(eq=False)
class Attempt(Generic[S]):
    order: Reserve
    phase: Phase = Phase.RESERVED
    sequences: list[DecodeRequest[S]] = field(default_factory=list)  # in the batch or in a step
    started: int = 0  # sequences that ever ran
    output_tokens: int = 0  # of choices that ended, first tokens included
    hashes: list[bytes] = field(default_factory=list)  # of the prompt's full blocks that may be shared
    cached_blocks: int = 0  # of these, here before it
    prefix: tuple[PrefixPart, ...] = ()  # blocks that it may share, as reported
    joined_step: int | None = None
    suffix: Suffix | None = None  # set in the phase COMPUTING
    answer_names: dict[int, AnswerNames] = field(default_factory=dict)  # by choice: ended at the gateway, not yet here
    lent: list[int] = field(default_factory=list)  # blocks that its prefill worker is fetching
    final_report: FinalReport | None = None
    is_over: bool = False  # ended, waiting only for the blocks that it lends
    alone_since: float | None = None  # since the loss of the coordinator that made the reservation

    @property
    def key(self) -> Key:
        return (self.order.request_id, self.order.attempt)


class AttemptTable(Generic[S]):
    def __init__(
        self,
        allocator: BlockAllocator,
        block_size: int,
        batch: RunningBatch[S],
        tokens_forwarded: Callable[[], int] = int,
        prefix_cache: bool = True,
    ) -> None:
        self.allocator = allocator
        self.block_size = block_size
        self.batch = batch
        self.tokens_forwarded = tokens_forwarded
        self.prefix_cache = prefix_cache
        self.ended_streams = EndedStreams(allocator, block_size)
        self.attempts: dict[Key, Attempt[S]] = {}
        self.quarantined: dict[Key, list[int]] = {}  # blocks to which a failed attempt's sender may still write
        self.joined: list[Joined] = []  # not reported yet
        self.chains = BlockChains()
        self.prefixes: list[SharedPrefix] = []  # known and not reported yet
        self.taken_tokens = self.found_tokens = 0  # of prompts to be received; of those, here already

    def reserve(self, order: Reserve) -> None:
        """Idempotent: a repeated reservation changes nothing. Raises `RemoteProtocolError` on hashes cut short."""
        hashes = split_hashes(order.block_hashes)[: order.prompt_tokens // self.block_size] if self.prefix_cache else []
        self.attempts.setdefault((order.request_id, order.attempt), Attempt(order, hashes=hashes))

    def target_blocks(self, key: Key, peer_incarnation: int, blocks: int) -> OfferAccepted | str | None:
        """Blocks for the KV of an offer, a refusal, or None if the reservation is not here yet. Blocks of the prompt's
        beginning that are here already, verified when they came, are shared and not received again."""
        attempt = self.attempts.get(key)
        if attempt is None:
            return None
        if attempt.final_report is not None or attempt.phase is not Phase.RESERVED:
            return f"the attempt is {'over' if attempt.final_report else attempt.phase} here"
        if attempt.order.prefill_incarnation != peer_incarnation:
            return "reserved for another prefill worker"
        expected = -(-attempt.order.prompt_tokens // self.block_size)
        if blocks != expected:
            return f"{blocks} blocks offered for a prompt of {expected}"
        cached = self.allocator.match_prefix(attempt.hashes)
        try:
            fresh = self.allocator.allocate(blocks - len(cached))
        except OutOfBlocks as error:
            self.allocator.free(cached)
            return str(error)
        attempt.phase = Phase.RECEIVING
        self._found(attempt, cached)
        return OfferAccepted((*cached, *fresh), len(cached))

    def begin_suffix(self, attempt: Attempt[S], order: Prefill, tokens: list[int]) -> str:
        """Allocate blocks for a prompt that is computed here, after its cached part. Returns why that is impossible, else an
        empty string. Uses no more cached tokens than the order expects, because chunks start there."""
        # The last token is computed in any case: the first token of the answer is drawn from its logits.
        believed = min(order.cached_tokens, order.prompt_tokens - 1) // self.block_size
        cached = self.allocator.match_prefix(attempt.hashes[:believed])
        try:
            fresh = self.allocator.allocate(-(-order.prompt_tokens // self.block_size) - len(cached))
        except OutOfBlocks as error:
            self.allocator.free(cached)
            return str(error)
        attempt.phase = Phase.COMPUTING
        done = len(cached) * self.block_size
        attempt.suffix = Suffix(order, tokens, [*cached, *fresh], done, done)
        self._found(attempt, cached)
        return ""

    def suffix_computed(self, attempt: Attempt[S], suffix: Suffix) -> None:
        """Make the full blocks of a completely computed prompt available to other prompts."""
        known = self.allocator.match_prefix(attempt.hashes[: attempt.cached_blocks])
        self.allocator.free(known)
        if known == suffix.blocks[: attempt.cached_blocks]:  # else what it begins with has become suspect since
            self.allocator.insert(attempt.hashes, suffix.blocks[: len(attempt.hashes)])

    def _found(self, attempt: Attempt[S], cached: list[int]) -> None:
        attempt.cached_blocks = len(cached)
        self.chains.name(attempt.hashes, cached)
        self._report_prefix(attempt, cached)
        self.taken_tokens += attempt.order.prompt_tokens
        self.found_tokens += len(cached) * self.block_size

    def start(self, attempt: Attempt[S], sequences: list[DecodeRequest[S]]) -> None:
        """Add the choices to the batch. Their KV is here and verified."""
        assert attempt.phase in (Phase.RECEIVING, Phase.COMPUTING) and attempt.final_report is None
        attempt.phase, attempt.suffix = Phase.RUNNING, None
        attempt.sequences = sequences
        attempt.started = len(sequences)
        attempt.joined_step = self.batch.steps
        self.joined.append(Joined(*attempt.key, self.batch.steps))
        for sequence in sequences:
            self.batch.join(sequence)

    def fork(self, attempt: Attempt[S], blocks: list[int], choices: int) -> list[SequenceBlocks]:
        """One block table for each choice, the prompt's blocks shared by reference. They are verified: from now on its full
        ones are there for other prompts too. Where another prompt has brought the same blocks meanwhile, those are used."""
        hashes, cached = attempt.hashes, attempt.cached_blocks
        known = self.allocator.match_prefix(hashes[:cached])
        self.allocator.free(known)
        if known == blocks[:cached]:  # else what it begins with has become suspect since
            self.allocator.insert(hashes, blocks[: len(hashes)])
            known = self.allocator.match_prefix(hashes)
            self.chains.name(hashes, known, blocks[cached : len(hashes)])
            self.allocator.free(blocks[: len(known)])
            blocks = [*known, *blocks[len(known) :]]
            self._report_prefix(attempt, known)
        first = SequenceBlocks(self.allocator, self.block_size, blocks, attempt.order.prompt_tokens)
        return [first, *(first.fork() for _ in range(choices - 1))]

    def _report_prefix(self, attempt: Attempt[S], blocks: list[int]) -> None:
        """Report, if changed, which blocks of the prefix tree the attempt holds until it ends."""
        parts = self.chains.parts(attempt.hashes, blocks)
        if parts != attempt.prefix:
            attempt.prefix = parts
            self.prefixes.append(SharedPrefix(*attempt.key, parts))

    def received_nothing(self, key: Key, blocks: list[int], final_report: FinalReport) -> list[FinalReport]:
        """The receiver has given up, and `blocks` are untouched from now on."""
        quarantined = self.quarantined.pop(key, [])
        self.allocator.unquarantine(quarantined)
        self.allocator.free([block for block in blocks if block not in set(quarantined)])
        attempt = self.attempts.get(key)
        if attempt is None:
            return []
        if attempt.final_report is None:
            attempt.final_report = final_report
        return self._forget(attempt)

    def lend(self, key: Key, prefill_incarnation: int, first_block: int, blocks: int) -> list[int] | str:
        """Returns the blocks here that a prefill worker fetches, or why none are sent. The blocks are held until
        `lent_back`."""
        attempt = self.attempts.get(key)
        if attempt is None or attempt.final_report is not None or attempt.lent:
            return "there is no such reservation, or it is over, or was fetched for"
        if attempt.order.prefill_incarnation != prefill_incarnation:
            return "reserved for another prefill worker"
        found = self.allocator.match_prefix(attempt.hashes[: first_block + blocks])
        self.allocator.free(found[:first_block])
        attempt.lent = found[first_block:]
        return attempt.lent or "it is not here any more"

    def lent_back(self, key: Key) -> list[FinalReport]:
        """Nothing reads the blocks that were lent for this attempt any more; returns what is to be said of it now."""
        attempt = self.attempts.get(key)
        if attempt is None or not attempt.lent:
            return []
        self.allocator.free(attempt.lent)
        attempt.lent = []
        return self._forget(attempt) if attempt.is_over else []

    def quarantine(self, key: Key, blocks: list[int]) -> None:
        """The receiver has given up, but a sender may still write to these blocks; `received_nothing` follows when it cannot.
        The attempt counts as holding them until then."""
        self.quarantined[key] = blocks
        self.allocator.quarantine(blocks)

    def close(self, attempt: Attempt[S], final_report: FinalReport, *, is_sound: bool = True) -> list[FinalReport]:
        """End the attempt; the first final report given counts. Returns the reports that can be sent now. In the phase
        RECEIVING the caller aborts the receiver, which leads to `received_nothing`. `is_sound`: as for `ended`."""
        if attempt.final_report is None:
            attempt.final_report = final_report
        if attempt.phase is Phase.RECEIVING:
            return []
        if attempt.phase is Phase.RUNNING:
            self.batch.leave(attempt.key)
            idle = [sequence for sequence in attempt.sequences if not sequence.steps_in_flight]
            return self.ended(idle, is_sound=is_sound)
        if attempt.suffix is not None:
            if attempt.suffix.in_step:
                return []  # the caller comes again when that is over
            self.allocator.free(attempt.suffix.blocks)
            attempt.suffix = None
        return self._forget(attempt)

    def ended(self, sequences: list[DecodeRequest[S]], *, is_sound: bool = True) -> list[FinalReport]:
        """These sequences run no more. Frees their blocks. Returns the final reports of attempts without further sequences.
        `is_sound`: all that should be in the blocks was computed."""
        said: list[FinalReport] = []
        for sequence in sequences:
            attempt = self.attempts.get(sequence.key)
            if attempt is not None and is_sound and self.prefix_cache:
                self.ended_streams.keep(attempt.order, sequence.choice, attempt.hashes, sequence.blocks)
                if (names := attempt.answer_names.pop(sequence.choice, None)) is not None:
                    self.ended_streams.name(attempt.order.gateway.incarnation, names)
            sequence.blocks.release(attempt.order.returns if attempt is not None else None)
            if attempt is None or sequence not in attempt.sequences:
                continue
            attempt.sequences = [other for other in attempt.sequences if other is not sequence]
            attempt.output_tokens += sequence.index - attempt.order.resumed_tokens
            if not attempt.sequences:
                if attempt.final_report is None:
                    # A choice that ended in prefill with its first token was never sent here.
                    output_tokens = attempt.output_tokens + attempt.order.choices - attempt.started
                    attempt.final_report = Finished(
                        *attempt.key, output_tokens, self.tokens_forwarded(), attempt.order.resumed_tokens
                    )
                said += self._forget(attempt)
        return said

    def of_gateway(self, incarnation: int) -> list[Attempt[S]]:
        return [attempt for attempt in self.attempts.values() if attempt.order.gateway.incarnation == incarnation]

    def held(self) -> tuple[Held, ...]:
        steps = self.batch.steps
        return tuple(
            Held(
                *key,
                a.order.kv_blocks,
                a.order.choices,
                a.order.resumed_tokens,
                a.order.prompt_tokens,
                max(a.order.sampling.max_tokens - a.order.resumed_tokens - 1, 0),
                steps,
                a.joined_step,
                a.prefix,
            )
            for key, a in self.attempts.items()
        )

    def coordinator_lost(self, now: float) -> None:
        """Record since when reservations without an offer have had no coordinator."""
        for attempt in self.attempts.values():
            if attempt.phase is Phase.RESERVED and attempt.alone_since is None:
                attempt.alone_since = now

    def unoffered_since(self, until: float) -> list[Attempt[S]]:
        return [
            attempt
            for attempt in self.attempts.values()
            if attempt.phase is Phase.RESERVED and attempt.alone_since is not None and attempt.alone_since <= until
        ]

    def _forget(self, attempt: Attempt[S]) -> list[FinalReport]:
        assert attempt.final_report is not None
        attempt.is_over = True
        if attempt.lent:
            return []
        if self.attempts.pop(attempt.key, None) is None:
            return []
        if isinstance(attempt.final_report, Released | WorkFailed):
            # First tokens were emitted, and are counted, in prefill.
            emitted = attempt.output_tokens - attempt.started
            return [msgspec.structs.replace(attempt.final_report, output_tokens=emitted)]
        return [attempt.final_report]


def failed(attempt: Attempt[S], reason: Interrupt, message: str) -> WorkFailed:
    return WorkFailed(*attempt.key, reason, message[:500])
