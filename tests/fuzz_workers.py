"""Random orders, offers and commits to the cores of both kinds of workers, whose own threads do as they should. See
`fuzz_cores`."""

import random
from collections import deque
from collections.abc import Sequence
from typing import Any

from decode_worker.batch import Draw, RunningBatch
from decode_worker.core import DecodeCore
from decode_worker.requests import AttemptTable
from engine.kv.allocator import BlockAllocator
from kvtransfer.session.session import KvFailed, KvSent, OfferAccepted
from prefill_worker.core import Begun, PrefillCore, PrefillStepResult
from prefill_worker.prompts import PrefillRequest, PromptTable
from proto.codec import decode, to_frames, unpack_tokens
from proto.errors import FinishReason, RemoteProtocolError
from proto.kv import NO_FIRST_TOKENS, Commit, Fetch, FetchRefused, FirstToken, Offer
from proto.messages import Destination, Message, Prefill, Release, Reserve, Step, TokenItem
from tests.random_messages import RandomMessages
from worker.ports import TakeChanges

VOCAB = 64
BLOCK = 16
BLOCKS = 40
KEYS = tuple((name, attempt) for name in ("r1", "r2", "r3", "r4") for attempt in (1, 2))
Key = tuple[str, int]


class Ports:
    """What both cores are given, and what it was told; messages must be right on the wire."""

    def __init__(self, seed: int) -> None:
        self.random = source = random.Random(seed)
        self.messages = RandomMessages(
            source,
            {
                "request_id": ("r1", "r2", "r3", "r4"),
                "attempt": (1, 1, 2),
                "prompt_tokens": (1, 5, 16, 33, 100, 1 << 20),
                "max_tokens": (1, 2, 5, 50),
                "resumed_tokens": (0, 0, 0, 1, 7),
                "start": (0, 0, 16, 33),
                "length": (1, 5, 16, 33, 100),
                "blocks": (1, 2, 3, 7),
                "incarnation": (11, 12),
                "prefill_incarnation": (21, 22),
                "decode_block_size": (8, 16, 32),
                "first_choice": (0, 0, 1),
                "choice": (0, 0, 1, 2),
                "token": (1, 2, 63, 64),
                "block_hashes": (b"", b"a" * 16 + b"b" * 16 + b"c" * 16, b"a" * 32, b"a" * 16),
            },
        )
        self.registration = self.gateways = self.sender = self.receiver = self
        self.up = True
        self.allocator = BlockAllocator(BLOCKS)
        self.said: list[Message] = []
        self.trail: deque[Any] = deque(maxlen=4)

    def send(self, *what: Any) -> None:
        decode(to_frames(what[-1]))
        self.said.append(what[-1])

    def report_cache(self, take_changes: TakeChanges) -> None:
        take_changes(4096)

    def connect(self, to: Destination) -> None: ...

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def order_of(self, kinds: Sequence[type[Message]]) -> tuple[Message, bytes] | None:
        try:
            return decode(self.messages.frames(self.messages.make(self.random.choice(kinds))))
        except RemoteProtocolError:
            return None


