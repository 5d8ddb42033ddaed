"""The plan that one seed stands for: a small cluster, its requests, and the faults with their times. Drawn before anything
runs."""

from dataclasses import dataclass, field, replace
from random import Random
from typing import Final

import msgspec

from coordinator.events import Limits
from gateway.streams.types import StreamLimits
from proto.sampling import Sampling
from scheduler.limits import START_LONG_TOKENS
from tests.world.network import Hostility
from tests.world.toy_model import EOS, VOCAB, expected

FAULTS: Final = {
    "crash": "a process is killed and started again",
    "pause": "a process is stopped and goes on",
    "partition": "two processes cannot reach each other, in one direction or both",
    "cut": "the connections of a process break, with or without a word",
    "slow": "a worker, a process's frames or the ledger's disk are slow",
    "step": "a step of a worker fails, or its logits are not finite",
    "hang": "a step of a worker does not end, or only late",
    "transfer": "segments arrive damaged, pairs break",
    "hostile": "single frames of live connections are lost, doubled or swapped",
    "drain": "a worker is drained, to end or because a person asked for it; the coordinator is stopped in order",
    "flip": "a worker changes its role, cannot, or dies in it",
    "leave": "clients leave early",
    "policy": "another version of the policy is tried, promoted or rolled back",
}
"""The names that `--faults` takes."""

FOR_EVER_S: Final = 1e6

TENANTS: Final = """
[tenants.acme]
weight = 2.0
priority_classes = ["interactive", "standard", "batch"]
priority_class = "standard"
cache_group = "acme"
[tenants.acme.limits]
concurrency = 6
tokens_in_flight = 400
kv_blocks = 90
tokens_per_day = 100_000
[tenants.acme.users.ann]
limits = { concurrency = 3 }
[tenants.acme.users.bob]
[tenants.lab]
[tenants.lab.users.eve]
"""
OTHER_POLICY: Final = TENANTS.replace("weight = 2.0", "weight = 0.5").replace('class = "standard"', 'class = "batch"')
"""The limits are the same, because the oracles check held amounts also when limits become lower."""
LIMITED: Final = frozenset({"acme", "acme/ann", "acme/bob"})
"""Tenants whose requests a quota may turn away."""


@dataclass(frozen=True)
class Asked:
    """One request of a client."""

    stream_id: str
    at_s: float
    gateway: int
    tenant: str
    priority_class: str
    prompt: tuple[int, ...]
    sampling: Sampling
    choices: int
    stop_word: int
    leaves_after_s: float | None
    session: bytes = b""
    """Its client says that this is over, soon after it has asked."""


@dataclass(frozen=True)
class Fault:
    """A fault in the plan. `who` and `other` are names of processes, but for a flip `other` is a role; `how` depends on the
    kind."""

    at_s: float
    kind: str
    who: str
    other: str = ""
    for_s: float = 0.0
    how: str = ""
    grace_s: float = 0.0

    def __str__(self) -> str:
        words = [f"{self.at_s:.3f} s: {self.kind}", self.how, self.who, self.other]
        return " ".join(word for word in words if word) + (f" for {self.for_s:.3f} s" if self.for_s else "")


