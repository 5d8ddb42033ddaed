"""Decode steps that are planned before the last one's tokens are known: the streams are the same, and blocks are safe."""

import random
from collections import defaultdict, deque

from hypothesis import given, settings
from hypothesis import strategies as st

from decode_worker.batch import Draw, RunningBatch, StepPlan
from decode_worker.requests import AttemptTable, failed
from engine.kv.allocator import BlockAllocator
from engine.sampling.finish import finish_reason
from proto.errors import FinishReason, Interrupt
from proto.messages import Finished, Released, WorkFailed
from tests.workers.test_batch import BLOCK, POOL, STOP_TOKEN, World, reserve

Stream = list[tuple[int, int, FinishReason | None]]


def drawn_by(name: str, choice: int, index: int) -> int:
    """What the model says; one token in six ends a stream."""
    return random.Random(f"{name} {choice} {index}").choice([50, 51, 52, 53, 54, STOP_TOKEN])


def whole_stream(name: str, choice: int, max_tokens: int) -> Stream:
    found: Stream = []
    sampling = reserve(name, 1, max_tokens=max_tokens).sampling
    while not found or found[-1][2] is None:
        index = len(found) + 1
        token = drawn_by(name, choice, index)
        found.append((index, token, finish_reason(token, index + 1, sampling)))
    return found


class PipelinedWorld(World):
    """With a device that computes steps in order, and draws what the model says."""

    def __init__(self, depth: int, pool: int = POOL) -> None:
        super().__init__(pool)
        self.batch = RunningBatch(depth)
        self.table = AttemptTable(BlockAllocator(pool), BLOCK, self.batch)
        self.device: deque[StepPlan[str]] = deque()
        self.streams: dict[tuple[str, int], Stream] = defaultdict(list)

    def start_next(self) -> None:
        plan = self.batch.plan(self._stuck) if self.batch.may_plan else None
        if plan is not None:
            self.device.append(plan)

    def finish_oldest(self, broken: bool = False) -> None:
        if not self.device:
            return
        plan = self.device.popleft()
        for row in plan.rows:
            assert set(row.table) <= set(row.running.blocks.table), "a step writes to blocks that were given back"
        draws: list[Draw] = [(drawn_by(row.running.key[0], row.running.choice, row.index), None) for row in plan.rows]
        outcome = self.batch.apply([None, *draws[1:]] if broken else draws)
        for _, items in outcome.by_gateway.values():
            for item in items:
                self.streams[(item.request_id, item.choice)].append((item.index, item.tokens[0], item.finish))
        for one in outcome.broken:
            self.end(one.key)
        self.told += self.table.ended(outcome.ended)

    def end(self, key: tuple[str, int]) -> None:
        attempt = self.table.attempts.get(key)
        if attempt is not None:
            self.told += self.table.close(attempt, failed(attempt, Interrupt.ENGINE_ERROR, "not finite"))

    def abandon(self) -> None:
        if self.device:
            self.device.clear()
            ended = self.batch.abandon()
            for sequence in ended:
                self.end(sequence.key)
            self.told += self.table.ended(ended)

    def _stuck(self, sequences: list) -> None:  # type: ignore[type-arg]
        attempt = self.table.attempts[sequences[0].key]
        attempt.final_report = attempt.final_report or failed(attempt, Interrupt.PREEMPTED, "no block")
        self.told += self.table.ended(sequences)


def test_next_step_is_planned_early() -> None:
    """A second step is planned before the result of the first is known."""
    w = PipelinedWorld(2)
    w.run(reserve("a", 6, max_tokens=5))
    w.start_next()
    w.start_next()
    first, second = w.device
    assert [(row.position, row.index) for plan in (first, second) for row in plan.rows] == [(6, 1), (7, 2)]
    assert not w.batch.may_plan


def test_length_end_takes_no_extra_step() -> None:
    """A sequence that ends by its length is in no step beyond its last token."""
    w = PipelinedWorld(2)
    w.run(reserve("a", 6, max_tokens=3))
    for _ in range(4):
        w.start_next()
        if not w.batch.may_plan:
            w.finish_oldest()
    steps = w.batch.steps
    while w.device:
        w.finish_oldest()
    assert steps <= 2 and w.table.allocator.free_count == POOL


