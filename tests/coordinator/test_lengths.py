"""Memory and quotas by how long answers really are: room in decode by what a tenant's answers take, limits by what they may."""

import math
import random
from functools import partial

import pytest

from coordinator.events import Configured, Limits
from lab.cluster.decode import ClusterDecodeWorker
from lab.cluster.surroundings import Timing
from runtime.tenancy.tenants import parse
from scheduler.lifecycle import RequestState
from tests.helpers import first
from tests.uniform_cluster import UniformCluster

CHAT_MAX_TOKENS = 4096
"""What a gateway takes for a chat request without `max_tokens`."""
DECODE_BLOCKS = 1024


def chat(source: random.Random) -> int:
    return int(source.lognormvariate(math.log(280) - 0.4, 0.9))


def mostly_short(source: random.Random) -> int:
    return 4000 if source.random() < 0.08 else source.randint(2, 200)


class Chats:
    """Requests without `max_tokens` come faster than two decode workers can serve them."""

    def __init__(self, lengths: str, prompt_tokens: int, per_s: float, seed: int, limits: Limits | None = None) -> None:
        draw, source = {"chat": chat, "mostly short": mostly_short}[lengths], random.Random(seed)
        self.cluster = UniformCluster(
            limits or Limits(queue_requests_max=64), Timing(prefill_tokens_per_s=2e5, decode_step_s=0.02), decode=2,
            prefill_blocks=1 << 14, decode_blocks=DECODE_BLOCKS, block_size=16, max_seqs=1024, batched=True, seed=seed,
        )  # fmt: skip
        at_s, number = 0.0, 0
        while (at_s := at_s + source.expovariate(per_s)) < 90.0:
            number += 1
            tokens = min(max(draw(source), 2), CHAT_MAX_TOKENS)
            ask = partial(self.cluster.submit, output_tokens=(tokens,))
            self.cluster.at(at_s, ask, f"r{number}", f"o{number % 5}", prompt_tokens, CHAT_MAX_TOKENS)

    def use(self, begin_s: float, end_s: float) -> float:
        """The share of the pools that was held."""
        self.cluster.run(begin_s)
        before = self._held_block_s()
        self.cluster.run(end_s)
        return (self._held_block_s() - before) / (end_s - begin_s) / (2 * DECODE_BLOCKS)

    def _held_block_s(self) -> float:
        workers = self.cluster.decode.values()
        return sum(worker.held_block_s for worker in workers if isinstance(worker, ClusterDecodeWorker))


@pytest.mark.parametrize("seed", first(1, range(1, 6)))
@pytest.mark.parametrize(
    ("lengths", "prompt_tokens", "per_s", "interrupted_max"),
    first(1, [("chat", 200, 15.0, 0.01), ("chat", 1000, 8.0, 0.01), ("mostly short", 200, 15.0, 0.1)]),
)
def test_chat_without_max_tokens_fills_pool(
    lengths: str, prompt_tokens: int, per_s: float, interrupted_max: float, seed: int
) -> None:
    """Where one answer of twelve takes a quarter of a worker's pool, and nothing tells which, more are interrupted."""
    chats = Chats(lengths, prompt_tokens, per_s, seed)
    use = chats.use(30.0, 90.0)
    began = [request for request in chats.cluster.requests.values() if request.emitted_tokens[0]]
    interrupted = [request.interruptions for request in began if request.interruptions]
    assert use >= 0.6
    assert len(interrupted) <= interrupted_max * len(began) and max(interrupted, default=0) <= 3
    assert not chats.cluster.core.cluster.counters["work_failed_transfer_failed"], "a computed prompt found no room"


def test_no_overcommit_counts_max_tokens() -> None:
    """Requests are counted with all of max_tokens, and none is interrupted, if overcommit is off."""
    chats = Chats("chat", 200, 15.0, 1, Limits(queue_requests_max=64, kv_overcommit=1.0))
    assert chats.use(10.0, 30.0) < 0.25
    assert not any(request.interruptions for request in chats.cluster.requests.values())


LIMITED = """
[tenants.a]
limits = { tokens_in_flight = 20_000, tokens_per_day = 100_000 }
"""


@pytest.mark.parametrize("taught_tokens", [2, 100])
def test_short_answers_do_not_loosen_quotas(taught_tokens: int) -> None:
    """Many short answers do not let long ones exceed token limits by more than one request."""
    cluster = UniformCluster(Limits(), Timing(prefill_tokens_per_s=1e6, decode_step_s=0.02), decode=2, progress=False)
    cluster.post(Configured(parse(LIMITED), 0.0))
    for number in range(120):
        cluster.at(3.0 * number, cluster.submit, f"t{number}", "a", 10, taught_tokens)
    for number in range(1600):
        cluster.at(400 + 0.25 * number, cluster.submit, f"x{number}", "a", 10, 4000)
    account, most_in_flight, most_a_day = None, 0, 0
    while cluster.next_s < 1200.0:
        cluster.step()
        if (account := cluster.core.accounts.billing.quotas.accounts.get("a")) is not None:
            running = [r.submit for r in cluster.requests.values() if r.submit.tenant == "a" and r.state is None]
            most_in_flight = max(most_in_flight, sum(s.prompt_tokens + s.sampling.max_tokens for s in running))
            most_a_day = max(most_a_day, account.day_tokens)
    finished = [r for r in cluster.requests.values() if r.state is RequestState.FINISHED]
    used = sum(r.submit.prompt_tokens + sum(r.emitted_tokens) for r in finished)
    assert account is not None and account.idle and account.day_tokens == used
    assert 16_000 < most_in_flight <= 20_000 + 4_000
    assert 60_000 < used <= most_a_day <= 100_000 + 4_000


def test_overlong_answer_is_charged_as_emitted() -> None:
    """An answer longer than its estimate is charged token by token as it is emitted."""
    timing = Timing(prefill_tokens_per_s=2e5, decode_step_s=0.02)
    cluster = UniformCluster(Limits(), timing, decode_blocks=DECODE_BLOCKS, block_size=16, max_seqs=64, batched=True)
    for number in range(50):
        cluster.at(0.1 * number, partial(cluster.submit, output_tokens=(10,)), f"r{number}", "o", 200, CHAT_MAX_TOKENS)
    cluster.at(10.0, partial(cluster.submit, output_tokens=(2000,)), "long", "o", 200, CHAT_MAX_TOKENS)
    cluster.run(11.0)
    request = cluster.core.cluster.requests["long"]
    charged = []
    for second in (11.0, 21.0, 31.0):
        cluster.run(second)
        charged.append(request.attempt_progress.output_charged)
    assert charged[0] < 150, "the estimate, or a second"
    assert charged[1:] == pytest.approx([2 * 11 / 0.02, 2 * 21 / 0.02], rel=0.1)
    cluster.run(60.0)
    assert request.state is RequestState.FINISHED and not request.attempt_progress.output_charged
