"""The fast simulator against the virtual cluster, which runs the whole production core, its workers and every message."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
import pytest

from coordinator.events import Limits
from simulation.cluster.cluster import VirtualCluster
from simulation.cluster.surroundings import Timing
from tuning.advise import Workers
from tuning.profile import Capacity, Curve, DecodeCost, PrefillCost, Profile, TransferCost
from tuning.simulator.cluster import Options, Simulator
from tuning.simulator.job import Sent

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
    capacity = Capacity(kv_blocks, 16, 10**4)
    return Profile(
        PrefillCost(PREFILL), DecodeCost(DECODE), Capacity(1 << 16, 16, 10**4), capacity, TransferCost(HAND_OVER_MS)
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


def in_the_virtual_cluster(sent: Sequence[Sent], workers: Workers, kv_blocks: int) -> VirtualCluster:
    cluster = VirtualCluster(
        Limits(), Measured(), prefill=workers.prefill, decode=workers.decode, decode_blocks=kv_blocks, batched=True
    )
    for number, one in enumerate(sent):
        cluster.at(
            one.at_s, cluster.submit, str(number), one.tenant, one.prompt_tokens, one.output_tokens
        )  # it stops with max_tokens
    cluster.run(sent[-1].at_s + 600)
    return cluster


@pytest.mark.parametrize(
    ("workers", "per_s", "kv_blocks"),
    [
        (Workers(1, 1), 8.0, 10**6),
        (Workers(2, 2), 10.0, 10**6),
        (Workers(3, 1), 25.0, 10**6),
        (Workers(1, 3), 12.0, 10**6),
        (Workers(2, 2), 20.0, 400),
    ],
    ids=str,
)
def test_first_tokens_come_as_in_the_whole_core(workers: Workers, per_s: float, kv_blocks: int) -> None:
    sent = traffic(per_s)
    cluster = in_the_virtual_cluster(sent, workers, kv_blocks)
    outcome = Simulator(profile(kv_blocks), workers, sent).run()
    whole = np.array([1000 * cluster.ttft_s[str(number)] for number in range(len(sent))])
    fast = outcome.ttft_ms
    assert not np.isnan(fast).any()
    for share in (0.5, 0.9, 0.99):
        assert np.quantile(fast, share) == pytest.approx(np.quantile(whole, share), rel=0.03)
    assert fmean(fast) == pytest.approx(fmean(whole), rel=0.03)
    order = [int(name) for name in cluster.ttft_s]
    mine = np.argsort(outcome.at_s + fast / 1000, kind="stable").tolist()
    assert sum(a == b for a, b in zip(order, mine, strict=True)) >= 0.95 * len(order)
