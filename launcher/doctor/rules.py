"""The rules of `crossdock doctor`. Each looks at a snapshot and yields what is wrong, if anything. Pure.

A rule reports a fault only if its figures are far from those of a healthy cluster, since a false alarm costs an operator more
than a second look. Its thresholds are constants beside it.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any, Final, Literal

import msgspec

from launcher.doctor.causes import CAUSES
from launcher.doctor.snapshot import ProcessMetrics, Snapshot
from proto.status import TrafficStatus

Confidence = Literal["certain", "likely", "possible"]
CORE: Final = "crossdock_coordinator_"
_ORDER: Final = ("certain", "likely", "possible")


class Finding(msgspec.Struct, frozen=True):
    cause: str
    where: str
    confidence: Confidence
    evidence: tuple[str, ...]

    @property
    def what(self) -> str:
        return CAUSES[self.cause][0].format(where=self.where)

    @property
    def change(self) -> str:
        return CAUSES[self.cause][1].format(where=self.where)

    def as_dict(self) -> dict[str, Any]:
        return msgspec.structs.asdict(self) | {"what": self.what, "change": self.change}


Findings = Iterator[Finding]


def diagnose(seen: Snapshot) -> list[Finding]:
    """Returns what is wrong, the most certain first."""
    found = [finding for rule in RULES for finding in rule(seen)]
    return sorted(found, key=lambda one: _ORDER.index(one.confidence))


# --- workers ----------------------------------------------------------------------------------------------------------

SLOW_TIMES: Final = 2.0  # a worker is slow if its steps take so many times as long as those of its peers
SLOW_QUANTILE: Final = 0.8  # a worker that is stopped again and again has quick steps between
STEPS_MIN: Final = 10


def slow_worker(seen: Snapshot) -> Findings:
    models = {worker.process or worker.name: worker.model for worker in seen.report.workers}
    for role, size in (("prefill", "tokens"), ("decode", "sequences")):
        times, sizes = f"crossdock_{role}_step_seconds", f"crossdock_{role}_step_{size}"
        busy = [one for one in seen.of_role(role) if one.grew(f"{times}_count") >= STEPS_MIN]
        for worker in busy:
            peers = [one for one in busy if one is not worker and models.get(one.name) == models.get(worker.name)]
            if not peers:
                continue
            mean_s, usual_s = worker.mean(times), median(one.mean(times) for one in peers)
            own_size, usual_size = worker.mean(sizes), median(one.mean(sizes) for one in peers)
            larger = (
                max(own_size / usual_size, 1.0) if usual_size else 1.0
            )  # a step takes at most so many times as long
            # A quantile resists one long step, and the mean the width of buckets: both must say it.
            usual_bucket_s = median(one.quantile(times, SLOW_QUANTILE)[1] for one in peers)
            is_slow = mean_s >= SLOW_TIMES * larger * usual_s
            if is_slow and worker.quantile(times, SLOW_QUANTILE)[0] >= usual_bucket_s:
                took = f"its steps take {1000 * mean_s:.1f} ms, those of others {1000 * usual_s:.1f} ms"
                had = f"its steps have {own_size:.1f} {size}, those of others {usual_size:.1f}"
                yield Finding("slow_worker", worker.name, "likely", (took, had))


STEPS_FAILED_MIN: Final = 2


def failing_worker(seen: Snapshot) -> Findings:
    failures = seen.coordinator.grew_by(CORE + "work_failed_total", "reason")
    failed = tuple(f"{count:.0f} attempts failed: {reason}" for reason, count in failures.items() if count)
    left_out = {words.partition(":")[0]: words for words in seen.report.circuit_open if " → " not in words}
    for name, words in left_out.items():
        yield Finding("failing_worker", name, "certain", (words, *failed))
    for one in seen.processes:
        steps = sum(one.grew(f"crossdock_{role}_steps_failed_total") for role in ("prefill", "decode"))
        if steps >= STEPS_FAILED_MIN and one.name not in left_out:
            yield Finding("failing_worker", one.name, "likely", (f"{steps:.0f} of its steps failed", *failed))
    for words in seen.restarts:
        yield Finding("restarting_process", words.partition(":")[0], "certain", (words,))
    missing = [role for role in ("prefill", "decode") if all(worker.role != role for worker in seen.report.workers)]
    if missing:
        yield Finding("no_worker", " or ".join(missing), "certain", (f"{seen.report.queued:,} requests wait",))


PAIR_FAILURES_MIN: Final = 2
PAIR_FAILURES_SHARE: Final = 0.2  # of the hand-overs that began


def broken_pair(seen: Snapshot) -> Findings:
    """Where one pair of many breaks, most of a worker's hand-overs may go well with others: both ends are looked at."""
    said = [words for words in seen.report.circuit_open if " → " in words]
    for words in said:
        yield Finding("broken_pair", words.partition(":")[0], "certain", (words,))
    ends, evidence = {"sent": "others", "received": "others"}, list[str]()
    for one in seen.processes if not said else ():
        for direction in ends:
            broke, failed, began = (
                one.grew(f"crossdock_kv_{what}_total", direction=direction)
                for what in ("pairs_broken", "transfers_failed", "transfers")
            )
            if broke and failed >= max(PAIR_FAILURES_MIN, PAIR_FAILURES_SHARE * began):
                ends[direction] = one.name
                evidence.append(
                    f"{one.name}: {broke:.0f} connections broke, {failed:.0f} of {began:.0f} hand-overs failed"
                )
    if evidence:
        yield Finding("broken_pair", f"{ends['sent']} → {ends['received']}", "likely", tuple(evidence))


