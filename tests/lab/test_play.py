"""Traffic played with the scheduler alone, against the virtual cluster with the whole core, its workers and every message."""

from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest

from coordinator.events import Limits
from lab.advise import Slo, Workers
from lab.cluster.surroundings import Timing
from lab.goals import Goals
from lab.play.caches import PlayedCache, names
from lab.play.options import RunOptions
from lab.play.outcome import Floats
from lab.play.player import Player
from lab.play.plays import Play, outcome_of
from lab.play.request import Sent, clients_of
from lab.profile import Curve, DecodeCost, PrefillCost, Profile, ProfileCapacity, TransferCost
from lab.sessions import played
from launcher.sessions import LoadSession, SessionTurn
from runtime.tenancy.priority_classes import PriorityClass
from tests.lab.profiles import GPU
from tests.uniform_cluster import UniformCluster

PREFILL, DECODE = Curve((1.0, 64.0, 256.0), (5.0, 8.0, 22.0)), Curve((1.0, 8.0, 64.0), (10.0, 12.0, 30.0))
HAND_OVER_MS = 3.0


@dataclass(frozen=True)
class Measured(Timing):
    hand_over_s: tuple[float, float] = (HAND_OVER_MS / 1000, HAND_OVER_MS / 1000)

    def prefill_s(self, tokens: int) -> float:
        return PREFILL(tokens) / 1000

    def decode_s(self, streams: int) -> float:
        return DECODE(streams) / 1000


def profile(kv_blocks: int) -> Profile:
    capacity = ProfileCapacity(kv_blocks, 16, 10**4)
    return Profile(
        PrefillCost(PREFILL),
        DecodeCost(DECODE),
        ProfileCapacity(1 << 16, 16, 10**4),
        capacity,
        TransferCost(HAND_OVER_MS),
    )


def traffic(per_s: float, count: int = 300, seed: int = 1, tenants: Sequence[str] = ("default",)) -> list[Sent]:
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(1 / per_s, count))
    prompts = np.clip(rng.lognormal(5.5, 1.0, count), 4, 4000).astype(int)
    outputs = np.clip(rng.lognormal(3.5, 0.8, count), 1, 400).astype(int)
    names = rng.choice(list(tenants), count)
    return [
        Sent(at, int(p), int(o), (), str(name))
        for at, p, o, name in zip(times.tolist(), prompts, outputs, names, strict=True)
    ]


PLAIN = Limits(kv_overcommit=1.0, priority_classes={"standard": PriorityClass()})


def in_the_virtual_cluster(
    sent: Sequence[Sent], workers: Workers, kv_blocks: int, limits: Limits
) -> tuple[Floats, Floats]:
    """TTFT and time to the end of each request, in ms; NaN without an answer."""
    cluster = UniformCluster(
        limits, Measured(), prefill=workers.prefill, decode=workers.decode, decode_blocks=kv_blocks, batched=True
    )
    ends: dict[str, float] = {}
    cluster.on_end = lambda request: ends.__setitem__(request.submit.request_id, cluster.now)
    for number, one in enumerate(sent):
        cluster.at(one.at_s, cluster.submit, str(number), one.tenant, one.prompt_tokens, one.output_tokens)
    cluster.run(sent[-1].at_s + 300)
    ttft = np.array([1000 * cluster.ttft_s.get(str(number), np.nan) for number in range(len(sent))])
    e2e = np.array([1000 * (ends[str(number)] - one.at_s) for number, one in enumerate(sent)])
    return ttft, np.where(np.isnan(ttft), np.nan, e2e)


@pytest.mark.parametrize(
    ("workers", "per_s", "limits", "tenants"),
    [
        (Workers(2, 2), 60.0, PLAIN, ("default",)),
        (Workers(1, 2), 80.0, Limits(), ("default",)),
        (Workers(1, 1), 25.0, PLAIN, ("a", "b", "c/x", "c/y")),
    ],
    ids=["several-workers", "default-classes", "several-tenants"],
)
def test_requests_match_the_whole_core(workers: Workers, per_s: float, limits: Limits, tenants: Sequence[str]) -> None:
    """First and last tokens come when they come with the whole core, to the microsecond. With several tenants a report that
    comes a step earlier may turn the order of two requests."""
    sent = traffic(per_s, 100, tenants=tenants)
    ttft_ms, e2e_ms = in_the_virtual_cluster(sent, workers, 10**6, limits)
    outcome = Player(profile(10**6), workers, sent, RunOptions(limits=limits)).run()
    assert np.mean(np.abs(outcome.ttft_ms - ttft_ms) < 1e-3) >= (1.0 if len(tenants) == 1 else 0.97)
    assert np.mean(np.abs(outcome.e2e_ms - e2e_ms) < 1e-3) >= (1.0 if len(tenants) == 1 else 0.8)