class PrefillWorld(Ports):
    """Also the KV sender and receiver: each session that is opened has one result."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.transfers: dict[Key, int] = {}
        """Sessions without a result, and the blocks that each has been given."""
        self.fetching: dict[Key, list[int]] = {}
        """Sessions that were accepted, and their blocks."""
        self.compiling: list[PrefillRequest] = []
        self.begun: Begun | None = None
        self.core = PrefillCore(
            self,  # type: ignore[arg-type]
            PromptTable(self.allocator, BLOCK),
            vocab_size=VOCAB,
            step_tokens_max=200,
            tokens_forwarded=int,
            prepare_grammar=self.compiling.append,
        )

    def step(self) -> None:
        chance = self.random.random()
        if chance < 0.5:
            self.order()
        elif chance < 0.75:
            self.compute()
        elif chance < 0.85:
            self.settle()
        elif chance < 0.91:
            self.fetched()
        elif chance < 0.94 and self.compiling:
            fault = self.random.choice(["", "", "no grammar"])
            self.core.grammar_ready(self.compiling.pop(), object(), fault)
            prompts = self.core.begin_draw()
            self.core.drawn(prompts, self.result(prompts)) if self.chance(0.8) else self.core.draw_failed(prompts, "x")
        elif chance < 0.97:
            self.trail.append("coordinator lost")
            self.core.coordinator_lost("x")
        else:
            self.trail.append("gateway lost")
            self.core.gateway_lost(self.random.choice([11, 12]), "x" * 600)
        self.allocator.check_invariants()

    def end(self) -> None:
        self.core.coordinator_lost("the end")
        self.core.gateway_lost(11, "the end")
        self.core.gateway_lost(12, "the end")
        while self.begun is not None:
            self.compute()
        while self.fetching:
            self.fetched()
        while self.transfers:
            self.settle()
        others = {prompt.order.gateway.incarnation for prompt in self.core.table.prompts.values()}
        for incarnation in others:
            self.core.gateway_lost(incarnation, "the end")
        while self.fetching:
            self.fetched()
        while self.transfers:
            self.settle()
        assert not self.core.table.prompts and not self.allocator.held_count

    def order(self) -> None:
        if (order := self.order_of((Prefill, Prefill, Step, Step, Release))) is None:
            return
        message, blob = order
        prompts = list(self.core.table.prompts.values())
        if isinstance(message, Step) and prompts and self.chance(0.7):
            prompt = self.random.choice(prompts)
            left = prompt.order.prompt_tokens - prompt.computed_tokens
            chunk = self.messages.make(type(message.chunks[0]), request_id=prompt.key[0], attempt=prompt.key[1])
            whole = type(chunk)(*prompt.key, prompt.computed_tokens, max(left, 1))
            message = Step(message.step_id, (self.random.choice([chunk, whole, whole]), *message.chunks))
        self.trail.append(message)
        try:
            self.core.order(*decode(to_frames(message, blob)))
        except RemoteProtocolError:
            self.core.coordinator_lost("protocol error")

    def compute(self) -> None:
        self.trail.append("step")
        if self.begun is None:
            self.begun = self.core.begin_step()
            return
        begun, self.begun = self.begun, None
        if self.chance(0.1):
            self.core.step_failed(begun, "x" * 600)
        else:
            self.core.step_done(begun, self.result([prompt for prompt, _ in begun.work], begun))

    def result(self, prompts: list[PrefillRequest], begun: Begun | None = None) -> PrefillStepResult:
        computed = {prompt.key: chunk.start + chunk.length for prompt, chunk in begun.work} if begun is not None else {}
        done = [one for one in prompts if computed.get(one.key, one.order.prompt_tokens) == one.order.prompt_tokens]
        broken = frozenset(one.key for one in done if self.chance(0.05))
        drawn = [one for one in done if one.key not in broken and (begun is None or one.can_be_drawn)]
        undrawn = {one.key: object() for one in done if one.key not in broken and one not in drawn}
        return PrefillStepResult(1.0, {one.key: self.first_tokens(one) for one in drawn}, broken, undrawn)

    def first_tokens(self, prompt: PrefillRequest) -> list[TokenItem]:
        order = prompt.order
        ends = order.sampling.max_tokens <= order.resumed_tokens + 1
        choices = range(order.first_choice, min(order.first_choice + order.choices, 16))
        finish = FinishReason.LENGTH if ends else None
        return [TokenItem(*prompt.key, choice, order.resumed_tokens, (1,), finish) for choice in choices]

    # --- the KV sender

    def open(self, request_id: str, attempt: int, peer_incarnation: int, blocks: int, block_size: int) -> None:
        assert (request_id, attempt) not in self.transfers
        self.transfers[request_id, attempt] = 0

    def blocks_ready(self, request_id: str, attempt: int, first_block: int, block_ids: Sequence[int]) -> None:
        if (request_id, attempt) in self.transfers and block_ids:
            assert first_block == self.transfers[request_id, attempt]
            self.transfers[request_id, attempt] += len(block_ids)

    def commit(
        self, request_id: str, attempt: int, first_tokens: Sequence[FirstToken], prompt: Sequence[int]
    ) -> None: ...

    def abort(self, request_id: str, attempt: int, reason: str) -> None: ...

    def settle(self) -> None:
        if self.transfers:
            key = self.random.choice(list(self.transfers))
            del self.transfers[key]
            sent = KvSent(*key, 100, 1.0) if self.chance(0.6) else KvFailed(*key, "x" * 600)
            self.trail.append(sent)
            self.core.kv_result(sent)

    # --- what is fetched

    def now(self) -> float:
        return 0.0

    def fetch(self, decode: Destination, message: Fetch) -> None:
        decode_frames(message)

    def fetched(self) -> None:
        """What comes of a fetch, or something that no decode worker would say."""
        fetches, prompts = self.core.fetches, list(self.core.table.prompts.values())
        if self.fetching and self.chance(0.6):
            key = self.random.choice(list(self.fetching))
            blocks = self.fetching.pop(key)
            self.trail.append(("fetched", key))
            if self.chance(0.7):
                fetches.committed(Commit(*key, (), 0, NO_FIRST_TOKENS), blocks)
            else:
                fetches.not_received(*key, "x" * 600)
        elif prompts and self.chance(0.8):
            prompt = self.random.choice(prompts)
            offer = Offer(*prompt.key, 1, self.random.choice([1, 2, 3, 1 << 12]))
            self.trail.append(offer)
            answer = fetches.offered(prompt.order.decode.incarnation, offer)
            if isinstance(answer, OfferAccepted):
                assert prompt.key not in self.fetching
                self.fetching[prompt.key] = list(answer.block_ids)
        else:
            refused = self.messages.make(FetchRefused)
            self.trail.append(refused)
            fetches.refused(self.random.choice([11, 12]), refused)
            fetches.expire((refused.request_id, refused.attempt))
            fetches.peer_lost(self.random.choice([11, 12]))


def decode_frames(message: Message) -> None:
    """It is right on the wire."""
    decode(to_frames(message))


class DecodeWorld(Ports):
    """Also the KV receiver and sender: each session that was accepted ends once."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.accepted: dict[Key, OfferAccepted] = {}
        self.offered: dict[Key, int] = {}
        """Sessions that are not decided, and whose they are."""
        self.lent: dict[Key, int] = {}
        """Sessions of fetches, and how many blocks each sends."""
        self.now = 0.0
        batch: RunningBatch[str] = RunningBatch(self.random.choice([1, 2]))
        self.core: DecodeCore[str] = DecodeCore(
            self,  # type: ignore[arg-type]
            AttemptTable(self.allocator, BLOCK, batch),
            vocab_size=VOCAB,
            make_state=lambda order, first, prompt: "state",
        )

    def step(self) -> None:
        self.now += self.random.choice([0, 0.01, 0.5])
        chance = self.random.random()
        if chance < 0.35:
            self.order()
        elif chance < 0.5:
            self.offer()
        elif chance < 0.62:
            self.transfer()
        elif chance < 0.66:
            self.lend()
        elif chance < 0.93:
            self.compute()
        elif chance < 0.96:
            self.trail.append("coordinator lost")
            self.core.coordinator_lost(self.now)
            if self.chance(0.5):
                self.core.expire(self.now)
        else:
            self.trail.append("gateway lost")
            self.core.gateway_lost(self.random.choice([11, 12]), "x" * 600)
        self.allocator.check_invariants()

    def end(self) -> None:
        for attempt in list(self.core.table.attempts.values()):
            self.core.order(Release(*attempt.key))
        while self.accepted or self.offered:
            self.transfer()
        while self.lent:
            self.lend()
        while self.core.batch.in_flight is not None:
            self.compute()
        assert not self.core.table.attempts and not self.core.undecided and not self.allocator.held_count

    def order(self) -> None:
        order = self.order_of((Reserve, Reserve, Release))
        if order is None:
            return
        self.trail.append(order[0])
        try:
            self.core.order(order[0])
        except RemoteProtocolError:
            self.core.coordinator_lost(self.now)

    def offer(self) -> None:
        """As `kvtransfer.receiver` asks for sessions that it has begun."""
        offer = self.messages.make(Offer)
        attempts = list(self.core.table.attempts.values())
        peer = self.random.choice([21, 22])
        if attempts and self.chance(0.8):
            order = self.random.choice(attempts).order
            offer = Offer(order.request_id, order.attempt, 1, -(-order.prompt_tokens // BLOCK))
            peer = order.prefill_incarnation
        key = (offer.request_id, offer.attempt)
        if key in self.accepted or key in self.offered:
            return
        self.trail.append(offer)
        answer = self.core.offered(peer, offer)
        if answer is None:
            self.offered[key] = peer
        elif isinstance(answer, OfferAccepted):
            self.accepted[key] = answer

    def transfer(self) -> None:
        """A session ends: with a commit of any contents, or without one."""
        if self.offered and self.chance(0.3):
            key = self.random.choice(list(self.offered))
            del self.offered[key]
            self.core.not_received(*key, [])
        elif self.accepted:
            key = self.random.choice(list(self.accepted))
            accepted = self.accepted.pop(key)
            blocks = list(accepted.block_ids)
            commit = self.messages.make(Commit, request_id=key[0], attempt=key[1], digests=())
            self.trail.append(commit)
            if self.chance(0.2):
                self.core.not_yet_free(*key, blocks[accepted.cached_blocks :][:2])
                self.core.not_received(*key, blocks)
            elif self.chance(0.1):
                self.core.cannot_run(commit, blocks, "x" * 600)
            else:
                frames = self.messages.frames(commit)
                try:
                    prompt = unpack_tokens(frames[1], commit.prompt_tokens)
                except RemoteProtocolError:
                    prompt = []
                self.core.committed(21, commit, blocks, prompt)

    def compute(self) -> None:
        self.trail.append("step")
        batch = self.core.batch
        if batch.in_flight is None or (batch.may_plan and self.chance(0.5)):
            self.core.plan()
        elif self.chance(0.1):
            self.core.step_failed("x" * 600)
        else:
            rows = batch.in_flight.rows
            drawn: list[Draw] = [None if self.chance(0.03) else (self.random.randrange(VOCAB), None) for _ in rows]
            outcome, reports = self.core.apply(drawn)
            if batch.may_plan:
                self.core.plan()
            self.core.pass_on(outcome, reports, self.now)

    # --- what prefill workers fetch

    def lend(self) -> None:
        """Asked for it, or one that was asked for has been sent."""
        if self.lent and self.chance(0.6):
            key = self.random.choice(list(self.lent))
            del self.lent[key]
            self.core.lending.sent(KvSent(*key, 1, 1.0) if self.chance(0.7) else KvFailed(*key, "x" * 600))
            return
        message = self.messages.make(Fetch)
        attempts, peer = list(self.core.table.attempts.values()), self.random.choice([21, 22])
        if attempts and self.chance(0.8):
            order = self.random.choice(attempts).order
            message, peer = Fetch(order.request_id, order.attempt, 0, 3), order.prefill_incarnation
        self.trail.append(message)
        self.core.lending.asked(peer, message)

    def open(self, request_id: str, attempt: int, peer_incarnation: int, blocks: int, block_size: int) -> None:
        assert (request_id, attempt) not in self.lent and blocks > 0
        self.lent[request_id, attempt] = blocks

    def blocks_ready(self, request_id: str, attempt: int, first_block: int, block_ids: Sequence[int]) -> None:
        assert not first_block and len(block_ids) == self.lent[request_id, attempt]
        assert all(self.allocator.refs(block) for block in block_ids)

    def commit(
        self, request_id: str, attempt: int, first_tokens: Sequence[FirstToken], prompt: Sequence[int]
    ) -> None: ...

    def refuse_fetch(self, incarnation: int, message: FetchRefused) -> None:
        decode_frames(message)

    # --- the KV receiver

    def decide(self, request_id: str, attempt: int, answer: OfferAccepted | str) -> None:
        if self.offered.pop((request_id, attempt), None) is not None and isinstance(answer, OfferAccepted):
            self.accepted[request_id, attempt] = answer

    def abort(self, request_id: str, attempt: int, reason: str) -> None: ...
