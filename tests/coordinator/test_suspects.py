"""A request that ends the workers it runs on: how many it may end, and that nobody else fails for it."""

import msgspec
import pytest

from coordinator.event_log.reasons import AwaitsTrial, why_not
from coordinator.events import Limits, PeerDown, PeerUp, Tick
from coordinator.recovery import suspects
from lab.cluster.cluster import hello
from lab.cluster.prefill import ClusterPrefillWorker
from lab.cluster.surroundings import Timing
from launcher.admin.explain_words import _reason
from proto.errors import CancelReason, Reject
from proto.messages import Cancel, HandedOver, Interrupted, Rejected, Release, Released, Role, Step, StepDone, Submit
from proto.progress import DecodeProgress, Joined
from runtime.tenancy.priority_classes import PriorityClass
from scheduler.request import Suspicion
from scheduler.workers.trials import WAITS_S_MAX
from tests.coordinator.world import Harness, submit, worker_hello
from tests.uniform_cluster import FIRST_PREFILL, UniformCluster


class Deadly(UniformCluster):
    """A prefill worker dies at the end of a step with a prompt called "deadly" in it, and comes back after 5 s."""

    def __init__(self, workers: int) -> None:
        limits = Limits(priority_classes={"standard": PriorityClass(1.0)})  # nothing is refused for its target
        super().__init__(limits, Timing(prefill_step_s=0.002, decode_step_s=0.02), prefill=workers, decode=4)
        self.resume_delay_s = 0.05
        self.killed: list[float] = []
        for incarnation in list(self.prefill):
            self._arm(self.prefill[incarnation], incarnation)

    def _arm(self, worker: ClusterPrefillWorker, incarnation: int) -> None:
        ended = worker._step_ended

        def step_ended(begun, *rest):  # type: ignore[no-untyped-def]
            if incarnation not in self.prefill:
                return
            if any(prompt.order.request_id.startswith("deadly") for prompt, _ in begun.work):
                self.killed.append(self.now)
                self.lose(incarnation)
                self.at(self.now + 5.0, self._again, FIRST_PREFILL + 500 + len(self.killed))
            else:
                ended(begun, *rest)

        worker._step_ended = step_ended  # type: ignore[method-assign]

    def _again(self, incarnation: int) -> None:
        self.start(hello(Role.PREFILL, incarnation, self._capacity[Role.PREFILL]))
        self._arm(self.prefill[incarnation], incarnation)


@pytest.mark.parametrize(("workers", "deadly"), [(8, 1), (8, 2), (3, 1), (8, 4)])
def test_deadly_prompt_loses_two_workers_only(workers: int, deadly: int) -> None:
    """A prompt that kills workers ends at most two of them, and only it fails."""
    cluster = Deadly(workers)
    for at in range(40 * workers):
        cluster.at(0.3 * at / workers, cluster.submit, f"r{at}", f"t{at % 10}", 1024, 16)
    for at in range(deadly):
        cluster.at(3.0 + 0.01 * at, cluster.submit, f"deadly{at}", "evil", 300, 16)
    cluster.run(40.0)
    assert len(cluster.killed) <= 2 * deadly
    states = {name: request.state for name, request in cluster.requests.items()}
    assert {states.pop(f"deadly{at}") for at in range(deadly)} == {"failed"} and set(states.values()) == {"finished"}
    assert [one.reason for one in cluster.rejected] == [Reject.LOSES_WORKERS] * deadly
    assert not cluster.core.cluster.pools["m"].suspects, "those that ran beside it are cleared"