def test_scarce_kv_matches_the_whole_core() -> None:
    """Nearly all requests wait for room exactly as long as with the whole core; a step decides for the others."""
    sent = traffic(60.0, 120)
    ttft_ms, e2e_ms = in_the_virtual_cluster(sent, Workers(2, 2), 500, PLAIN)
    outcome = Player(profile(500), Workers(2, 2), sent, RunOptions(limits=PLAIN)).run()
    assert np.mean(np.abs(outcome.ttft_ms - ttft_ms) < 1.0) > 0.85
    assert outcome.attainment(Goals(Slo(1000.0, 17.0))) == pytest.approx(
        np.mean((ttft_ms <= 1000) & (e2e_ms - ttft_ms <= 17.0 * (outcome.output_tokens - 1) + 1e-6)), abs=0.05
    )


@pytest.mark.parametrize("workers", [Workers(1, 2), Workers(0, 0, 2)], ids=str)
@pytest.mark.parametrize("stall_share", [0.0, 0.5])
def test_turns_find_what_turns_left(workers: Workers, stall_share: float) -> None:
    """A turn comes after the answer before it, and does not compute anew what that left."""
    turns = [SessionTurn(2000, 80), *(SessionTurn(200, 80, 1.0) for _ in range(5))]
    sent, _ = played([LoadSession(tuple(turns))] * 4, 4, 32_768, 1e9)
    outcome = Player(GPU, workers, sent, RunOptions(stall_share=stall_share)).run()
    reused = np.array([one.reused_tokens for one in sent])
    later = reused > 0
    assert (outcome.cached_tokens <= reused).all()
    assert (outcome.cached_tokens[later] > reused[later] - 100).mean() > 0.8
    assert outcome.clients == tuple(clients_of(sent))
    assert (np.diff(np.sort(outcome.at_s[np.array(outcome.clients) == 0])) > 1.0).all()


def test_plays_run_in_other_processes() -> None:
    """A play can be sent to another process, and its outcome back."""
    play = Play(GPU, Workers(1, 1), traffic(5.0, 4), RunOptions())
    there = ForkingPickler.loads(ForkingPickler.dumps(play))
    assert there == play
    assert len(ForkingPickler.loads(ForkingPickler.dumps(outcome_of(there))).at_s) == 4


def test_known_blocks_are_not_computed() -> None:
    """Of prompts that begin with the same blocks of a trace, only the first one is computed whole."""
    sent = [Sent(float(at), 1100, 5, (7, 8, 100 + at)) for at in range(4)]
    outcome = Player(GPU, Workers(1, 1), sent, RunOptions()).run()
    assert outcome.cached_tokens.tolist() == [0, 1024, 1024, 1024]


def test_cut_streams_resume() -> None:
    """Where the pool is short, streams are cut and go on later, and every answer ends."""
    sent = [Sent(0.01 * number, 200, 300) for number in range(30)]
    options = RunOptions(limits=Limits(priority_classes={"standard": PriorityClass()}, long_output_tokens=16))
    player = Player(profile(120), Workers(1, 1), sent, options)
    outcome = player.run()
    assert not np.isnan(outcome.tpot_ms).any()
    assert player.interrupted > 0


def test_overload_is_refused() -> None:
    """Requests that are expected to miss their class's target are refused, as the coordinator refuses them."""
    sent = traffic(200.0, 400)
    limits = Limits(priority_classes={"standard": PriorityClass(ttft_ms=500.0)})
    outcome = Player(profile(10**6), Workers(1, 1), sent, RunOptions(limits=limits)).run()
    refused = np.isnan(outcome.ttft_ms)
    assert 0.2 < refused.mean() < 0.9
    assert np.quantile(outcome.ttft_ms[~refused], 0.9) < 700


def test_cache_gives_up_the_oldest() -> None:
    """A cache tells what is new to it and what it gives up, so that both add up to what it keeps."""
    cache, known = PlayedCache(), set[bytes]()
    for number in range(40):
        part = number * 7 % 5
        inserted, evicted = cache.keep([(part, names(part, 0, 3 + number % 4))], 12)
        known = known - set(split(evicted)) | (set(split(inserted)) - set(split(evicted)))
        assert len(known) <= 12
        assert names(part, 0, 1) in known


def split(joined: bytes) -> list[bytes]:
    return [joined[at : at + 16] for at in range(0, len(joined), 16)]