@dataclass
class FaultPlan:
    seed: int
    prefill: int
    decode: int
    gateways: int
    kv_blocks: dict[str, int]
    """Blocks of each role, as the next."""
    block_size: dict[str, int]
    max_seqs: int
    prefix_cache: bool
    limits: Limits
    stream_limits: StreamLimits
    fault_s: float
    """How long the first phase lasts."""
    context_tokens: int = 256
    asked: list[Asked] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    hostility: Hostility | None = None
    corrupt: float = 0.0
    """Chance that a segment arrives damaged."""
    computes_suffixes: bool = False
    fetches: bool = False
    tier_slots: int = 0
    """Blocks of the second tier of each prefill worker."""
    """Decode workers do, of prompts whose beginnings they have."""

    @property
    def workers(self) -> list[str]:
        return [f"prefill-{i}" for i in range(self.prefill)] + [f"decode-{i}" for i in range(self.decode)]

    @property
    def overcommitted(self) -> bool:
        return self.limits.long_output_tokens < START_LONG_TOKENS

    @property
    def disturbed(self) -> bool:
        return bool(self.faults or self.corrupt or self.hostility is not None)

    @property
    def only_drains(self) -> bool:
        """Whether nothing goes wrong and decode workers have the room that they are asked for. A coordinator that ends while a
        worker changes its role forgets the streams that wait for that worker. Their gateways notice the silence and try again,
        so such plans do not count."""
        in_order = all(
            fault.kind in ("drain", "policy") or (fault.kind == "flip" and fault.how != "dies") for fault in self.faults
        )
        flips = any(fault.kind == "flip" for fault in self.faults)
        forgotten = flips and any((fault.kind, fault.who) == ("drain", "coordinator") for fault in self.faults)
        calm = not self.corrupt and self.hostility is None and not self.overcommitted
        return calm and in_order and not forgotten

    @property
    def processes(self) -> list[str]:
        return ["coordinator", *(f"gateway-{i}" for i in range(self.gateways)), *self.workers]


def draw(seed: int, kinds: frozenset[str] = frozenset(FAULTS)) -> FaultPlan:
    """Draws the plan of a seed. Fewer kinds of faults change neither the cluster nor its requests."""
    random = Random(seed)
    attempts_max = random.choice((4, 60, 60))
    plan = FaultPlan(
        seed=seed,
        prefill=random.choice((1, 1, 2)),
        decode=random.choice((1, 1, 2)),
        gateways=random.choice((1, 1, 2)),
        kv_blocks={"prefill": random.choice((24, 48)), "decode": random.choice((24, 32, 48))},
        block_size=dict(zip(("prefill", "decode"), random.choice(((4, 4), (4, 4), (4, 8), (8, 4))), strict=True)),
        max_seqs=random.choice((4, 8)),
        prefix_cache=random.random() < 0.7,
        limits=Limits(
            queue_requests_max=random.choice((3, 64)),
            step_tokens=random.choice((8, 16)),
            orphan_s_max=15.0,
            resubmit_s_max=10.0,
        ),
        stream_limits=StreamLimits(attempts_max=attempts_max),
        fault_s=random.uniform(1.0, 3.0),
    )
    requests = random.randint(3, 8)
    beginnings = [tuple(random.randrange(1, VOCAB) for _ in range(12)) for _ in range(2)]
    plan.asked = [_asked(plan, random, number, beginnings, "leave" in kinds) for number in range(requests)]
    plan.limits = replace(plan.limits, retry_floor=random.choice((8, 12, 100)), retry_share=random.choice((0.2, 0.5)))
    more = Random(seed ^ 0x10C6)
    if more.random() < 0.25:  # as after many short answers: decode workers are overcommitted and run out of blocks
        plan.limits = replace(plan.limits, long_output_tokens=2.0)
        plan.kv_blocks["decode"], plan.max_seqs = 24, 8
        plan.asked += [_asked(plan, more, len(plan.asked) + number, beginnings, False) for number in range(6)]
    if plan.prefix_cache and seed % 5:
        _add_session(plan, "leave" in kinds)
    chaos = Random(seed ^ 0x5EED)
    chosen = [
        kind
        for kind in ("crash", "crash", "pause", "partition", "cut", "slow", "step", "hang", "transfer")
        if kind in kinds
    ]
    if chosen:
        plan.faults = [_fault(plan, chaos, chaos.choice(chosen)) for _ in range(chaos.choice((0, 1, 1, 2, 3, 4)))]
        plan.faults.sort(key=lambda fault: fault.at_s)
    if "drain" in kinds:
        plan.faults += _drains(plan, Random(seed ^ 0xD4A1))
        plan.faults.sort(key=lambda fault: fault.at_s)
    if "flip" in kinds:
        plan.faults += _flips(plan, Random(seed ^ 0xF11B))
        plan.faults.sort(key=lambda fault: fault.at_s)
    if "pause" in kinds:
        plan.faults += _stalls(plan, Random(seed ^ 0xAB5E))
        plan.faults.sort(key=lambda fault: fault.at_s)
    if "policy" in kinds:
        plan.faults += _policies(plan, Random(seed ^ 0x9011))
        plan.faults.sort(key=lambda fault: fault.at_s)
    if "transfer" in kinds and chaos.random() < 0.2:
        plan.corrupt = chaos.choice((0.1, 0.8))
    if "hostile" in kinds and (kinds == {"hostile"} or chaos.random() < 0.2):
        plan.hostility = Hostility(*(chaos.choice((0.0, 0.01, 0.05)) for _ in range(3)))
    return plan


