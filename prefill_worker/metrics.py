"""Metrics of a prefill worker: its driver tells of steps and hand-overs, and its tables are read."""

from collections.abc import Callable, Mapping
from typing import Protocol

from kvtransfer.session.session import KvFailed, KvSent
from prefill_worker.core import PrefillStepResult, Work
from prefill_worker.prompts import PromptTable
from runtime.metrics.common import kv_blocks, kv_transfers, prefix_cache, step_tokens
from runtime.metrics.registry import COUNTS, LATENCY_S, STEP_S, MetricsRegistry

PREFIX = "crossdock_prefill_"


class Queue(Protocol):
    def __len__(self) -> int: ...


class PrefillMetrics:
    def __init__(
        self,
        table: PromptTable,
        steps: Queue,
        transfers: Mapping[str, int],
        tokens_forwarded: Callable[[], int],
        tier_counts: Callable[[], tuple[int, int, int]] = lambda: (0, 0, 0),
    ) -> None:
        """`transfers`: the KV sender's counters. `tier_counts`: see `KvTier.counts`."""
        self.registry = registry = MetricsRegistry("prefill")
        self._seconds = registry.histogram(PREFIX + "step_seconds", "Time of one forward pass.", STEP_S)
        self._tokens = registry.histogram(PREFIX + "step_tokens", "Prompt tokens in one forward pass.", COUNTS)
        self._forwarded = step_tokens(registry, "prefill")
        self._prompts = registry.histogram(PREFIX + "step_prompts", "Prompts with a chunk in one forward pass.", COUNTS)
        self._first_tokens = registry.counter(PREFIX + "first_tokens", "First tokens sampled, one for each choice.")
        self._failed = registry.counter(PREFIX + "steps_failed", "Forward passes that failed.")
        self._exposed = registry.histogram(
            PREFIX + "transfer_exposed_seconds",
            "From the end of a prompt's computation until its KV was acknowledged: transfer that prefill did not hide.",
            LATENCY_S,
        )
        registry.gauge(PREFIX + "prompts", "Prompts held: being computed or transferred.", lambda: len(table.prompts))
        registry.gauge(PREFIX + "steps_queued", "Steps received and not begun.", lambda: len(steps))
        registry.total(PREFIX + "forwarded_tokens", "Tokens forwarded by the model.", tokens_forwarded)
        registry.total(
            PREFIX + "fetched_tokens",
            "Tokens of prompts whose KV was fetched from the decode worker that had computed it.",
            lambda: table.fetched_tokens,
        )
        registry.gauge(PREFIX + "tier_blocks", "KV blocks in the second tier.", lambda: tier_counts()[0])
        registry.total(
            PREFIX + "tier_loaded_tokens",
            "Tokens of prompts whose KV came back from the second tier.",
            lambda: tier_counts()[1],
        )
        registry.total(
            PREFIX + "tier_failures",
            "Copies to or from the second tier that failed; what was lost is computed.",
            lambda: tier_counts()[2],
        )
        kv_blocks(registry, table.allocator, table.block_size)
        kv_transfers(registry, "sent", transfers)
        prefix_cache(registry, lambda: table.taken_tokens, lambda: table.found_tokens)

    def step_done(self, work: Work, result: PrefillStepResult) -> None:
        self._seconds.observe(result.step_ms / 1000)
        tokens = sum(chunk.length for _, chunk in work)
        self._tokens.observe(tokens)
        self._forwarded.inc(tokens)
        self._prompts.observe(len(work))
        if result.first_tokens:
            self._first_tokens.inc(sum(map(len, result.first_tokens.values())))

    def step_failed(self) -> None:
        self._failed.inc()

    def kv_result(self, result: KvSent | KvFailed) -> None:
        if isinstance(result, KvSent):
            self._exposed.observe(result.transfer_ms / 1000)
