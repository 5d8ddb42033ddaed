"""A virtual cluster whose one decode worker gets more than it can hold: what `python -m benchmarks kv-utilization` measures.

Four prefill workers compute each step in the time of a decode step, independent of its tokens. Hand-overs take up to 4 steps,
reports 2.
"""

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from math import inf
from random import Random

from coordinator.events import Limits
from lab.cluster.decode import ClusterDecodeWorker
from lab.cluster.surroundings import ClientRequest, Timing
from proto.errors import Interrupt
from proto.limits import HASH_BYTES
from runtime.tenancy.priority_classes import PriorityClass
from scheduler.lifecycle import RequestState
from tests.uniform_cluster import FIRST_DECODE, UniformCluster

STEP_S = 0.03


@dataclass(frozen=True)
class Job:
    prompt_tokens: int
    max_tokens: int
    outputs: tuple[int, ...]  # tokens of each choice
    text: str = ""  # prompts with the same text begin with the same `shared_tokens` tokens
    shared_tokens: int = 0

    def token_steps(self) -> float:
        """Returns the slots times steps that its KV takes in decode."""
        return self.prompt_tokens * max(self.outputs) + sum(tokens * tokens / 2 for tokens in self.outputs)

    def block_hashes(self, name: str, block_size: int) -> bytes:
        """Returns the hashes of the prompt's full blocks; empty if it shares nothing."""
        blocks = self.prompt_tokens // block_size if self.text else 0
        alike = self.shared_tokens // block_size
        texts = (f"{self.text if block < alike else name} {block}" for block in range(blocks))
        return b"".join(blake2b(text.encode(), digest_size=HASH_BYTES).digest() for text in texts)


@dataclass
class Figures:
    """`kv_use` is the mean share of the pool's blocks that were really held, over the steps measured."""

    kv_use: float = 0.0
    finished: int = 0
    output_tokens: int = 0
    refused_after_prefill: int = 0
    out_of_memory: int = 0
    preempted: int = 0
    recomputed_tokens: int = 0  # prompt tokens of attempts after the first
    steps: int = 0


class OverloadedCluster:
    def __init__(
        self,
        draw: Callable[[Random], Job],
        kv_blocks: int,
        block_size: int,
        overload: float,
        *,
        whole_life: bool = False,
        overcommit: float = 1.0,
        report_s: float = 2 * STEP_S,
        seed: int = 0,
    ) -> None:
        """Makes the cluster. `overload`: offered load over the load that the decode worker could carry with every block in
        use. If `whole_life`, no progress is reported, so that every attempt stays counted with prompt + max_tokens."""
        self.kv_blocks = kv_blocks
        self.cluster = UniformCluster(
            Limits(queue_wait_s_max=1e6, kv_overcommit=overcommit, priority_classes={"standard": PriorityClass()}),
            Timing(inf, STEP_S, STEP_S, (0.0, 4 * STEP_S), report_s),
            prefill=4,
            prefill_blocks=kv_blocks,
            decode_blocks=kv_blocks,
            block_size=block_size,
            max_seqs=1 << 16,
            batched=True,
            progress=not whole_life,
            seed=seed,
        )
        decode = self.cluster.decode[FIRST_DECODE]
        assert isinstance(decode, ClusterDecodeWorker)
        self.decode = decode
        self.arriving = True
        self.cluster.on_end = self._ended
        self._draw = draw
        self._finished = self._output_tokens = 0
        samples = [draw(Random(number)) for number in range(500)]
        token_steps = sum(job.token_steps() for job in samples) / len(samples)
        self._per_s = overload * kv_blocks * block_size / token_steps / STEP_S
        self.cluster.at(0.0, self._arrive)

    def run(self, warmup_steps: int, steps: int) -> Figures:
        cluster = self.cluster
        cluster.run(cluster.now + warmup_steps * STEP_S)
        finished, output_tokens, held_block_s = self._finished, self._output_tokens, self.decode.held_block_s
        cluster.run(cluster.now + steps * STEP_S)
        counters = cluster.core.cluster.counters
        return Figures(
            (self.decode.held_block_s - held_block_s) / (steps * STEP_S * self.kv_blocks),
            self._finished - finished,
            self._output_tokens - output_tokens,
            counters[f"work_failed_{Interrupt.TRANSFER_FAILED}"],
            counters[f"work_failed_{Interrupt.PREEMPTED}"],
            counters[f"interrupted_{Interrupt.PREEMPTED}"],
            sum(request.recomputed_tokens for request in cluster.requests.values()),
            steps,
        )

    def _arrive(self) -> None:
        if not self.arriving:
            return
        cluster = self.cluster
        job, name = self._draw(cluster.random), f"r{len(cluster.requests)}"
        cluster.submit(
            name,
            "default",
            job.prompt_tokens,
            job.max_tokens,
            output_tokens=job.outputs,
            block_hashes=job.block_hashes(name, cluster.block_size),
        )
        cluster.at(cluster.now + cluster.random.expovariate(self._per_s), self._arrive)

    def _ended(self, request: ClientRequest) -> None:
        if request.state is RequestState.FINISHED:
            self._finished += 1
            self._output_tokens += sum(request.output_tokens)
