"""Tenants' accounts: their rights by the tenants file, the bills of their requests, and goodput. Pure."""

from collections import Counter
from collections.abc import Container
from dataclasses import replace
from math import ceil
from typing import NamedTuple
from zlib import crc32

import msgspec

from coordinator.accounting.billing import Billing, Opened, Past
from coordinator.accounting.quota import Ask, Denial
from coordinator.events import Configured, Limits
from coordinator.policy_versions import PolicyInForce
from proto.errors import Reject
from proto.messages import Submit
from runtime.tenancy.tenants import open_tenants
from scheduler.cluster import Cluster
from scheduler.fairness.fair_node import Path
from scheduler.request import Request
from scheduler.waiting.projection import JITTER

RELOAD_S = 5.0
"""Retry time for a tenant that only the gateway knows. The coordinator will have read the same file by then."""
JITTERED_MAX_S = 60.0
"""The jitter of a wait is at most a part of this, so that a client that waits for midnight does not lose minutes."""


class GoodputCounts(msgspec.Struct, gc=False):
    offered: int = 0
    """Requests that came, except those that were refused for what they are or for their tenant's limits."""
    finished: int = 0
    kept: int = 0  # Finished within both targets. A class without targets keeps them always.
    ttft_ms: float = 0.0  # sum of the times to first token of finished requests
    tpot_ms: float = 0.0  # sum of their mean times per later token
    failed: int = 0  # accepted, and ended by an error, a deadline or an overload; counted by pool alone

    def count(self, took: "Times", target: "Times") -> None:
        self.finished += 1
        self.kept += took.keep(target)
        self.ttft_ms += took.ttft_ms
        self.tpot_ms += took.tpot_ms


class Times(NamedTuple):
    """The times of one request, as this coordinator sees it; a target of 0 is none."""

    ttft_ms: float
    tpot_ms: float  # mean, from the first token to the end, interruptions included

    def keep(self, target: "Times") -> bool:
        return all(not limit or took <= limit for took, limit in zip(self, target, strict=True))


class Goodput:
    def __init__(self) -> None:
        self.by_class: dict[str, GoodputCounts] = {}
        self.policy = PolicyInForce()
        self.by_arm: dict[str, GoodputCounts] = {"active": GoodputCounts()}
        """Counts by arm of requests that came since the policy or its trial last changed."""
        self._since = 0.0
        self._by_pool: dict[str, GoodputCounts] = {}  # counts by revision since a rollout last changed
        self._rolled_at = 0.0

    def put_in_force(self, policy: PolicyInForce, now: float) -> None:
        if policy != self.policy:
            if policy.rollouts != self.policy.rollouts:
                self._by_pool, self._rolled_at = {}, now
            before, self.policy = self.policy, policy
            if msgspec.structs.replace(before, rollouts=policy.rollouts) == policy:
                return
            self._since = now
            arms = ("active", "baseline", "candidate") if policy.trial else ("active",)
            self.by_arm = {arm: GoodputCounts() for arm in arms}

    def offered(self, pool: str, path: tuple[str, str, str]) -> None:
        self._of_class(path[0]).offered += 1
        self.by_arm[self.policy.arm(path[1])].offered += 1
        self.of_pool(pool).offered += 1

    def finished(self, pool: str, path: tuple[str, str, str], took: Times, target: Times, arrived: float) -> None:
        self._of_class(path[0]).count(took, target)
        if arrived >= self._since:
            self.by_arm[self.policy.arm(path[1])].count(took, target)
        if arrived >= self._rolled_at:
            self.of_pool(pool).count(took, target)

    def forget_others(self, priority_classes: Container[str]) -> None:
        """Drop the counts of classes that a new tenants file lacks."""
        self.by_class = {name: counts for name, counts in self.by_class.items() if name in priority_classes}

    def of_pool(self, pool: str) -> GoodputCounts:
        return self._by_pool.get(pool) or self._by_pool.setdefault(pool, GoodputCounts())

    def _of_class(self, priority_class: str) -> GoodputCounts:
        return self.by_class.get(priority_class) or self.by_class.setdefault(priority_class, GoodputCounts())


class NotAdmitted(NamedTuple):
    """Why a request is not let in."""

    reason: Reject
    why: str
    retry_after_s: float | None = None  # 0: never; None: as long as what waits before it takes


