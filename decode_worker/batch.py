"""Continuous batching: sequences join and leave between any two steps; every step moves each of them on by one token. Pure."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from engine.kv.allocator import OutOfBlocks
from engine.kv.sequence import BlockCopy, SequenceBlocks
from engine.sampling.finish import finish_reason
from proto.messages import Destination, TokenItem
from proto.sampling import Sampling, TokenLogprobs

Key = tuple[str, int]
S = TypeVar("S")  # the sampler's state of one sequence


Draw = tuple[int, TokenLogprobs | None] | None  # None: the model's logits were not finite


@dataclass(eq=False)
class DecodeRequest(Generic[S]):
    """One choice of one attempt in the batch."""

    key: Key
    choice: int
    gateway: Destination
    sampling: Sampling
    blocks: SequenceBlocks
    state: S
    last_token: int  # drawn and sent; the next step forwards it
    index: int  # of the answer's next token, counting only draws that are applied
    steps_in_flight: int = 0  # that it is in
    is_over: bool = False  # Its last token is drawn. Draws for it by steps in flight are dropped.

    @property
    def goes_on(self) -> bool:
        """Returns whether the sequence takes part in the next step: it is not over, and no step in flight is known to draw its
        last token."""
        return not self.is_over and (not self.steps_in_flight or self.next_index < self.sampling.max_tokens)

    @property
    def next_index(self) -> int:
        return self.index + self.steps_in_flight


@dataclass(frozen=True)
class StepRow(Generic[S]):
    """The work of a step for one sequence: forward a token at `position`, then draw the answer's token number `index`."""

    running: DecodeRequest[S]
    token: int  # the last known one; if a step is in flight, its draw is forwarded instead
    position: int
    table: tuple[int, ...]
    index: int


@dataclass(frozen=True)
class StepPlan(Generic[S]):
    rows: tuple[StepRow[S], ...]
    copies: tuple[BlockCopy, ...]

    @property
    def kv_tokens(self) -> int:
        """The tokens whose KV the step reads, including its own."""
        return sum(row.position + 1 for row in self.rows)


@dataclass
class StepOutcome(Generic[S]):
    sequences: int = 0
    kv_tokens: int = 0  # whose KV the step has read
    by_gateway: dict[int, tuple[Destination, list[TokenItem]]] = field(default_factory=dict)
    ended: list[DecodeRequest[S]] = field(default_factory=list)
    broken: list[DecodeRequest[S]] = field(default_factory=list)  # no token could be drawn


