"""Workers on which the model fails: requests that go well elsewhere prove them guilty, and those that succeed do the work."""

import pytest

from coordinator.events import Limits
from lab.cluster.surroundings import Timing
from tests.uniform_cluster import UniformCluster


@pytest.mark.parametrize(("failing", "every"), [(3, 1), (4, 1), (3, 2)])
def test_most_of_a_role_fails(failing: int, every: int) -> None:
    """Three or four of five prefill workers fail; the load is half of what the others compute, and all of it is served."""
    cluster = UniformCluster(Limits(), Timing(prefill_tokens_per_s=8192.0, decode_step_s=0.02), prefill=5, decode=2)
    cluster.resume_delay_s = 0.05
    for worker in list(cluster.prefill.values())[:failing]:
        worker.engine.fails_every = every
    apart_s = 2 / (5 - failing) / 8
    for number in range(60):
        cluster.at(1.0 + number * apart_s, cluster.submit, f"r{number}", "t", 1024, 4)
    cluster.run(1.0 + 60 * apart_s + 10.0)
    assert [request.state for request in cluster.requests.values()] == ["finished"] * 60
    waits_s = sorted(cluster.ttft_s.values())
    assert waits_s[30] < 0.5 and waits_s[-1] < 5.0
    assert sum(request.interruptions for request in cluster.requests.values()) < 60