def test_uncounted_losses_let_prompt_kill_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that kills workers ends one after the other if losses are not counted."""
    monkeypatch.setattr(suspects, "count_loss", lambda state, worker: None)
    cluster = Deadly(8)
    cluster.at(1.0, cluster.submit, "deadly", "evil", 300, 16)
    cluster.run(4.0)
    assert len(cluster.killed) > 5


# --- by hand -------------------------------------------------------------------------------------------------------------


def step_of(h: Harness, incarnation: int) -> Step:
    [step] = h.take(Step, incarnation)
    assert isinstance(step, Step)
    return step


def computed(h: Harness, incarnation: int) -> None:
    """A prefill worker has done its step."""
    step = step_of(h, incarnation)
    h.receive(incarnation, StepDone(step.step_id, step.chunks, 10.0, 0))


def decoding(h: Harness, name: str, attempt: int = 1) -> int:
    """Through prefill, and on to its decode worker."""
    request = h.core.cluster.requests[name]
    computed(h, request.prefill_incarnation)
    h.receive(request.prefill_incarnation, HandedOver(name, attempt, 100, 1.0))
    return request.decode_incarnation


def let_go(h: Harness) -> None:
    for send in [send for send in h.sent if isinstance(send.message, Release)]:
        assert isinstance(send.message, Release)
        h.receive(send.incarnation, Released(send.message.request_id, send.message.attempt))
    h.take(Release)


def test_suspects_are_cleared_by_progress() -> None:
    """Requests lost together run one by one and are cleared by the chunks that are computed."""
    h = Harness.make(prefill=3, limits=Limits(step_tokens=64))
    h.receive(1, submit("before", 60))  # so that the two are in one step
    for name in ("a", "b"):
        h.receive(1, submit(name, 30))
    for incarnation in (10, 11, 12):
        for step in h.take(Step, incarnation):
            assert isinstance(step, Step)
    lost = h.core.cluster.requests["a"].prefill_incarnation
    with_it = [name for name in ("a", "b") if h.core.cluster.requests[name].prefill_incarnation == lost]
    h.post(PeerDown(lost, "killed"))
    let_go(h)
    assert [h.core.cluster.requests[name].suspicion for name in with_it] == [Suspicion(1, 30)] * len(with_it)
    for name in with_it:
        h.receive(1, submit(name, 30, attempt=2))
    for worker in h.core.cluster.pools["m"].prefill.values():
        for step, requests in worker.steps.values():
            assert len(requests) == 1 or not any(request.own_step for request in requests), step
    while any(h.core.cluster.requests[name].suspicion for name in with_it):
        for worker in list(h.core.cluster.pools["m"].prefill.values()):
            for step, _ in list(worker.steps.values()):
                h.receive(worker.incarnation, StepDone(step.step_id, step.chunks, 10.0, 0))


def killed_twice(h: Harness, name: str = "a") -> None:
    for attempt in (1, 2):
        h.receive(1, submit(name, attempt=attempt))
        h.post(PeerDown(h.core.cluster.requests[name].prefill_incarnation, "killed"))
        let_go(h)


def test_second_loss_alone_fails_request() -> None:
    """A request that was alone in two lost steps fails, and its gateway is told why."""
    h = Harness.make(prefill=3)
    killed_twice(h)
    [said] = h.take(Rejected, 1)
    assert isinstance(said, Rejected) and said.reason is Reject.LOSES_WORKERS and said.retry_after_s == 0.0
    assert h.ended == {"a": ["failed"]} and not h.core.cluster.requests and len(h.take(Interrupted)) == 1
    h.receive(1, submit("innocent"))
    assert h.core.cluster.requests["innocent"].state == "prefilling"


def test_suspicion_survives_resubmission() -> None:
    """As after the loss of its link, or where several choices go on one by one."""
    h = Harness.make(prefill=3)
    h.receive(1, submit("a", choices=2))
    h.post(PeerDown(h.core.cluster.requests["a"].prefill_incarnation, "killed"))
    let_go(h)
    h.receive(1, Cancel("a", 1, CancelReason.ABANDONED))
    h.receive(1, msgspec.structs.replace(submit("a.c1", 11, attempt=2, resumed=1), first_choice=1))
    h.post(PeerDown(h.core.cluster.requests["a.c1"].prefill_incarnation, "killed"))
    assert h.ended["a.c1"] == ["failed"]


@pytest.mark.parametrize("how", ["connected again", "drained", "waits"])
def test_only_running_requests_are_suspected(how: str) -> None:
    """Only requests in a running step of a lost process are suspected, not waiting or drained ones."""
    h = Harness.make(prefill=1, limits=Limits(steps_in_flight=1))
    h.receive(1, submit("a"))
    if how == "drained":
        h.core.cluster.workers[10].draining = True
    if how == "connected again":
        h.post(PeerUp(10, worker_hello(Role.PREFILL, 10)))
    elif how == "waits":
        h.receive(1, submit("b"))
        h.post(PeerDown(10, "killed"))
        assert h.core.cluster.requests["b"].suspicion is None
        return
    else:
        h.post(PeerDown(10, "killed"))
    assert h.core.cluster.requests["a"].suspicion is None


def test_handed_over_prompt_is_not_suspected() -> None:
    """A prompt that was handed over is not suspected for a step whose report was lost."""
    h = Harness.make(prefill=1, limits=Limits(step_tokens=16))
    h.receive(1, submit("a", 32))
    _lost, last = h.take(Step, 10)
    assert isinstance(last, Step)
    h.receive(10, StepDone(last.step_id, last.chunks, 10.0, 0))
    h.receive(10, HandedOver("a", 1, 100, 1.0))
    h.post(PeerDown(10, "silent"))
    assert h.core.cluster.requests["a"].suspicion is None and h.core.cluster.requests["a"].state == "decoding"


# --- in decode -----------------------------------------------------------------------------------------------------------


def test_progress_resets_stream_suspicion() -> None:
    """A stream that has made progress is suspected anew at each loss, never as lost twice."""
    h = Harness.make(prefill=1, decode=3)
    for attempt in (1, 2, 3, 4):
        h.receive(1, submit("a", attempt=attempt, max_tokens=50))
        on = decoding(h, "a", attempt)
        h.receive(on, DecodeProgress(10, 0, 0, joined=(Joined("a", attempt, 0),)))
        assert h.core.cluster.requests["a"].suspicion is None
        h.post(PeerDown(on, "killed"))
        assert h.core.cluster.requests["a"].suspicion == Suspicion(1)
        h.post(PeerUp(on + 10, worker_hello(Role.DECODE, on + 10)))
        let_go(h)


def test_second_loss_in_decode_convicts() -> None:
    """A stream that lost two workers fails, without a third, once those that ran beside it are cleared."""
    h = Harness.make(prefill=1, decode=1)
    for name in ("a", "b"):
        h.receive(1, submit(name, max_tokens=50))
        on = decoding(h, name)
    h.post(PeerDown(on, "killed"))
    h.post(PeerUp(30, worker_hello(Role.DECODE, 30)))
    let_go(h)
    for name in ("b", "a"):
        h.receive(1, submit(name, attempt=2, max_tokens=50))
    assert [h.core.cluster.requests[name].state for name in "ab"] == ["queued", "prefilling"], "one at a time"
    why = why_not(h.core.cluster.requests["a"], None, [], h.core.cluster.workers[10], h.core.cluster.pools["m"])
    assert why == AwaitsTrial(1) and "without other such requests" in _reason(why, "")
    decoding(h, "b", 2)
    h.receive(30, DecodeProgress(5, 0, 0, joined=(Joined("b", 2, 0),)))
    assert h.core.cluster.requests["b"].suspicion is None
    decoding(h, "a", 2)
    h.receive(1, submit("beside", max_tokens=50))
    decoding(h, "beside")
    h.post(PeerDown(30, "killed"))
    h.post(PeerUp(31, worker_hello(Role.DECODE, 31)))
    let_go(h)
    for name in ("a", "b", "beside"):
        h.receive(1, submit(name, attempt=3 if name != "beside" else 2, max_tokens=50))
    for name, attempt in (("b", 3), ("beside", 2)):
        assert not h.ended and h.core.cluster.requests["a"].state == "queued"
        decoding(h, name, attempt)
        h.receive(31, DecodeProgress(11 - 2 * attempt, 0, 0, joined=(Joined(name, attempt, 0),)))
    h.post(Tick())
    assert h.ended == {"a": ["failed"]} and not h.core.cluster.pools["m"].suspects


def test_waiting_suspects_run_beside_others() -> None:
    """A suspect that has waited for its trial for long runs beside another one."""
    h = Harness.make(prefill=1, decode=1)
    for name in ("a", "b"):
        h.receive(1, submit(name, max_tokens=50))
        on = decoding(h, name)
    h.post(PeerDown(on, "killed"))
    h.post(PeerUp(30, worker_hello(Role.DECODE, 30)))
    let_go(h)
    for name in ("a", "b"):
        h.receive(1, submit(name, attempt=2, max_tokens=50))
    decoding(h, "a", 2)
    assert h.core.cluster.requests["b"].state == "queued"
    h.now += WAITS_S_MAX
    h.receive(30, DecodeProgress(2, 0, 0, joined=(Joined("a", 2, 0),)))
    assert h.core.cluster.requests["a"].suspicion is not None and h.core.cluster.requests["b"].state == "prefilling"


def test_mixed_worker_loss_counts_once() -> None:
    """The loss of both halves of a mixed worker counts once for each request."""
    h = Harness.make(prefill=0, decode=0)
    for role, number in ((Role.PREFILL, 10), (Role.DECODE, 20)):
        half = msgspec.structs.replace(worker_hello(role, number), process="mixed", host="h", pid=7)
        h.post(PeerUp(number, half))
    h.receive(1, submit("stream", max_tokens=50))
    decoding(h, "stream")
    h.receive(1, submit("prompt"))
    h.post(PeerDown(10, "killed"))
    h.post(PeerDown(20, "killed"))
    assert h.core.cluster.requests["stream"].suspicion == Suspicion(1)
    assert h.core.cluster.requests["prompt"].suspicion == Suspicion(1, 10)


def test_retry_budgets_are_per_model() -> None:
    h = Harness.make(limits=Limits(retry_floor=1, retry_share=0.0))
    for role, number in ((Role.PREFILL, 50), (Role.DECODE, 60)):
        h.post(PeerUp(number, msgspec.structs.replace(worker_hello(role, number), model="other")))

    def of_other(request: Submit) -> Submit:
        return msgspec.structs.replace(request, model="other")

    for name in ("a", "b"):
        h.receive(1, submit(name))
    h.receive(1, of_other(submit("c")))
    for lost in (10, 50):
        h.post(PeerDown(lost, "killed"))
    let_go(h)
    for request in (submit("a", attempt=2), submit("b", attempt=2), of_other(submit("c", attempt=2))):
        h.receive(1, request)
    assert [said.request_id for said in h.take(Rejected) if isinstance(said, Rejected)] == ["b"]