class RunningBatch(Generic[S]):
    """The sequences that run. A sequence leaves only between steps. A `leave` while a step is in flight takes effect at the
    next `plan`. Steps with the sequence may write to its blocks until all of them are applied.

    `plan` and `apply` come in turn. If `depth` is 2, the next step is planned while one is in flight, before that one's tokens
    are known. Then a stop token is seen one step late, and the late step's draw for the sequence is dropped.
    """

    def __init__(self, depth: int = 1) -> None:
        self.running: list[DecodeRequest[S]] = []
        self.steps = 0  # planned so far
        self.joined = 0  # sequences so far
        self._depth = depth
        self._in_flight: deque[StepPlan[S]] = deque()
        self._left: set[Key] = set()

    @property
    def in_flight(self) -> StepPlan[S] | None:
        """The oldest step that is not applied."""
        return self._in_flight[0] if self._in_flight else None

    @property
    def may_plan(self) -> bool:
        return len(self._in_flight) < self._depth

    def join(self, sequence: DecodeRequest[S]) -> None:
        self.running.append(sequence)
        self.joined += 1

    def leave(self, key: Key) -> bool:
        """Take an attempt's sequences out. True if that is done and their blocks are untouched from now on; False if a step
        is in flight with them, and `apply` will name them as ended."""
        self.running = [one for one in self.running if one.key != key or one.steps_in_flight]
        if any(sequence.key == key for sequence in self.running):
            self._left.add(key)
            return False
        return True

    def plan(self, on_stuck: Callable[[list[DecodeRequest[S]]], None]) -> StepPlan[S] | None:
        """The next step; None if nothing runs. Every running sequence advances in every step; the coordinator's block count
        relies on this. Also returns None if blocks may run short while a step is in flight: the shortage is handled after that
        step is applied.

        If a sequence finds no block, `on_stuck` gets all sequences of its attempt and frees their blocks, so that the others
        can continue. This happens only in an overcommitted pool."""
        assert self.may_plan
        going_on = [one for one in self.running if one.goes_on and one.key not in self._left]
        if self._in_flight and not _has_room(going_on):
            return None
        rows: list[StepRow[S]] = []
        copies: list[tuple[Key, BlockCopy]] = []
        stuck: set[Key] = set()
        for sequence in going_on:
            if sequence.key in stuck:
                continue
            position = sequence.blocks.length
            try:
                copy = sequence.blocks.append_slot()
            except OutOfBlocks:
                key = sequence.key
                stuck.add(key)
                # Its blocks may go to the next sequence at once, so nothing of it may be copied or written any more.
                rows = [row for row in rows if row.running.key != key]
                copies = [entry for entry in copies if entry[0] != key]
                on_stuck([other for other in self.running if other.key == key])
                continue
            if copy is not None:
                copies.append((sequence.key, copy))
            rows.append(
                StepRow(sequence, sequence.last_token, position, tuple(sequence.blocks.table), sequence.next_index)
            )
        if stuck:
            self.running = [sequence for sequence in self.running if sequence.key not in stuck]
        if not rows:
            return None
        self.steps += 1
        for row in rows:
            row.running.steps_in_flight += 1
        plan = StepPlan(tuple(rows), tuple(copy for _, copy in copies))
        self._in_flight.append(plan)
        return plan

    def apply(self, drawn: list[Draw]) -> StepOutcome[S]:
        """Apply the oldest step, with one draw for each row. Returns the tokens to send and the sequences that ended; no step
        in flight touches the latter any more."""
        assert self._in_flight and len(drawn) == len(self._in_flight[0].rows)
        plan = self._in_flight.popleft()
        outcome: StepOutcome[S] = StepOutcome(len(plan.rows), plan.kv_tokens)
        for row, draw in zip(plan.rows, drawn, strict=True):
            sequence = row.running
            sequence.steps_in_flight -= 1
            if not sequence.is_over and sequence.key not in self._left:
                self._take(sequence, draw, outcome)
            if (sequence.is_over or sequence.key in self._left) and not sequence.steps_in_flight:
                outcome.ended.append(sequence)
        self._drop(outcome.ended)
        return outcome

    def abandon(self) -> list[DecodeRequest[S]]:
        """Drop all steps in flight after a failure, and end their sequences without a token."""
        assert self._in_flight
        ended = list(dict.fromkeys(row.running for plan in self._in_flight for row in plan.rows))
        for sequence in ended:
            sequence.steps_in_flight = 0
        self._in_flight.clear()
        self._drop(ended)
        return ended

    def _take(self, sequence: DecodeRequest[S], draw: Draw, outcome: StepOutcome[S]) -> None:
        if draw is None:
            sequence.is_over = True
            outcome.broken.append(sequence)
            return
        token, logprobs = draw
        sequence.last_token = token
        sequence.index += 1
        reason = finish_reason(token, sequence.index, sequence.sampling)
        sequence.is_over = reason is not None
        item = TokenItem(
            *sequence.key, sequence.choice, sequence.index - 1, (token,), reason, (logprobs,) if logprobs else ()
        )
        outcome.by_gateway.setdefault(sequence.gateway.incarnation, (sequence.gateway, []))[1].append(item)

    def _drop(self, ended: list[DecodeRequest[S]]) -> None:
        gone = set(map(id, ended))
        self.running = [sequence for sequence in self.running if id(sequence) not in gone]
        if self._left:
            self._left &= {sequence.key for sequence in self.running}


def _has_room(sequences: list[DecodeRequest[S]]) -> bool:
    """Whether each of them finds a block, if it needs one."""
    wanting = [sequence.blocks for sequence in sequences if sequence.blocks.needs_block]
    return not wanting or len(wanting) <= wanting[0].room
