"""Metrics of a decode worker: its driver tells of steps, and its tables are read."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import TypeVar

from decode_worker.batch import StepOutcome
from decode_worker.requests import AttemptTable, Phase
from runtime.metrics.common import kv_blocks, kv_transfers, prefix_cache, step_tokens
from runtime.metrics.registry import COUNTS, STEP_S, MetricsRegistry

PREFIX = "crossdock_decode_"
S = TypeVar("S")


class DecodeMetrics:
    def __init__(
        self, table: AttemptTable[S], transfers: Mapping[str, int], padding_rows: Callable[[], int] = int
    ) -> None:
        """`transfers`: the KV receiver's counters; `padding_rows`: see `DecodePipeline`."""
        self.registry = registry = MetricsRegistry("decode")
        self._seconds = registry.histogram(PREFIX + "step_seconds", "Time of one forward pass.", STEP_S)
        self._sequences = registry.histogram(PREFIX + "step_sequences", "Sequences in one forward pass.", COUNTS)
        self._tokens = registry.counter(PREFIX + "tokens", "Tokens sent to gateways, without first tokens.")
        self._forwarded = step_tokens(registry, "decode")
        self._failed = registry.counter(PREFIX + "steps_failed", "Forward passes that failed.")
        self._first = registry.counter(PREFIX + "first_tokens", "First tokens of prompts computed here.")
        self._suffixes = registry.counter(
            PREFIX + "suffix_tokens",
            "Tokens of prompts computed here, behind KV that was here, between steps of streams.",
        )

        def attempts() -> dict[str, float]:
            phases = Counter(attempt.phase for attempt in table.attempts.values())
            return {phase.value: phases[phase] for phase in Phase}

        batch = table.batch
        registry.by(
            "gauge", PREFIX + "attempts", "Requests with a reservation, in transfer or running.", "phase", attempts
        )
        registry.gauge(PREFIX + "batch_sequences", "Sequences in the running batch.", lambda: len(batch.running))
        registry.gauge(
            PREFIX + "batch_tokens",
            "Tokens of context in the running batch, prompts included.",
            lambda: sum(sequence.blocks.length for sequence in batch.running),
        )
        registry.total(PREFIX + "joined_sequences", "Sequences that joined the batch.", lambda: batch.joined)
        registry.total(
            PREFIX + "left_sequences", "Sequences that left the batch.", lambda: batch.joined - len(batch.running)
        )
        registry.total(
            PREFIX + "padding_rows", "Rows that only filled steps up to the size of a CUDA graph.", padding_rows
        )
        registry.total(PREFIX + "forwarded_tokens", "Tokens forwarded by the model.", table.tokens_forwarded)
        kv_blocks(registry, table.allocator, table.block_size)
        kv_transfers(registry, "received", transfers)
        registry.total(
            "crossdock_kv_strangers",
            "Connections to the port of tcp that were closed because they did not prove the key of a pair.",
            lambda: transfers.get("strangers", 0),
        )
        prefix_cache(registry, lambda: table.taken_tokens, lambda: table.found_tokens)

    def step_done(self, step_ms: float, sequences: int, outcome: StepOutcome[S]) -> None:
        self._seconds.observe(step_ms / 1000)
        self._sequences.observe(sequences)
        self._forwarded.inc(sequences)
        self._tokens.inc(sum(len(items) for _, items in outcome.by_gateway.values()))

    def slice_done(self, tokens: int, first_tokens: int) -> None:
        self._suffixes.inc(tokens)
        self._first.inc(first_tokens)

    def step_failed(self) -> None:
        self._failed.inc()