class Accounts:
    def __init__(self, limits: Limits, cluster: Cluster) -> None:
        self._cluster = cluster
        self.limits = limits
        self.classes_lowest_first = _lowest_first(limits)
        self.billing = Billing(open_tenants(), limits.remembered_s, limits.remembered_max)
        self.goodput = Goodput()
        self.over_quota: Counter[tuple[str, str]] = Counter()
        """Requests refused by tenant, for which limit of the tenants file."""

    def configure(self, event: Configured, now: float) -> None:
        """Put a tenants file in force. Live requests stay in the priority class they came in, even if the file no longer has
        it. Such a class has no floor, or all floors might leave nothing to share."""
        tenants, cluster = event.tenants, self._cluster
        still = {request.path[0] for request in cluster.requests.values()}
        kept = {
            name: replace(priority_class, floor_share=0.0)
            for name, priority_class in self.limits.priority_classes.items()
            if name in still
        }
        self.limits = cluster.limits = replace(
            self.limits, priority_classes=kept | dict(tenants.priority_classes), weights=tenants.weights()
        )
        self.classes_lowest_first = _lowest_first(self.limits)
        self.goodput.forget_others(self.limits.priority_classes)
        self.goodput.put_in_force(event.policy, now)
        for model, queue in cluster.queues.items():
            queue.replace_limits(self.limits)
            cluster.pools[model].shares.reweigh(queue.fair.weights)
        quotas = self.billing.quotas
        before = list(quotas.accounts)
        self.billing.configure(tenants, event.utc_offset_s, event.past or Past(), now + self.limits.orphan_s_max, now)
        for tenant in before:
            if tenants.policy(tenant) is None and ((account := quotas.accounts.get(tenant)) is None or account.idle):
                for queue in cluster.queues.values():
                    queue.forget(tenant)

    def path(self, submit: Submit) -> tuple[str, str, str]:
        """Returns a request's path in the fair queue. Its priority class is the one that it asks for, or else its tenant's."""
        organisation, _, user = submit.tenant.partition("/")
        policy = self.billing.quotas.tenants.policy(submit.tenant)
        for name in (submit.priority_class, policy.priority_class if policy is not None else ""):
            if name in self.limits.priority_classes:
                return name, organisation, user
        return self.classes_lowest_first[0], organisation, user

    def reserve(self, request: Request, now: float) -> NotAdmitted | None:
        """Open the request's bill, or say why not; then nothing is taken."""
        submit, billing = request.submit, self.billing
        policy = billing.quotas.tenants.policy(submit.tenant)
        if submit.attempt > 1:
            bill = billing.adopt(request.id, submit.resumed_tokens)
            if bill is None:
                held = sum(key[0] == request.id for w in self._cluster.workers.values() for key in w.allocations)
                bill = billing.open_promised(submit, self._ask(request), held, now)
            request.times = bill.times
            return None
        if policy is None:
            why = f"the coordinator does not know tenant {submit.tenant}"
            return NotAdmitted(Reject.UNKNOWN_TENANT, why, RELOAD_S)
        if submit.priority_class and submit.priority_class not in policy.priority_classes:
            why = f"tenant {submit.tenant} may not use the priority class {submit.priority_class}"
            return NotAdmitted(Reject.PRIORITY_CLASS, why, 0.0)
        queue = self._cluster.queues[submit.model]
        opened = billing.open(
            submit,
            self._ask(request),
            now,
            idle=not queue.fair.size,
            usual_s=queue.projection.placed.mean_s,
            fingerprint=request.fingerprint,
        )
        if isinstance(opened, Denial):
            self.over_quota[submit.tenant, opened.limit] += 1
            # A few seconds of jitter keep those who were told the same from coming back together.
            part = crc32(submit.request_id.encode()) / (1 << 32)
            wait_s = opened.retry_after_s + JITTER * min(opened.retry_after_s, JITTERED_MAX_S) * part
            return NotAdmitted(Reject.QUOTA, str(opened), min(wait_s, 86_400.0))
        request.times, request.borrowed = opened.times, opened.grant.borrowed
        return None

    def ledger_row(self, request: Request) -> Opened:
        bill, submit = self.billing.bills[request.id], request.submit
        counters, names = bill.counters, (submit.tenant, submit.model, request.path[0])
        return Opened(
            request.id, bill.grant.day, *names, request.borrowed, bill.estimate, counters.again, counters.from_token
        )

    def emitted(
        self, model: str, path: Path, request_id: str, resumed_tokens: int, tokens: int, *, first: bool = False
    ) -> None:
        """Count the `tokens` that an attempt emitted after `resumed_tokens`, and charge those that were not known before."""
        new = self.billing.emitted(request_id, resumed_tokens, tokens, first=first)
        if new and path:
            self._cluster.queues[model].emitted(path, new)

    def count_finished(self, request: Request, output_tokens: int, now: float) -> None:
        """Count a finished request in goodput. `output_tokens`: over all choices."""
        if request.counted:
            first = request.first_token_at or now
            later = max(-(-output_tokens // request.submit.choices) - 1, 1)
            took = Times(1000 * (first - request.arrived), 1000 * (now - first) / later)
            target = Times(request.ttft_ms, request.tpot_ms)
            self.goodput.finished(request.submit.model, request.path, took, target, request.arrived)

    def _ask(self, request: Request) -> Ask:
        submit = request.submit
        output_tokens = ceil(self._cluster.queues[submit.model].output_estimate(request))
        output_tokens_max = submit.choices * max(submit.sampling.max_tokens - submit.resumed_tokens, 1)
        decode = next(iter(self._cluster.pools[submit.model].decode.values()), None)
        kv_blocks = decode.whole_blocks(submit) if decode is not None else 0
        return Ask(submit.prompt_tokens, output_tokens, kv_blocks, output_tokens_max, submit.choices)


def _lowest_first(limits: Limits) -> list[str]:
    return sorted(limits.priority_classes, key=lambda name: limits.priority_classes[name].weight)