def _asked(plan: FaultPlan, random: Random, number: int, beginnings: list[tuple[int, ...]], leave: bool) -> Asked:
    own = tuple(random.randrange(1, VOCAB) for _ in range(random.randint(1, 16)))
    prompt = (*random.choice(beginnings), *own) if random.random() < 0.5 else own
    sampling = Sampling(
        max_tokens=random.choice((1, 2, 4, 8, 12, 20)),
        seed=random.getrandbits(32),
        repetition_penalty=random.choice((1.0, 1.0, 1.1)),
        presence_penalty=random.choice((0.0, 0.0, 0.5)),
        stop_token_ids=(EOS,) if random.random() < 0.7 else (),
    )
    tenant = random.choice(("acme/ann", "acme/bob", "acme", "lab", "lab/eve"))
    leaves = random.random() < 0.12
    after_s = random.choice((0.0005, random.uniform(0.0, 0.05), random.uniform(0.0, 0.6)))
    return Asked(
        stream_id=f"r{number}",
        at_s=random.uniform(0.05, plan.fault_s * 0.8),
        gateway=random.randrange(plan.gateways),
        tenant=tenant,
        priority_class=random.choice(("", "", "batch")) if tenant.startswith("acme") else "",
        prompt=prompt,
        sampling=sampling,
        choices=random.choice((1, 1, 1, 2, 3)),
        stop_word=random.randrange(1, VOCAB) if random.random() < 0.2 else -1,
        leaves_after_s=after_s if leaves and leave else None,
    )


SESSION_TOKENS_MAX = 24
"""A longer conversation gets no further turn, because each turn must fit the smallest pool."""


def _add_session(plan: FaultPlan, leave: bool) -> None:
    """Adds features for conversations: suffixes on decode workers, fetches, a second tier behind a small pool."""
    seed = plan.seed
    plan.fetches, plan.computes_suffixes, plan.tier_slots = True, bool(seed % 3), (0, 24, 0, 6)[seed % 4]
    plan.kv_blocks["prefill"] = 14 if plan.tier_slots else plan.kv_blocks["prefill"]
    plan.asked += _session(plan, Random(seed ^ 0x7012), len(plan.asked), leave)


def _session(plan: FaultPlan, random: Random, number: int, leave: bool) -> list[Asked]:
    """Makes the turns of one conversation; each goes on from the answer before it. If decode workers compute no suffixes, the
    turns are longer, so that prefill workers have more to fetch."""
    turns_max, answer_max = (3, 6) if plan.computes_suffixes else (5, 20)
    prompt, turns = tuple(random.randrange(1, VOCAB) for _ in range(12)), list[Asked]()
    for turn in range(random.randint(2, turns_max)):
        asked = _asked(plan, random, number + turn, [()], leave)
        asked = replace(
            asked,
            at_s=turns[-1].at_s + random.uniform(0.02, 0.4) if turns else asked.at_s / 2,
            tenant="lab",
            priority_class="",
            prompt=(*prompt, *asked.prompt[:4]),
            sampling=msgspec.structs.replace(asked.sampling, max_tokens=min(asked.sampling.max_tokens, answer_max)),
            choices=random.choice((1, 1, 1, 2)) if not turn else 1,
            session=b"mine" if plan.seed % 2 else b"",
        )
        turns.append(asked)
        prompt = (*asked.prompt, *expected(asked.prompt, asked.sampling, 0, asked.stop_word).tokens)
        if len(prompt) > SESSION_TOKENS_MAX:
            break
    return turns