def test_nothing_is_sent_after_stop_token() -> None:
    """A stop token is seen one step late; the token of that step is not sent."""
    name = next(n for n in map(str, range(99)) if drawn_by(n, 0, 1) == STOP_TOKEN)
    w = PipelinedWorld(2)
    w.run(reserve(name, 8, max_tokens=9))
    w.start_next()
    w.start_next()
    w.finish_oldest()
    assert w.streams[(name, 0)] == [(1, STOP_TOKEN, FinishReason.STOP)] and not w.told
    assert w.table.allocator.held_count > 0, "the second step may still write"
    w.start_next()
    assert len(w.device) == 1, "it is in no third step"
    w.finish_oldest()
    assert w.told == [Finished(name, 1, 2, 0)] and w.table.allocator.free_count == POOL
    assert len(w.streams[(name, 0)]) == 1


def test_block_shortage_waits_for_running_step() -> None:
    """Planning waits for the step in flight if blocks run short; then one stream is preempted, the other ends."""
    lasting = [n for n in map(str, range(999)) if STOP_TOKEN not in [drawn_by(n, 0, index) for index in range(1, 20)]]
    w = PipelinedWorld(2, pool=6)
    w.run(reserve(lasting[0], 8, max_tokens=18))
    w.run(reserve(lasting[1], 6, max_tokens=18))
    for _ in range(60):
        w.start_next()
        w.start_next()
        w.finish_oldest()
        w.table.allocator.check_invariants()
    assert w.table.allocator.free_count == 6 and len(w.told) == 2
    assert [type(report) for report in w.told] == [WorkFailed, Finished], (
        "one is preempted, the other goes on to its end"
    )


@settings(max_examples=150, deadline=None)
@given(data=st.data(), depth=st.sampled_from([1, 2]))
def test_streams_stay_whole_at_any_depth(data: st.DataObject, depth: int) -> None:
    """Whatever joins, leaves, fails and is abandoned. A stream that nothing disturbs is the same at any depth."""
    w = PipelinedWorld(depth, pool=data.draw(st.sampled_from([12, 400])))
    orders: dict[str, int] = {}
    disturbed: set[str] = set()
    for _ in range(data.draw(st.integers(1, 40))):
        match data.draw(
            st.sampled_from(["join", "join", "start", "start", "finish", "finish", "close", "abandon", "nan"])
        ):
            case "join" if w.table.allocator.free_count > 6:
                name = f"r{len(orders)}"
                orders[name] = data.draw(st.integers(2, 7))
                w.run(
                    reserve(
                        name,
                        data.draw(st.integers(1, 9)),
                        max_tokens=orders[name],
                        choices=data.draw(st.integers(1, 2)),
                    )
                )
            case "start":
                w.start_next()
            case "finish":
                w.finish_oldest()
            case "close" if w.table.attempts:
                attempt = w.table.attempts[data.draw(st.sampled_from(sorted(w.table.attempts)))]
                disturbed.add(attempt.order.request_id)
                w.told += w.table.close(attempt, Released(*attempt.key))
            case "abandon":
                disturbed |= {row.running.key[0] for plan in w.device for row in plan.rows}
                w.abandon()
            case "nan" if w.device:
                disturbed.add(w.device[0].rows[0].running.key[0])
                w.finish_oldest(broken=True)
        w.table.allocator.check_invariants()
    for _ in range(60):
        before = len(w.device)
        w.start_next()
        if not w.batch.may_plan or len(w.device) == before:
            w.finish_oldest()
    while w.device:
        w.finish_oldest()
    assert w.table.allocator.room == w.table.allocator.total and not w.table.attempts and not w.batch.running
    assert sorted(report.request_id for report in w.told) == sorted(orders)
    finished = {report.request_id for report in w.told if isinstance(report, Finished)}
    for (name, choice), stream in w.streams.items():
        want = whole_stream(name, choice, orders[name])
        assert stream == want[: len(stream)], "each token once, in order"
        if name in finished - disturbed:
            assert stream == want
