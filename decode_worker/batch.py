"""Continuous batching: sequences join and leave between any two steps; every step moves each of them on by one token. Pure."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from engine.kv.allocator import OutOfBlocks
from engine.kv.sequence import BlockCopy, SequenceBlocks
from engine.sampling.finish import finish_reason
from proto.errors import FinishReason
from proto.messages import Peer, TokenItem
from proto.sampling import Sampling, TokenLogprobs

Key = tuple[str, int]
S = TypeVar("S")
"""The sampler's state of one sequence; opaque here."""


Draw = tuple[int, TokenLogprobs | None] | None
"""A drawn token and its log-probabilities; None where the model's logits were not finite."""


@dataclass(eq=False)
class DecodeRequest(Generic[S]):
    """One choice of one attempt."""

    key: Key
    choice: int
    gateway: Peer
    sampling: Sampling
    blocks: SequenceBlocks
    state: S
    last_token: int
    """Drawn, sent, and not yet forwarded: it is what the next step feeds."""
    index: int
    """Number of the next token in the answer."""


@dataclass(frozen=True)
class Row(Generic[S]):
    """What a step does for one sequence: forward `token` at `position`, then draw with `state`."""

    running: DecodeRequest[S]
    token: int
    position: int
    table: tuple[int, ...]


@dataclass(frozen=True)
class StepPlan(Generic[S]):
    rows: tuple[Row[S], ...]
    copies: tuple[BlockCopy, ...]
    """Blocks to copy before the forward, in order."""


@dataclass
class StepOutcome(Generic[S]):
    by_gateway: dict[int, tuple[Peer, list[TokenItem]]] = field(default_factory=dict)
    ended: list[DecodeRequest[S]] = field(default_factory=list)
    broken: list[DecodeRequest[S]] = field(default_factory=list)
    """Those of them for which nothing could be drawn."""


class Batch(Generic[S]):
    """The sequences that run. A sequence leaves only between steps: `plan` and `apply` come in turn, and what `leave` is
    told in between holds from the next `plan` on; until then the step in flight may write to its blocks."""

    def __init__(self) -> None:
        self.running: list[DecodeRequest[S]] = []
        self.in_flight: StepPlan[S] | None = None
        self.steps = 0
        """Planned so far."""
        self._left: set[Key] = set()

    def join(self, sequence: DecodeRequest[S]) -> None:
        self.running.append(sequence)

    def leave(self, key: Key) -> bool:
        """Take an attempt's sequences out. True if that is done and their blocks are untouched from now on; False if a step
        is in flight with them, and `apply` will name them as ended."""
        if self.in_flight is not None and any(row.running.key == key for row in self.in_flight.rows):
            self._left.add(key)
            return False
        self.running = [sequence for sequence in self.running if sequence.key != key]
        return True

    def plan(self, on_stuck: Callable[[list[DecodeRequest[S]]], None]) -> StepPlan[S] | None:
        """The next step; None if nothing runs. All that run move on, always: the coordinator's count of blocks rests on it.

        `on_stuck` gets all sequences of an attempt one of which finds no block, and gives back what they hold, so that the
        others can go on. Only an overcommitted pool comes to that."""
        assert self.in_flight is None
        rows: list[Row[S]] = []
        copies: list[tuple[Key, BlockCopy]] = []
        stuck: set[Key] = set()
        for sequence in self.running:
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
            rows.append(Row(sequence, sequence.last_token, position, tuple(sequence.blocks.table)))
        if stuck:
            self.running = [sequence for sequence in self.running if sequence.key not in stuck]
        if not rows:
            return None
        self.steps += 1
        self.in_flight = StepPlan(tuple(rows), tuple(copy for _, copy in copies))
        return self.in_flight

    def apply(self, drawn: list[Draw]) -> StepOutcome[S]:
        """The step is computed: one draw for each row. Names tokens to send and sequences that ended."""
        assert self.in_flight is not None and len(drawn) == len(self.in_flight.rows)
        rows, self.in_flight = self.in_flight.rows, None
        outcome: StepOutcome[S] = StepOutcome()
        for row, draw in zip(rows, drawn, strict=True):
            sequence = row.running
            if draw is None:
                outcome.ended.append(sequence)
                outcome.broken.append(sequence)
                continue
            token, logprobs = draw
            if sequence.key in self._left:
                outcome.ended.append(sequence)
                continue
            reason = self._advance(sequence, token)
            item = TokenItem(
                *sequence.key, sequence.choice, sequence.index - 1, (token,), reason, (logprobs,) if logprobs else ()
            )
            outcome.by_gateway.setdefault(sequence.gateway.incarnation, (sequence.gateway, []))[1].append(item)
            if reason is not None:
                outcome.ended.append(sequence)
        self._drop(outcome.ended)
        return outcome

    def abandon(self) -> list[DecodeRequest[S]]:
        """The step failed: everything in it ends without a token."""
        assert self.in_flight is not None
        ended, self.in_flight = [row.running for row in self.in_flight.rows], None
        self._drop(ended)
        return ended

    def _advance(self, sequence: DecodeRequest[S], token: int) -> FinishReason | None:
        sequence.last_token = token
        sequence.index += 1
        return finish_reason(token, sequence.index, sequence.sampling)

    def _drop(self, ended: list[DecodeRequest[S]]) -> None:
        gone = set(map(id, ended))
        self.running = [sequence for sequence in self.running if id(sequence) not in gone]
        self._left.clear()
