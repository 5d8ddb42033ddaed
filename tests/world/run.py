"""Runs one seed: faults, then healing, then the audit; and describes a failure."""

from collections import Counter
from dataclasses import dataclass
from dataclasses import field as field

from proto.messages import CacheEvents, Message, Step, StepDone, Tokens
from proto.progress import DecodeProgress
from proto.sampling import Sampling
from tests.world.faults.audit import audit, check_blocks, unsettled
from tests.world.faults.cluster import FaultCluster
from tests.world.faults.oracles import stream_of
from tests.world.faults.plan import FAULTS, Asked, FaultPlan, draw
from tests.world.world import SimulationViolation

HEAL_S_MAX = 100.0
"""Virtual seconds within which everything must have ended. The longest wait in the product is 30 s."""
PROBE_AFTER_S = 3.0
TIMELINE_EVENTS = 60
CHECK_S = 0.25


@dataclass
class SeedResult:
    seed: int
    digest: str
    events: int
    virtual_s: float
    tokens: int
    outcomes: Counter[str]
    injected: Counter[str]
    failure: BaseException | None = None
    cluster: FaultCluster | None = field(default=None, repr=False)
    """Kept for the story of a failed run, or where a story was asked for."""


def run_seed(seed: int, kinds: frozenset[str] = frozenset(FAULTS), keep: bool = False) -> SeedResult:
    plan = draw(seed, kinds)
    cluster: FaultCluster | None = None
    failure: BaseException | None = None
    try:
        cluster = FaultCluster(plan)
        _live(cluster, plan)
    except Exception as error:
        failure = error
    assert cluster is not None
    return SeedResult(
        seed,
        cluster.digest,
        len(cluster.events),
        cluster.now,
        cluster.oracles.delivered_tokens,
        Counter(stream.outcome or "unfinished" for stream in cluster.oracles.streams.values()),
        cluster.injected,
        failure,
        cluster if keep or failure is not None else None,
    )


def _live(cluster: FaultCluster, plan: FaultPlan) -> None:
    while cluster.step(plan.fault_s):
        pass
    check_blocks(cluster)
    cluster.heal()
    _probe(cluster, plan)
    look_at = until = plan.fault_s + PROBE_AFTER_S + 0.1
    until = plan.fault_s + HEAL_S_MAX
    while look_at < until:
        while cluster.step(look_at):
            pass
        look_at += CHECK_S
        if not unsettled(cluster):
            audit(cluster)
            return
    left = unsettled(cluster)
    concerned = next((s for s, stream in cluster.oracles.streams.items() if s in left and not stream.outcome), "")
    raise SimulationViolation("every request finishes", f"{HEAL_S_MAX:g} s after the last fault, {left}", concerned)


def _probe(cluster: FaultCluster, plan: FaultPlan) -> None:
    """Checks that a new request at each gateway succeeds after all has healed."""
    for number in range(plan.gateways):
        asked = Asked(
            f"probe{number}",
            0.0,
            number,
            "lab",
            "",
            tuple(range(1, 10)),
            Sampling(max_tokens=5, seed=number),
            1,
            -1,
            None,
        )
        cluster.after(PROBE_AFTER_S, cluster.ask, asked)


# --- telling ------------------------------------------------------------------------------------------------------------


def timeline(cluster: FaultCluster, request_id: str = "", most: int = TIMELINE_EVENTS) -> list[str]:
    """Returns the last events that concern a request, or all events if none is named; one to a line."""
    told = [
        f"{at:9.4f} s  {where:<12} {what} {_words(about)}".rstrip()
        for at, where, what, about in cluster.events
        if not request_id or _concerns(about, request_id) or what in ("fault", "starts", "healing", "resumes")
    ]
    return told[-most:]


def _concerns(about: Message | str, request_id: str) -> bool:
    match about:
        case str():
            return request_id in about.replace("/", " ").replace(".", " ").split()
        case Tokens():
            return any(stream_of(item.request_id) == request_id for item in about.items)
        case Step(_, chunks) | StepDone(_, chunks):
            return any(stream_of(chunk.request_id) == request_id for chunk in chunks)
        case CacheEvents() | DecodeProgress():
            return False
    return stream_of(str(getattr(about, "request_id", ""))) == request_id


def _words(about: Message | str) -> str:
    if isinstance(about, str):
        return about
    match about:
        case Tokens(items):
            parts = [
                f"{i.request_id}/{i.attempt}.{i.choice}[{i.index}]={list(i.tokens)}{i.finish or ''}" for i in items
            ]
            return "Tokens " + ", ".join(parts)
        case Step(step_id, chunks) | StepDone(step_id, chunks):
            parts = [f"{c.request_id}/{c.attempt}[{c.start}:{c.start + c.length}]" for c in chunks]
            return f"{type(about).__name__} {step_id}: " + ", ".join(parts)
    fields = {name: getattr(about, name) for name in about.__struct_fields__}
    shown = [f"{fields['request_id']}/{fields['attempt']}"] if "attempt" in fields else []
    for name in (
        "reason",
        "message",
        "held",
        "output_tokens",
        "resumed_tokens",
        "kv_blocks",
        "cached_tokens",
        "segment",
    ):
        if fields.get(name):
            shown.append(f"{name}={fields[name]}")
    return f"{type(about).__name__} {' '.join(map(str, shown))}".strip()