def _drains(plan: FaultPlan, random: Random) -> list[Fault]:
    drains = []
    for _ in range(random.choice((0, 0, 0, 1, 1, 2, 3))):
        how = random.choice(("to end", "to end", "to end", "by order"))
        who = random.choice([*plan.workers, "coordinator"] if how == "to end" else plan.workers)
        grace_s = random.choice((0.0, 0.0, random.uniform(0.0, 0.3), random.uniform(0.3, 2.0)))
        for_s = random.uniform(0.05, 1.0)
        at_s = random.choice(plan.asked).at_s + random.uniform(0.0, 0.3)  # while something runs
        drains.append(Fault(at_s, "drain", who, for_s=for_s, how=how, grace_s=grace_s))
    return drains


def _flips(plan: FaultPlan, random: Random) -> list[Fault]:
    """Draws changes of role. A change that would leave a role without a worker is refused, unless it is forced."""
    flips = []
    names = random.choice((plan.workers, [random.choice(plan.workers)]))  # one worker may change again and again
    for _ in range(random.choice((0, 0, 1, 1, 2, 4))):
        how = random.choice(("", "", "by force", "by force", "dies", "cannot"))
        grace_s = random.choice((0.0, 0.0, random.uniform(0.0, 0.5)))
        at_s = random.choice(plan.asked).at_s + random.uniform(0.0, 0.4)
        role = random.choice(("prefill", "decode", "mixed", "mixed"))
        flips.append(Fault(at_s, "flip", random.choice(names), role, how=how, grace_s=grace_s))
    return flips


def _stalls(plan: FaultPlan, random: Random) -> list[Fault]:
    """Stops the coordinator in one run of twelve while something runs, about as long as it takes until it must begin anew."""
    if random.random() >= 1 / 12:
        return []
    at_s = random.choice(plan.asked).at_s + random.uniform(0.0, 0.5)
    return [Fault(at_s, "pause", "coordinator", for_s=random.uniform(1.5, 5.0))]


def _policies(plan: FaultPlan, random: Random) -> list[Fault]:
    """Changes policies in one run of four."""
    count = random.choice((0, 0, 0, random.randint(1, 4)))
    hows = ("tried", "promoted", "rolled back")
    return [
        Fault(random.uniform(0.05, plan.fault_s), "policy", "coordinator", how=random.choice(hows))
        for _ in range(count)
    ]


def _fault(plan: FaultPlan, random: Random, kind: str) -> Fault:
    at_s = random.uniform(0.05, plan.fault_s)
    who = random.choice(plan.processes)
    other = random.choice([name for name in plan.processes if name != who])
    briefly = random.choice((random.uniform(0.01, 0.3), random.uniform(0.3, 2.5), random.uniform(2.0, 6.0)))
    match kind:
        case "crash":
            return Fault(at_s, kind, who, for_s=random.choice((0.05, random.uniform(0.05, 0.5), 3.0)))
        case "pause":
            return Fault(at_s, kind, random.choice((who, random.choice(plan.workers))), for_s=briefly)
        case "partition":
            how = random.choice(("one way", "both ways", "from everyone"))
            return Fault(at_s, kind, who, other if how != "from everyone" else "", briefly, how)
        case "cut":
            return Fault(at_s, kind, who, how=random.choice(("reset", "reset", "hole")))
        case "slow":
            how = random.choice(("steps", "frames", "disk"))
            where = {"steps": random.choice(plan.workers), "frames": who, "disk": "coordinator"}[how]
            return Fault(at_s, kind, where, for_s=briefly, how=how)
        case "step":
            return Fault(at_s, kind, random.choice(plan.workers), how=random.choice(("error", "nan")))
        case "hang":
            return Fault(at_s, kind, random.choice(plan.workers), for_s=random.choice((0.5, 3.0, FOR_EVER_S)))
        case _:
            return Fault(at_s, "transfer", random.choice(plan.workers), how="broken pair")
