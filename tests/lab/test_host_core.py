"""Cores that requests and tokens share with prefill workers: in the simulator, and as calibrate measures them."""

import os
import time

import numpy as np
import pytest

from lab.advise import Workers
from lab.commands.core_time import shared_core_ms
from lab.fit import control_cost
from lab.play.cores import stretch
from lab.play.player import Player
from lab.play.request import Sent
from lab.profile import ControlCost, Curve, DecodeCost, HostCost, PrefillCost
from tests.lab.profiles import GPU

TINY = GPU.replaced(
    prefill=PrefillCost(Curve((1.0, 256.0), (1.0, 2.0))),
    decode=DecodeCost(Curve((1.0, 8.0), (1.0, 1.0))),
    host=HostCost(request_ms=10.0, step_gap_ms=3.0),
    prefill_cores=1,
    decode_cores=1,
    control=ControlCost(1.0),
)
"""A step's tokens take a core for as long as the step."""
ONE_EACH = Workers(1, 1)


def ttft(*sent: Sent, workers: Workers = ONE_EACH) -> list[float]:
    return [float(ms) for ms in Player(TINY, workers, sent).run().ttft_ms]


def test_lone_request_takes_measured_time() -> None:
    """A request alone on the cluster takes the times that calibrate measured."""
    assert ttft(Sent(0.0, 256, 1)) == pytest.approx([10 + 2])
    assert ttft(Sent(0.0, 512, 1)) == pytest.approx([10 + 2 + 3 + 2]), (
        "no gap before the first step, none after the last"
    )


def test_requests_and_steps_share_the_core() -> None:
    """Requests and steps at the same time divide the core between them."""
    # The second one comes when the first has its core for itself; each is timed by what runs when it begins.
    first, second = ttft(Sent(0.0, 256, 1), Sent(0.005, 256, 1))
    assert second == pytest.approx(20 + 2)
    assert 12 < first <= 14, "its step runs beside the second request"
    # Prompts on two workers, which have one core.
    assert ttft(Sent(0.0, 256, 1), Sent(0.02, 256, 1), workers=Workers(2, 1)) == pytest.approx([12, 12])


def test_tokens_take_only_their_share() -> None:
    """Decode streams slow a request by their share of the core and no more."""
    streams = [Sent(0.0, 16, 1000), Sent(0.0001, 16, 1000)]
    beside_one = ttft(streams[0], Sent(0.1, 256, 1))[1]
    beside_two = ttft(*streams, Sent(0.1, 256, 1), workers=Workers(1, 2))[2]
    assert beside_one == pytest.approx(2 * 12, rel=0.01)
    assert beside_two == pytest.approx(3 * 12, rel=0.35), "two decode workers on one core have longer steps"
    assert beside_one < beside_two


def gaps(streams: int, workers: Workers, control_ms: float) -> float:
    """Mean time per later token, in ms, of so many streams."""
    sent = [Sent(0.0, 16, 300)] * streams
    outcome = Player(TINY.replaced(control=ControlCost(control_ms)), workers, sent).run()
    return float(np.median(outcome.tpot_ms))


def test_mixed_workers_own_their_cores() -> None:
    """Each mixed worker has a core, and passing tokens on slows it only where all have one."""
    one, two = Workers(0, 0, 1), Workers(0, 0, 2)
    assert gaps(2, one, 0.0) == pytest.approx(1.0, rel=0.05)
    assert gaps(2, two, 0.0) == pytest.approx(1.0, rel=0.05), "one core each"
    assert gaps(1, one, 0.2) == pytest.approx(1.0, rel=0.05), "the other core passes its tokens on"
    # 1 step ms and 0.2 ms of tokens on each of two cores.
    assert gaps(2, two, 0.2) == pytest.approx(1 / (1 - 0.2), rel=0.07)


def test_small_core_is_divided_equally() -> None:
    """A core that is too small is divided equally."""
    assert stretch(1, 1, 0, 0.0) == 1.0
    assert stretch(1, 1, 1, 0.02) == pytest.approx(1 / 0.98)
    assert stretch(1, 1, 1, 0.9) == 2.0
    assert stretch(2, 1, 1, 5.0) == 3.0
    assert stretch(2, 4, 1, 0.5) == 1.0


def test_missing_core_figures_change_nothing() -> None:
    """A profile without figures of shared cores is simulated without them."""
    rng = np.random.default_rng(1)
    sent = [Sent(at, int(rng.integers(16, 900)), 40) for at in np.cumsum(rng.exponential(0.02, 200)).tolist()]
    plain = TINY.replaced(control=ControlCost(), host=HostCost(step_gap_ms=3.0))
    without = Player(plain, Workers(2, 2), sent).run()
    with_host = Player(plain.replaced(host=TINY.host), Workers(2, 2), sent).run()
    assert with_host.ttft_ms == pytest.approx(without.ttft_ms + 10.0)
    # Workers that have cores of their own, or a GPU: what tokens take does not matter.
    apart = plain.replaced(host=TINY.host, prefill_cores=0, decode_cores=0)
    figures = [Player(one, Workers(2, 2), sent).run().ttft_ms for one in (apart, apart.replaced(control=TINY.control))]
    assert (figures[0] == figures[1]).all()


def test_queue_time_begins_at_coordinator() -> None:
    """The queue time of a request begins when it reaches the coordinator."""
    outcome = Player(TINY, Workers(1, 1), [Sent(0.0, 256, 1)]).run()
    assert outcome.queue_ms[0] == pytest.approx(0.0, abs=1e-6)


def test_control_cost_is_a_line() -> None:
    """The core time of a step's tokens is fitted as a line over the sequences."""
    found = control_cost([(1, 0.5), (4, 0.8), (1, 0.5), (4, 0.8), (4, 9.0)])
    assert (found.step_ms, found.token_ms) == pytest.approx((0.4, 0.1))
    assert control_cost([]) == ControlCost()


def test_kernel_reports_core_time() -> None:
    """The kernel reports how long threads ran on the given cores."""
    cores = frozenset(os.sched_getaffinity(0))
    before = shared_core_ms(cores)
    if before is None:
        pytest.skip("this kernel keeps no account of threads")
    until = time.process_time() + 0.05
    while time.process_time() < until:
        pass
    after = shared_core_ms(cores)
    assert after is not None
    assert after - before > 40
    assert shared_core_ms(frozenset({10_000})) == 0.0