# --- room and ratio ---------------------------------------------------------------------------------------------------

STEPS_HELD_UP: Final = 0.2  # share of prefill steps with tokens left, for one reason
KV_USED: Final = 0.9  # share of the blocks of each decode worker; the coordinator keeps a sixteenth free


def full_kv(seen: Snapshot) -> Findings:
    core, queued = seen.coordinator, seen.report.queued
    stopped = core.now(CORE + "decode_batches", limit="no_decode_kv")
    preempted = core.grew(CORE + "interruptions_total", reason="preempted")
    ends = core.grew_by(CORE + "prefill_steps_total", "limit")
    held_up = {role: ends.get(end, 0.0) / max(sum(ends.values()), 1.0) for role, end in _NO_ROOM.items()}
    used = [one.kv_blocks_used / one.kv_blocks for one in seen.report.workers if one.role == "decode" and one.kv_blocks]
    is_full = bool(used) and min(used) >= KV_USED
    if queued and (stopped or preempted or is_full or held_up["decode"] >= STEPS_HELD_UP):
        full = f"{stopped:.0f} decode workers take no more requests for want of KV blocks; {queued:,} requests wait"
        evidence = (full, f"{preempted:.0f} streams were interrupted to make room", _fullest(seen, "decode"))
        yield Finding("full_kv", "decode", "certain" if stopped else "likely", evidence)
    elif queued and held_up["prefill"] >= STEPS_HELD_UP:
        share = f"{held_up['prefill']:.0%} of prefill steps had tokens left for want of KV blocks"
        yield Finding("full_kv", "prefill", "likely", (share, _fullest(seen, "prefill")))


_NO_ROOM: Final = {"decode": "no_decode_kv", "prefill": "no_room_in_prefill"}


def _fullest(seen: Snapshot, role: str) -> str:
    workers = [one for one in seen.report.workers if one.role == role and one.kv_blocks]
    one = max(workers, key=lambda one: one.kv_blocks_used / one.kv_blocks, default=None)
    return f"{one.name} has {one.kv_blocks_used:,} of {one.kv_blocks:,} blocks in use" if one is not None else ""


BUSY: Final = 0.75  # share of the time in which a role computes
IDLE: Final = 0.4
_DECODE_FULL: Final = ("full", "no_decode_sequences", "no_decode_kv", "tpot_target")


