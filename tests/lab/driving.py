"""The autopilot on the virtual cluster: traffic whose nature changes, and what fixed ratios and one that is always right make
of it.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

from coordinator.events import Limits
from coordinator.reporting import status
from lab.accuracy import Accuracy
from lab.advise import Slo
from lab.autopilot import Autopilot, AutopilotRules, Decision, observation_of, ratio_of
from lab.cluster.surroundings import ClientRequest, Timing
from lab.profile import Profile
from proto.messages import Role
from runtime.tenancy.priority_classes import PriorityClass
from scheduler.lifecycle import RequestState
from tests.uniform_cluster import UniformCluster

EVERY_S = 2.0
OUTPUT_TOKENS_MAX = 1_000  # that a client asks for: it says nothing of how long its answer will be
HAND_OVER_MS = 2_000.0


@dataclass(frozen=True)
class Phase:
    seconds: float
    per_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Modelled(Timing):
    """Steps take what the profile says."""

    profile: Profile | None = None

    def prefill_s(self, tokens: int) -> float:
        assert self.profile is not None
        return self.profile.prefill.curve(tokens) / 1000

    def decode_s(self, streams: int) -> float:
        assert self.profile is not None
        return self.profile.decode.curve(streams) / 1000


@dataclass
class Outcome:
    goodput: int = 0  # requests that kept both limits
    asked: int = 0
    by_phase: list[int] = field(default_factory=list)
    flips: list[tuple[float, int]] = field(default_factory=list)  # when, and in which direction: 1 towards prefill
    decisions: list[Decision] = field(default_factory=list)
    ratios: list[tuple[float, str]] = field(default_factory=list)

    def reversals(self, since_s: float, until_s: float) -> int:
        directions = [way for at, way in self.flips if since_s <= at < until_s]
        return sum(a != b for a, b in pairwise(directions))


def arrivals(phases: Sequence[Phase], seed: int) -> list[tuple[float, int, Phase]]:
    """(when, number of the phase, phase), Poisson within each."""
    source, begin, found = random.Random(seed), 0.0, list[tuple[float, int, Phase]]()
    for number, phase in enumerate(phases):
        at = begin + source.expovariate(phase.per_s)
        while at < begin + phase.seconds:
            found.append((at, number, phase))
            at += source.expovariate(phase.per_s)
        begin += phase.seconds
    return found


def drive(
    phases: Sequence[Phase], profile: Profile, slo: Slo, prefill: int, decode: int, *, seed: int = 1,
    rules: AutopilotRules | None = None, log: Callable[[str], None] = lambda line: None,
    accuracy: Accuracy | None = None,
) -> Outcome:  # fmt: skip
    """With `rules` the autopilot drives; else the ratio is fixed. Steps take what `profile` says."""
    cluster = UniformCluster(
        Limits(
            step_tokens=profile.step_tokens,
            queue_requests_max=100_000,
            queue_tokens_max=1 << 40,
            priority_classes={"standard": PriorityClass()},  # nothing is refused for its target
        ),
        Modelled(hand_over_s=(0.002, 0.004), report_s=0.001, profile=profile),
        prefill=prefill, decode=decode, prefill_blocks=profile.prefill_capacity.kv_blocks,
        decode_blocks=profile.decode_capacity.kv_blocks, block_size=profile.decode_capacity.block_size,
        max_seqs=profile.decode_capacity.seqs_max, batched=True, seed=seed,
    )  # fmt: skip
    found, source, phase_of = Outcome(by_phase=[0] * len(phases)), random.Random(seed), dict[str, int]()

    def ended(request: ClientRequest) -> None:
        name = request.submit.request_id
        if request.state is not RequestState.FINISHED:
            return
        ttft_s, tokens = cluster.ttft_s[name], request.output_tokens[0]
        tpot_ms = 1000 * (cluster.now - request.submitted_s - ttft_s) / max(tokens - 1, 1)
        if 1000 * ttft_s <= slo.ttft_ms and tpot_ms <= slo.tpot_ms:
            found.goodput += 1
            found.by_phase[phase_of[name]] += 1

    cluster.on_end = ended
    for at, number, phase in arrivals(phases, seed):
        name = f"r{found.asked}"
        found.asked, phase_of[name] = found.asked + 1, number
        prompt_tokens = max(1, round(phase.prompt_tokens * source.uniform(0.5, 1.5)))
        output_tokens = max(2, round(phase.output_tokens * source.uniform(0.5, 1.5)))
        ask = partial(cluster.submit, output_tokens=(output_tokens,))
        cluster.at(at, ask, name, "tenant", prompt_tokens, OUTPUT_TOKENS_MAX)
    if rules is not None:
        pilot = Autopilot(profile, rules)
        cluster.at(EVERY_S, _look, cluster, pilot, found, log)
    if accuracy is not None:
        cluster.at(EVERY_S, _compare, cluster, accuracy)
    cluster.run(sum(phase.seconds for phase in phases) + 120.0)
    return found


def _look(cluster: UniformCluster, pilot: Autopilot, found: Outcome, log: Callable[[str], None]) -> None:
    cluster.core.state.now = cluster.now
    report = status.status(cluster.core.state)
    decision = pilot.decide(observation_of(report, "m"), cluster.now)
    found.decisions.append(decision)
    if not found.ratios or found.ratios[-1][1] != str(decision.present):
        found.ratios.append((cluster.now, str(decision.present)))
    if decision.workers:
        log(f"{cluster.now:7.1f} s: {' '.join(decision.workers)} to {decision.role}: {decision.reason}")
    for worker in decision.workers:
        found.flips.append((cluster.now, 1 if decision.role is Role.PREFILL else -1))
        hand_over_ms = HAND_OVER_MS if decision.role is Role.PREFILL else 0.0
        cluster.flip(worker, decision.role, hand_over_ms, decision.reason[:500])
    cluster.at(cluster.now + EVERY_S, _look, cluster, pilot, found, log)


def _compare(cluster: UniformCluster, accuracy: Accuracy) -> None:
    cluster.core.state.now = cluster.now
    report = status.status(cluster.core.state)
    seen = observation_of(report, "m")
    accuracy.look(None if seen.is_changing else ratio_of(seen), report.traffic[0], cluster.now)
    cluster.at(cluster.now + EVERY_S, _compare, cluster, accuracy)
