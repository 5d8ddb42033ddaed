"""Reports on the running batch to the coordinator: how far it is, who joined, whether blocks run short, and how long steps
take. Pure."""

from typing import Generic, TypeVar

from decode_worker.batch import StepOutcome
from decode_worker.requests import AttemptTable, Phase
from proto.progress import DecodeProgress

S = TypeVar("S")

REPORT_S = 0.1
WARN_STEPS = 32
"""How many steps ahead a shortage is detected. The batch must not advance this far between two reports, plus the time until a
victim has left."""


class ProgressReport(Generic[S]):
    """Called after each step. Nothing is reported while nothing runs, because a missing report is on the safe side."""

    def __init__(self, table: AttemptTable[S]) -> None:
        self._table = table
        self._said_at = float("-inf")
        self._stepped_at: float | None = None  # the last step; None if the next one did not follow at once
        self._timed_s = 0.0
        self._timed = (0, 0, 0)  # (steps, sequences, KV tokens) since the last report, summed over steps

    def stepped(self, outcome: StepOutcome[S], now: float) -> None:
        """A step has ended, and the next one has begun if anything still runs. The time between two ends is what a stream
        sees: the step plus the worker's other work between steps."""
        if self._stepped_at is not None:
            steps, sequences, kv_tokens = self._timed
            self._timed = steps + 1, sequences + outcome.sequences, kv_tokens + outcome.kv_tokens
            self._timed_s += now - self._stepped_at
        self._stepped_at = now if self._table.batch.in_flight is not None else None

    def paused(self) -> None:
        """The next step does not follow the last one at once."""
        self._stepped_at = None

    def due(self, now: float) -> DecodeProgress | None:
        """The report for the coordinator, if one is due; None most of the time, however many sequences run."""
        if now - self._said_at < REPORT_S:
            return None
        self._said_at = now
        table = self._table
        joined, table.joined = tuple(table.joined), []
        prefixes, table.prefixes = tuple(table.prefixes), []
        short_blocks = shortage(table, WARN_STEPS)
        (steps, sequences, kv_tokens), timed_ms = self._timed, 1000 * self._timed_s
        self._timed, self._timed_s = (0, 0, 0), 0.0
        return DecodeProgress(
            table.batch.steps, table.allocator.room, short_blocks, joined, prefixes, steps, timed_ms, sequences, kv_tokens
        )  # fmt: skip


def shortage(table: AttemptTable[S], horizon: int) -> int:
    """Returns how many blocks will be missing within the next `horizon` steps if no stream stops early.

    Called with a step in flight, or with no running sequence. Sequences that reach their `max_tokens` free the blocks that
    only they hold. Expected prompts that are not offered yet count as needing their blocks at once.
    """
    size, batch = table.block_size, table.batch
    assert batch.in_flight is not None or not batch.running
    free = table.allocator.room
    wanted = sum(
        -(-attempt.order.prompt_tokens // size)
        for attempt in table.attempts.values()
        if attempt.phase is Phase.RESERVED and attempt.final_report is None
    )
    if free >= wanted + len(batch.running) * (horizon // size + 2):
        return 0
    change = [wanted] + [0] * (horizon + 1)
    for sequence in batch.running:
        length, held = sequence.blocks.length, len(sequence.blocks.table)
        to_go = sequence.sampling.max_tokens - sequence.index - max(1, sequence.steps_in_flight)
        takes = range(held * size - length + 1, min(to_go, horizon) + 1, size)
        for step in takes:
            change[step] += 1
        if to_go < horizon:
            own = sum(table.allocator.refs(block) == 1 for block in sequence.blocks.table)
            change[to_go + 1] -= own + len(takes)
    most = total = 0
    for step in change:
        total += step
        most = max(most, total)
    return max(most - free, 0)
