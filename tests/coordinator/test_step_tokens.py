"""The token budget of a prefill step: the coordinator's option, or else what the worker says."""

import msgspec
import pytest

from coordinator.events import Limits, PeerUp
from proto.messages import Role, Step
from runtime.settings.workers import WorkerSettings
from tests.coordinator.world import MODEL, Harness, submit, worker_hello


@pytest.mark.parametrize(("asked", "steps"), [(0, [64, 36]), (16, [16] * 6 + [4])])
def test_worker_sets_its_step_size(asked: int, steps: list[int]) -> None:
    """The worker's own step size is used unless the coordinator is told one."""
    world = Harness.make(0, 1, Limits(step_tokens=asked, steps_in_flight=16))
    hello = worker_hello(Role.PREFILL, 10)
    assert hello.capacity is not None
    world.post(
        PeerUp(10, msgspec.structs.replace(hello, capacity=msgspec.structs.replace(hello.capacity, step_tokens=64)))
    )
    world.receive(1, submit("a", 100))
    assert world.core.cluster.queues[MODEL].step_tokens == 64, "what deadlines count the chunks of a prompt by"
    taken = [message for message in world.take(Step, 10) if isinstance(message, Step)]
    assert [sum(chunk.length for chunk in step.chunks) for step in taken] == steps


def test_gpu_workers_have_larger_steps() -> None:
    """A worker's steps are larger on a GPU, up to its maximum."""

    def worker(step_tokens_max: int) -> WorkerSettings:
        return WorkerSettings(
            role="prefill", model="m", coordinator="tcp://127.0.0.1:1", step_tokens_max=step_tokens_max
        )

    found = [(worker(most).step_tokens_on(False), worker(most).step_tokens_on(True)) for most in (2048, 100)]
    assert found == [(256, 2048), (100, 100)]
