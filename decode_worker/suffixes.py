"""Suffixes of prompts whose beginning a decode worker has: computed here in slices, between the steps of its streams. Pure.

The coordinator sends `Reserve`, `Prefill` and one `Step` for each chunk, as it does to a prefill worker. There is no hand-over:
with the last chunk the first tokens are drawn, and the choices join the batch.

Each slice is computed in one forward pass with the streams' tokens.
"""

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

from decode_worker.requests import Attempt, AttemptTable, FinalReport, Phase, Suffix, failed
from proto.codec import unpack_tokens
from proto.errors import Interrupt, RemoteProtocolError, no_token_drawn
from proto.kv import FirstToken
from proto.messages import CacheMiss, Finished, Prefill, Released, Step, StepDone, TokenItem, Tokens
from worker.ports import CoordinatorLink, Gateways

S = TypeVar("S")
STEPS_QUEUED_MAX = 64
TARGET_SHARE: Final = 0.9  # of a target, for a step with a slice
IDLE_TOKENS: Final = 32  # of a slice, while no stream runs but one may join at any moment
_GAIN: Final = 0.2
_FIRST_SHARE: Final = 0.25  # of a step's time per token of a slice, until it is measured
_OUTLIER: Final = 3.0  # a step so many times as long as usual counts as if it took this much


@dataclass(frozen=True)
class Slice(Generic[S]):
    """Part of a chunk, for the next step."""

    attempt: Attempt[S]
    suffix: Suffix
    tokens: tuple[int, ...]
    start: int  # position in the prompt

    @property
    def is_last(self) -> bool:
        """The prompt is complete with it: first tokens are to be drawn."""
        return self.start + len(self.tokens) == self.suffix.order.prompt_tokens


class SuffixPorts(Protocol):
    @property
    def registration(self) -> CoordinatorLink: ...
    @property
    def gateways(self) -> Gateways: ...


class Suffixes(Generic[S]):
    def __init__(
        self,
        ports: SuffixPorts,
        table: AttemptTable[S],
        vocab_size: int,
        close: Callable[[Attempt[S], FinalReport, str], None],
        join: Callable[[Attempt[S], list[int], list[FirstToken], list[int]], None],
    ) -> None:
        """`close` ends an attempt, and `join` lets the choices of one run whose prompt is computed, over these blocks."""
        self._ports, self._table, self._vocab_size, self._close, self._join = ports, table, vocab_size, close, join
        self.prepare_grammar: Callable[[Attempt[S]], None] | None = None  # leads to `grammar_ready`
        self._steps: deque[Step] = deque()
        self._began_at: float | None = None  # when a slice of the first of them was begun
        self.links_lost = 0

    def __len__(self) -> int:
        """Steps that are not done."""
        return len(self._steps)

    def take_in(self, order: Prefill, blob: bytes) -> None:
        """Take in a prompt. Nothing is computed before a `Step` comes. Repeated orders are ignored."""
        attempt = self._table.attempts.get((order.request_id, order.attempt))
        if attempt is None or attempt.phase is not Phase.RESERVED or attempt.final_report is not None:
            return
        try:
            tokens = unpack_tokens(blob, order.prompt_tokens)
            fault = "a token id outside the vocabulary" if max(tokens) >= self._vocab_size else ""
        except RemoteProtocolError as error:
            # A gateway's fault: the coordinator passed the ids on unread, and its link is not the one to end.
            tokens, fault = [], str(error)
        fault = fault or self._table.begin_suffix(attempt, order, tokens)
        if fault:
            self._fail(attempt, Interrupt.ENGINE_ERROR, fault)
            return
        suffix = attempt.suffix
        assert suffix is not None
        if suffix.cached_tokens < order.cached_tokens:
            self._ports.registration.send(CacheMiss(*attempt.key, suffix.cached_tokens))
        if order.sampling.grammar and self.prepare_grammar is not None:
            suffix.is_ready = False
            self.prepare_grammar(attempt)

    def add(self, step: Step) -> None:
        """Raises `RemoteProtocolError`."""
        if len(self._steps) >= STEPS_QUEUED_MAX or len(step.chunks) != 1:
            raise RemoteProtocolError("more than one chunk in a step of a decode worker, or too many steps in flight")
        self._steps.append(step)

    def grammar_ready(self, attempt: Attempt[S], fault: str = "") -> None:
        """Continues with the compiled grammar, or fails the attempt with `fault`."""
        if attempt.suffix is None or attempt.final_report is not None:
            return
        if fault:
            self._fail(attempt, Interrupt.GRAMMAR, f"the grammar: {fault}")
        else:
            attempt.suffix.is_ready = True

    def coordinator_lost(self) -> None:
        """Steps will not come any more."""
        self.links_lost += 1
        self._steps.clear()
        for attempt in list(self._table.attempts.values()):
            if attempt.suffix is not None:
                self._close(attempt, Released(*attempt.key), "coordinator lost")

    # --- steps ----------------------------------------------------------------------------------------------------------

    def next_slice(self, tokens_max: int, now: float) -> Slice[S] | None:
        """Returns at most `tokens_max` tokens of the first chunk that can be computed, or None. A chunk that is no longer
        valid is answered at once. A chunk whose grammar is being compiled waits, and later chunks go first."""
        for step in list(self._steps):
            [chunk] = step.chunks
            attempt = self._table.attempts.get((chunk.request_id, chunk.attempt))
            suffix = attempt.suffix if attempt is not None and attempt.final_report is None else None
            end = chunk.start + chunk.length
            if suffix is None or not chunk.start <= suffix.computed_tokens < end or end > suffix.order.prompt_tokens:
                self._steps.remove(step)
                self._ports.registration.send(StepDone(step.step_id, (), 0.0, self._table.tokens_forwarded()))
                continue
            if not suffix.is_ready:
                continue
            assert attempt is not None and not suffix.in_step
            if step is not self._steps[0]:
                self._steps.remove(step)
                self._steps.appendleft(step)
                self._began_at = None
            self._began_at = now if self._began_at is None else self._began_at
            start, suffix.in_step = suffix.computed_tokens, True
            return Slice(attempt, suffix, tuple(suffix.tokens[start : min(start + tokens_max, end)]), start)
        return None

    def computed(self, done: Slice[S], items: list[TokenItem] | None, now: float) -> None:
        """`items`: the first token of each choice, if the prompt is complete; None where none could be drawn."""
        attempt, suffix = done.attempt, done.suffix
        suffix.in_step = False
        suffix.computed_tokens += len(done.tokens)
        if items is None and attempt.final_report is None:
            # Before the step's end, which tells the coordinator of a complete prompt that its first token is emitted.
            self._table.allocator.forget(suffix.blocks)
            self._fail(attempt, *no_token_drawn(suffix.order.sampling.grammar))
            self._end_step(attempt, suffix, now)
            return
        self._end_step(attempt, suffix, now)
        if attempt.final_report is not None:
            self._close(attempt, attempt.final_report, "")
        elif done.is_last:
            assert items is not None
            self._first_tokens_drawn(attempt, suffix, items)

    def failed(self, begun: Slice[S], error: str) -> None:
        begun.suffix.in_step = False
        report = begun.attempt.final_report
        if report is not None:
            self._close(begun.attempt, report, "")
        else:
            self._fail(begun.attempt, Interrupt.ENGINE_ERROR, f"the model failed: {error[:300]}")

    def _end_step(self, attempt: Attempt[S], suffix: Suffix, now: float) -> None:
        """Report the step if its chunk is fully computed. Chunks from before the last loss of the link are no longer known
        here."""
        step = self._steps[0] if self._steps else None
        if step is None or (step.chunks[0].request_id, step.chunks[0].attempt) != attempt.key:
            return
        [chunk] = step.chunks
        if suffix.computed_tokens == chunk.start + chunk.length:
            self._steps.popleft()
            assert self._began_at is not None
            took_ms, self._began_at = 1000 * (now - self._began_at), None
            self._ports.registration.send(StepDone(step.step_id, (chunk,), took_ms, self._table.tokens_forwarded()))

    def _first_tokens_drawn(self, attempt: Attempt[S], suffix: Suffix, items: list[TokenItem]) -> None:
        order = suffix.order
        self._table.suffix_computed(attempt, suffix)
        self._ports.gateways.send(order.gateway, Tokens(tuple(items)))
        going_on = [FirstToken(item.choice, item.tokens[0]) for item in items if item.finish is None]
        if going_on:
            self._join(attempt, suffix.blocks, going_on, suffix.tokens)
        else:
            final_report = Finished(*attempt.key, len(items), self._table.tokens_forwarded(), order.resumed_tokens)
            self._close(attempt, final_report, "ended with its first token")

    def _fail(self, attempt: Attempt[S], reason: Interrupt, why: str) -> None:
        self._close(attempt, failed(attempt, reason, why), why)


