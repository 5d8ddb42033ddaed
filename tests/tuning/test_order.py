"""The order of chunks that one tenant's requests get: the short way against the coordinator's fair queue."""

from dataclasses import replace

import numpy as np

from coordinator.events import Limits
from tuning.simulator.job import Sent, SimulatedRequest
from tuning.simulator.order import ManyTenants, OneTenant

STEP_TOKENS = 256


def test_one_tenant_follows_fair_order() -> None:
    """The quick order of one tenant's chunks equals that of the coordinator's fair queue."""
    limits = replace(Limits(), overtaken_max=3)
    for seed in range(20):
        rng = np.random.default_rng(seed)
        orders = OneTenant(limits.overtaken_max), ManyTenants(limits, 1000)
        waiting: dict[int, tuple[SimulatedRequest, SimulatedRequest]] = {}
        taken = 0
        for number in range(400):
            if not waiting or rng.random() < 0.4:
                sent = Sent(float(number), int(rng.lognormal(6, 1.2)) + 1, int(rng.integers(1, 400)))
                waiting[number] = pair = (
                    SimulatedRequest(number, sent, STEP_TOKENS),
                    SimulatedRequest(number, sent, STEP_TOKENS),
                )
                for order, job in zip(orders, pair, strict=True):
                    order.push(job, job.key)  # type: ignore[attr-defined]
                continue
            keys = list(dict.fromkeys(one.entry.key for one, _ in waiting.values()))
            open_keys = keys[: int(rng.integers(1, len(keys) + 1))]
            first = [order.first(open_keys) for order in orders]
            assert first[0] is not None and first[1] is not None
            assert first[0].number == first[1].number
            left = rng.random()
            for order, job in zip(orders, waiting[first[0].number], strict=True):
                if left < 0.1:
                    order.remove(job)  # type: ignore[attr-defined]
                elif left < 0.2:
                    order.move(job, 7)  # type: ignore[attr-defined]
                else:
                    tokens = min(job.prompt - job.dispatched, STEP_TOKENS)
                    order.take(job, open_keys, tokens, job.dispatched + tokens == job.prompt, 1)  # type: ignore[attr-defined]
                    job.dispatched += tokens
            taken += 1
            if waiting[first[0].number][0].entry is None:
                del waiting[first[0].number]
        assert taken > 150
