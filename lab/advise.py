"""The effect of another ratio of workers on present traffic, in milliseconds: for the autopilot, every few seconds. Pure.

    model = QueueingModel(profile, Traffic(12.0, prompts, outputs), Slo(500, 50))
    model.estimate(Workers(3, 5)).goodput, model.wanted()

Queueing formulas stand in for the simulator. Prompts wait as in an M/G/c queue (Allen and Cunneen's approximation of the mean,
an exponential tail); a decode batch is a fixed point of arrivals, answer lengths and step time, with a normal spread; a mixed
worker shares its time between both. Requests that do not fit add to a queue over the horizon, which begins with those that
wait already. The figures are good enough to compare neighbouring ratios; `search` has the simulator for the rest.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import erf, sqrt
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from lab.profile import Profile

Floats = npt.NDArray[np.float64]
SAMPLES_MAX: Final = 256
WANTED_MAX: Final = 1024
_BUSY_MAX: Final = 0.98  # for stationary formulas; load above it goes into the growing queue


@dataclass(frozen=True)
class Traffic:
    """The traffic of the last minutes."""

    requests_per_s: float
    prompt_tokens: Sequence[int]  # a sample, thinned out evenly beyond `SAMPLES_MAX`
    output_tokens: Sequence[int]  # of each prompt, as it was or is expected
    hit_rate: float = 0.0  # of prompt tokens, on prefill workers
    arrival_cv: float = 1.0  # coefficient of variation of gaps: 1 is Poisson
    waiting_tokens: int = 0  # of prompts that wait already


class Workers(NamedTuple):
    prefill: int
    decode: int
    mixed: int = 0

    @property
    def total(self) -> int:
        return self.prefill + self.decode + self.mixed

    def __str__(self) -> str:
        parts = [f"{self.prefill}P{self.decode}D"] if self.prefill or self.decode else []
        return "+".join(parts + ([f"{self.mixed}M"] if self.mixed else []))


@dataclass(frozen=True)
class Slo:
    ttft_ms: float
    tpot_ms: float
    percentile: float = 0.9  # of requests that should keep both


@dataclass(frozen=True)
class Estimate:
    workers: Workers
    attainment: float
    goodput: float
    prefill_load: float  # 1 is all that the workers can compute
    decode_load: float
    ttft_attainment: float
    tpot_attainment: float


class _Decode(NamedTuple):
    sequences: float
    step_ms: float
    load: float


class QueueingModel:
    """Traffic and SLO against any number of workers."""

    def __init__(self, profile: Profile, traffic: Traffic, slo: Slo, horizon_s: float = 60.0) -> None:
        assert len(traffic.prompt_tokens) == len(traffic.output_tokens) and horizon_s > 0
        self.profile, self.slo, self.horizon_ms = profile, slo, 1000 * horizon_s
        self.per_ms = max(traffic.requests_per_s, 0.0) / 1000
        self._cv2 = traffic.arrival_cv**2
        every = max(1, -(-len(traffic.prompt_tokens) // SAMPLES_MAX))
        prompts = np.asarray(traffic.prompt_tokens[::every] or (1,), dtype=float)
        self.outputs: Floats = np.maximum(np.asarray(traffic.output_tokens[::every] or (1,), dtype=float), 1.0)
        cached = [int(traffic.hit_rate * count) for count in prompts]
        chunk, host = profile.step_tokens, profile.host
        self.chunks: Floats = np.ceil((prompts - cached) / chunk)
        self.prefill_ms: Floats = host.step_gap_ms * self.chunks + [
            profile.prefill.prompt_ms(int(count), hit, chunk) for count, hit in zip(prompts, cached, strict=True)
        ]
        self.host_ms: Floats = host.request_ms + host.request_token_ms * prompts
        last = np.minimum(prompts - cached, chunk)
        self.join_ms: Floats = np.array([profile.transfer.ms(count) for count in last]) + host.join_ms
        self.steps: Floats = np.maximum(self.outputs - 1.0, 0.0)
        share = self.steps / max(self.steps.sum(), 1.0)
        self.context = float((share * (prompts + self.outputs / 2)).sum())
        self.tokens = float((prompts + self.outputs).mean())
        rate = float(prompts.sum()) / max(float(self.prefill_ms.sum()), 1e-9)
        self.waiting_ms = traffic.waiting_tokens / rate
        self.slope_ms = profile.decode.kv_token_ms * self.context

    # --- workers --------------------------------------------------------------------------------------------------------

    def estimate(self, workers: Workers) -> Estimate:
        if not workers.mixed:
            return self._judged(workers, *self._apart(workers.prefill, workers.decode, 1.0))
        if not workers.prefill or not workers.decode:
            return self._judged(workers, *self._together(workers.mixed, 1.0))
        return max((self._split(workers, share / 8) for share in range(9)), key=lambda one: one.goodput)

    def _split(self, workers: Workers, share: float) -> Estimate:
        """Returns the estimate if `share` of the requests goes to mixed workers."""
        apart, mixed = self._apart(workers.prefill, workers.decode, 1 - share), self._together(workers.mixed, share)
        ttft = (1 - share) * apart[0] + share * mixed[0]
        tpot = (1 - share) * apart[1] + share * mixed[1]
        busier = max(apart, mixed, key=lambda side: max(side[2], side[3].load))
        return self._judged(workers, ttft, tpot, busier[2], busier[3])

    def _apart(self, prefill: int, decode: int, share: float) -> tuple[Floats, Floats, float, _Decode]:
        cores = self.profile.prefill_cores, self.profile.decode_cores
        servers = min(prefill, cores[0] or prefill)
        batch = self._batch(decode, share, 0.0, max(1.0, decode / (cores[1] or decode or 1)))
        load = share * self.per_ms * float(self.prefill_ms.mean()) / max(servers, 1e-9)
        ttft = self._ttft(servers, self.prefill_ms, load, batch.load, self.profile.host.step_gap_ms)
        return ttft, self._tpot(batch, 0.0), load, batch

    def _together(self, mixed: int, share: float) -> tuple[Floats, Floats, float, _Decode]:
        load = share * self.per_ms * float(self.prefill_ms.mean()) / mixed
        batch = self._batch(mixed, share, min(load, _BUSY_MAX))
        # The first chunk of a prompt arrives in the middle of a decode step on average, so it waits for half a step.
        early_ms = self.profile.host.step_gap_ms + batch.step_ms / 2
        ttft = self._ttft(mixed, self.prefill_ms + self.chunks * batch.step_ms, load, batch.load, early_ms)
        work = share * self.per_ms / mixed * float((self.prefill_ms**2).mean())
        return ttft, self._tpot(batch, min(load, _BUSY_MAX), work), load, batch

    def _judged(self, workers: Workers, ttft: Floats, tpot: Floats, load: float, batch: _Decode) -> Estimate:
        attainment, first, each = float((ttft * tpot).mean()), float(ttft.mean()), float(tpot.mean())
        goodput = 1000 * self.per_ms * attainment
        return Estimate(workers, attainment, goodput, load, batch.load, first, each)

    def wanted(self) -> Workers:
        """Returns the least number of each role at which so many requests keep that role's limit that both roles together keep
        the SLO."""
        target = sqrt(self.slo.percentile)
        found = []
        for role in (0, 1):
            low, high = 1, WANTED_MAX
            while low < high:
                middle = (low + high) // 2
                count = (middle, WANTED_MAX) if role == 0 else (WANTED_MAX, middle)
                one = self._judged(Workers(*count), *self._apart(*count, 1.0))
                kept = one.ttft_attainment if role == 0 else min(one.tpot_attainment, one.ttft_attainment)
                low, high = (low, middle) if kept >= target else (middle + 1, high)
            found.append(low)
        return Workers(*found)

    # --- phases ---------------------------------------------------------------------------------------------------------

    def _ttft(self, servers: int, service_ms: Floats, load: float, other_load: float, early_ms: float) -> Floats:
        """Returns the probability, for each request, that its first token keeps its limit. The token comes `early_ms` before
        the worker is free again."""
        slack = self.slo.ttft_ms - (service_ms - early_ms) - self.host_ms
        if not servers:
            return np.zeros_like(slack)
        busy = min(load, _BUSY_MAX)
        mean = float(service_ms.mean())
        spread = (self._cv2 + float(service_ms.var()) / max(mean**2, 1e-9)) / 2
        waits = erlang_c(servers, busy)
        tail_ms = max(mean * spread / (servers * (1 - busy)), 1e-6)
        kept = np.where(slack > 0, 1 - waits * np.exp(-np.maximum(slack, 0.0) / tail_ms), 0.0)
        return np.asarray(kept * self._in_time(slack, max(load, other_load), servers))

    def _in_time(self, slack: Floats, load: float, servers: int) -> Floats:
        """Returns, for each request, the share of the horizon in which the growing or draining queue is short enough for
        it."""
        begin, drift = self.waiting_ms / servers, load - 1
        room = np.maximum(slack, 0.0)
        if abs(drift) < 1e-6:
            return np.asarray(np.where(begin <= room, 1.0, 0.0))
        if drift > 0:
            return np.asarray(np.clip((room - begin) / drift / self.horizon_ms, 0.0, 1.0))
        return np.asarray(np.clip(1 - (begin - room) / -drift / self.horizon_ms, 0.0, 1.0))

    def _batch(self, workers: int, share: float, away: float, slow: float = 1.0) -> _Decode:
        """Sequences in each worker's batch. `away`: share of its time that it spends on prompts."""
        capacity = self.profile.decode_capacity
        most = min(capacity.seqs_max, capacity.kv_blocks * capacity.block_size / self.tokens)
        per_ms = share * self.per_ms * float(self.steps.mean()) / max(workers, 1e-9) / (1 - away)

        def flow(count: float) -> float:
            """Returns `count` less the sequences that arrivals would keep running at that step time: below 0 the batch
            grows."""
            return count - per_ms * self._step_ms(count) * slow

        if flow(most) < 0:
            return _Decode(most, self._step_ms(most) * slow, per_ms * self._step_ms(most) * slow / most)
        low, high = 0.0, float(most)
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if flow(middle) < 0 else (low, middle)
        shared = 1 + (slow - 1) * min(1.0, high)
        return _Decode(high, self._step_ms(max(high, 1.0)) * shared, high / most)

    def _step_ms(self, count: float) -> float:
        return self.profile.decode.curve(count) + self.slope_ms * count

    def _tpot(self, batch: _Decode, away: float, work: float = 0.0) -> Floats:
        """Returns the probability, for each request, that its later tokens keep their limit. `work`: the second moment of
        prompts' time that comes to its worker, per ms."""
        steps = np.maximum(self.steps, 1.0)
        mean = batch.step_ms / (1 - away) + (self.join_ms + batch.step_ms / 2) / steps
        slope = self._step_ms(batch.sequences + 1) - self._step_ms(batch.sequences)
        stays_ms = steps * batch.step_ms / (1 - away)
        batch_sd = slope / (1 - away) * sqrt(batch.sequences / 2)
        spread = np.sqrt(batch_sd**2 + work * stays_ms / steps**2 + (0.02 * mean) ** 2)
        kept = np.array([_normal(value) for value in (self.slo.tpot_ms - mean) / spread])
        return np.where(self.steps > 0, kept, 1.0)


def _normal(value: float) -> float:
    return 0.5 * (1 + erf(value / sqrt(2)))


def erlang_c(servers: int, load: float) -> float:
    """Returns the probability that an arrival waits, if each server has the load `load`, which is below 1."""
    offered = servers * load
    blocked = 1.0  # Erlang B, by its recursion
    for count in range(1, servers + 1):
        blocked = offered * blocked / (count + offered * blocked)
    return blocked / (1 - load * (1 - blocked))


def interarrival_cv(times_s: Sequence[float]) -> float:
    """Returns the coefficient of variation of the gaps between these sorted arrivals; 1 where there are too few."""
    gaps = [later - earlier for earlier, later in pairwise(times_s)]
    mean = sum(gaps) / len(gaps) if gaps else 0.0
    if len(gaps) < 8 or mean <= 0:
        return 1.0
    return sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) / mean