class SliceSizes:
    """How much of a prompt is computed with the next step, so that running streams hardly notice.

    A slice may lengthen the step by `share` of its time without a slice, and it leaves the strictest TPOT target of the streams
    its time. If all of them have targets, those alone count. The time of steps without a slice, by batch size, and the time
    that a slice's token adds are both measured.
    """

    def __init__(self, share: float) -> None:
        """`share`: part of a step's time by which a slice may lengthen it."""
        self._share = share
        self._step_ms: dict[int, float] = {}  # of steps without a slice, by sequences
        self._token_ms = 0.0  # added by a token of a slice; 0: not measured yet

    def tokens(self, sequences: int, targets: Collection[float] = (0.0,)) -> int:
        """The size of the next slice beside so many sequences: one at least, or a prompt might wait for the end of all streams.
        `targets`: their TPOT targets in milliseconds; 0 stands for none."""
        step_ms = self.step_ms(sequences)
        if not step_ms:
            return 1  # nothing is known yet
        spare_ms = min(TARGET_SHARE * target - step_ms if target else self._share * step_ms for target in targets)
        return max(int(spare_ms / (self._token_ms or _FIRST_SHARE * step_ms)), 1)

    def step_ms(self, sequences: int) -> float:
        """Milliseconds that a step of so many sequences, or about as many, takes without a slice; 0: none was measured."""
        if sequences in self._step_ms or not self._step_ms:
            return self._step_ms.get(sequences, 0.0)
        return self._step_ms[min(self._step_ms, key=lambda other: (abs(other - sequences), other))]

    def measured(self, sequences: int, slice_tokens: int, ms: float) -> None:
        """A step has taken so long, streams and slice together."""
        if not sequences:
            return
        usual_ms = self.step_ms(sequences)
        if not slice_tokens:
            before = self._step_ms.get(sequences)
            self._step_ms[sequences] = ms if before is None else before + _GAIN * (min(ms, _OUTLIER * before) - before)
        elif usual_ms:
            added_ms = max(ms - usual_ms, 0.01 * usual_ms) / slice_tokens
            if self._token_ms:
                added_ms = min(added_ms, _OUTLIER * self._token_ms)
                self._token_ms += _GAIN * (added_ms - self._token_ms)
            else:
                self._token_ms = added_ms