def wrong_ratio(seen: Snapshot) -> Findings:
    for pilot in seen.report.autopilots:
        if pilot.wanted != pilot.present:
            what = f"{pilot.wanted} instead of {pilot.present}"
            yield Finding("wrong_ratio", what, "likely", (f"autopilot of {pilot.model}: {pilot.reason}",))
    roles = {role: seen.of_role(role) for role in ("prefill", "decode")}
    if seen.report.autopilots or not seen.report.queued or not all(roles.values()):
        return
    busy = {}
    for role, workers in roles.items():
        computed_s = sum(one.grew(f"crossdock_{role}_step_seconds_sum") for one in workers)
        busy[role] = computed_s / len(workers) / seen.seconds
    full = [seen.coordinator.now(CORE + "decode_batches", limit=limit) for limit in _DECODE_FULL]
    is_full = sum(full) >= len(roles["decode"])
    evidence = [f"{len(roles[role])} {role} workers compute {busy[role]:.0%} of the time" for role in roles]
    evidence.append(f"{seen.report.queued:,} requests wait")
    if busy["prefill"] >= BUSY and busy["decode"] <= IDLE and not is_full and len(roles["decode"]) > 1:
        yield Finding("wrong_ratio", "too few prefill workers", "likely", tuple(evidence))
    elif busy["prefill"] <= IDLE and is_full and len(roles["prefill"]) > 1:
        yield Finding("wrong_ratio", "too few decode workers", "likely", tuple(evidence))


CACHED_SHARE_MIN: Final = 0.2  # of prompt tokens, before
PROMPT_TOKENS_MIN: Final = 1_000
YOUNG_S: Final = 600.0
BEFORE_S: Final = 60.0
LEASES_MIN: Final = 3


def lost_sessions(seen: Snapshot) -> Findings:
    if any(cold_cache(seen)):
        return  # which explains it
    broken, found = (seen.coordinator.grew(CORE + "leases_total", outcome=kind) for kind in ("broken", "found"))
    if broken >= LEASES_MIN and broken > found:
        turns = f"{broken:.0f} later turns of sessions found no KV, {found:.0f} did"
        yield Finding("lost_sessions", "", "likely", (turns,))


def cold_cache(seen: Snapshot) -> Findings:
    """The cached share of prompts fell when workers started."""
    models = {worker.process or worker.name: worker.model for worker in seen.report.workers}
    workers = [*seen.of_role("prefill"), *seen.of_role("decode")]
    ages = {one.name: seen.unix_s + one.clock_ahead_s - one.now("process_start_time_seconds") for one in workers}
    for traffic in seen.report.traffic:
        young = [name for name, age_s in ages.items() if age_s < YOUNG_S and models.get(name) == traffic.model]
        if not young:
            continue
        newest_s, oldest_s = min(ages[name] for name in young), max(ages[name] for name in young)
        tokens, cached = _prompt_tokens(traffic, 0.0, newest_s)
        earlier, was_cached = _prompt_tokens(traffic, oldest_s, oldest_s + BEFORE_S)
        if min(tokens, earlier) < PROMPT_TOKENS_MIN or was_cached < CACHED_SHARE_MIN * earlier:
            continue
        if cached / tokens <= was_cached / earlier / 2:
            shares = f"{cached / tokens:.0%} of prompt tokens are cached, {was_cached / earlier:.0%} before"
            started = [f"{name} was started {ages[name]:.0f} s ago" for name in young]
            yield Finding("cold_cache", ", ".join(young), "likely", (shares, *started))


def _prompt_tokens(traffic: TrafficStatus, from_s: float, to_s: float) -> tuple[int, int]:
    """Returns the prompt tokens of requests that came so long ago, and how many of them were cached."""
    sampled = zip(traffic.ages_ms, traffic.stands_for, traffic.prompt_tokens, traffic.cached_tokens, strict=True)
    found = [(count * prompt, count * cached) for ms, count, prompt, cached in sampled if from_s <= ms / 1000 < to_s]
    return sum(prompt for prompt, _ in found), sum(cached for _, cached in found)


# --- tenants ----------------------------------------------------------------------------------------------------------

WAITING_MIN: Final = 8
HOT_SHARE: Final = 0.6  # of all waiting requests
OTHERS_SHARE: Final = 0.1  # of the service: a tenant with less, and nothing that waits, has nothing to lose


def hot_tenant(seen: Snapshot) -> Findings:
    tenants = seen.report.tenants
    waiting = sum(one.waiting for one in tenants)
    hot = max(tenants, key=lambda one: one.waiting, default=None)
    others = [one for one in tenants if one is not hot and (one.waiting or one.share >= OTHERS_SHARE)]
    if hot is not None and others and hot.waiting >= max(HOT_SHARE * waiting, WAITING_MIN):
        own = f"{hot.waiting:,} of {waiting:,} waiting requests are its own"
        yield Finding("hot_tenant", hot.name, "likely", (own, f"it gets {hot.share:.0%} of the service"))


REFUSED_MIN: Final = 3
ROOM_LEFT: Final = 0.3  # share of decode's KV blocks: with less, refusals protect the cluster


def small_quota(seen: Snapshot) -> Findings:
    decode = [one for one in seen.report.workers if one.role == "decode"]
    free = sum(one.kv_blocks - one.kv_blocks_used for one in decode) / max(sum(one.kv_blocks for one in decode), 1)
    if seen.report.queued or free < ROOM_LEFT:
        return
    for one in seen.coordinator.readings(CORE + "tenant_over_quota_total"):
        if one.grew >= REFUSED_MIN:
            refused = f"{one.grew:.0f} requests refused for {one.labels['limit']} in {seen.seconds:.0f} s"
            room = f"nothing waits, and {free:.0%} of the KV blocks are free"
            yield Finding("small_quota", one.labels["tenant"], "likely", (refused, room))


def impossible_target(seen: Snapshot) -> Findings:
    """A target for the time per output token is impossible if a step with one sequence takes longer."""
    steps, floors_ms = "crossdock_decode_step_seconds", []
    for worker in seen.processes:
        if worker.grew(f"{steps}_count") >= STEPS_MIN:
            is_alone = worker.mean("crossdock_decode_step_sequences") <= 1.5
            alone_s = worker.mean(steps) if is_alone else 0.0
            floors_ms.append(1000 * max(worker.quantile(steps, 0.05)[0], alone_s))
    for one in seen.report.classes:
        if one.tpot_ms and floors_ms and min(floors_ms) > one.tpot_ms:
            took = f"even small decode steps take {min(floors_ms):.1f} ms; the target is {one.tpot_ms:g} ms"
            kept = f"{one.kept:,} of {one.finished:,} finished requests kept the targets"
            yield Finding("impossible_target", one.name, "certain", (took, kept))


# --- machines ---------------------------------------------------------------------------------------------------------

SKEW_S: Final = 2.0  # clocks are read to the second
THROTTLED_SHARE: Final = 0.05
DESCRIPTORS_MIN: Final = 4096
DESCRIPTORS_USED: Final = 0.8


def clock_skew(seen: Snapshot) -> Findings:
    hosts = {worker.process or worker.name: worker.host for worker in seen.report.workers}
    by_host: dict[str, list[ProcessMetrics]] = defaultdict(list)
    for one in seen.processes:
        if abs(one.clock_ahead_s) >= SKEW_S:
            by_host[hosts.get(one.name) or one.name].append(one)
    for host, ones in by_host.items():
        evidence = tuple(f"{one.name} is {one.clock_ahead_s:+.0f} s ahead of this machine" for one in ones)
        yield Finding("clock_skew", host, "certain", evidence)


def few_descriptors(seen: Snapshot) -> Findings:
    for one in seen.processes:
        most, used = one.now("process_max_fds"), one.now("process_open_fds")
        refused = one.grew("crossdock_kv_pairs_refused_total")
        is_short = refused > 0 or used >= DESCRIPTORS_USED * most
        if most and (is_short or most < DESCRIPTORS_MIN):
            evidence = (f"{used:.0f} of {most:.0f} are open", f"{refused:.0f} connections for KV were not made")
            yield Finding("few_descriptors", one.name, "certain" if is_short else "possible", evidence)


def throttled_cpu(seen: Snapshot) -> Findings:
    found = [one for one in seen.processes if one.throttled_share >= THROTTLED_SHARE]
    if found:
        evidence = tuple(f"{one.name} was stopped in {one.throttled_share:.0%} of periods" for one in found)
        yield Finding("throttled_cpu", ", ".join(one.name for one in found), "certain", evidence)


RULES: Final[tuple[Callable[[Snapshot], Findings], ...]] = (
    failing_worker,
    broken_pair,
    throttled_cpu,
    few_descriptors,
    clock_skew,
    slow_worker,
    full_kv,
    wrong_ratio,
    lost_sessions,
    cold_cache,
    hot_tenant,
    small_quota,
    impossible_target,
)
