"""Continuous batching and the attempts behind it, under random joins, leaves, ends and failures."""

from hypothesis import given, settings
from hypothesis import strategies as st

from decode_worker.batch import DecodeRequest, RunningBatch, StepOutcome
from decode_worker.metrics import DecodeMetrics
from decode_worker.requests import AttemptTable, FinalReport, Phase
from engine.kv.allocator import BlockAllocator
from kvtransfer.session.session import OfferAccepted
from proto.errors import FinishReason, Interrupt
from proto.messages import Destination, Finished, Released, Reserve, WorkFailed
from proto.sampling import Sampling

BLOCK, POOL, STOP_TOKEN = 4, 60, 7
GATEWAYS = (Destination("tcp://a", 1), Destination("tcp://b", 2))


def reserve(
    name: str,
    tokens: int,
    *,
    max_tokens: int = 5,
    choices: int = 1,
    gateway: int = 0,
    resumed: int = 0,
    text: int | None = None,
) -> Reserve:
    """Prompts of one `text` begin alike; without one, nothing is looked up or kept."""
    sampling = Sampling(max_tokens=max_tokens, stop_token_ids=(STOP_TOKEN,))
    hashes = b"".join(bytes([text or 0, block]) * 8 for block in (range(tokens // BLOCK) if text is not None else ()))
    return Reserve(name, 1, tokens, sampling, choices, 0, resumed, 1, GATEWAYS[gateway], 9, hashes)


class World:
    def __init__(self, pool: int = POOL) -> None:
        self.batch: RunningBatch[str] = RunningBatch()
        self.table = AttemptTable(BlockAllocator(pool), BLOCK, self.batch)
        self.told: list[FinalReport] = []
        self.stuck: list[list[DecodeRequest[str]]] = []

    def accept(self, order: Reserve) -> OfferAccepted:
        self.table.reserve(order)
        answer = self.table.target_blocks((order.request_id, 1), 9, -(-order.prompt_tokens // BLOCK))
        assert isinstance(answer, OfferAccepted)
        return answer

    def receive(self, order: Reserve) -> list[int]:
        return list(self.accept(order).block_ids)

    def run(self, order: Reserve) -> None:
        self.commit(order, self.receive(order))

    def commit(self, order: Reserve, blocks: list[int]) -> None:
        attempt = self.table.attempts[(order.request_id, 1)]
        tables = self.table.fork(attempt, blocks, order.choices)
        start = order.resumed_tokens + 1
        self.table.start(
            attempt,
            [
                DecodeRequest(attempt.key, c, order.gateway, order.sampling, t, "state", 100 + c, start)
                for c, t in enumerate(tables)
            ],
        )

    def table_doubts(self) -> set[str]:
        """Requests whose transfer has failed without proof."""
        return {request_id for request_id, _ in self.table.quarantined}

    def step(self, tokens: int = 50) -> dict[tuple[str, int], tuple[int, FinishReason | None]]:
        """One step in which every sequence draws `tokens`; returns (index, finish) by (request, choice)."""
        if self.batch.in_flight is None and self.batch.plan(self.stuck.append) is None:
            return {}
        assert self.batch.in_flight is not None
        outcome = self.batch.apply([(tokens, None)] * len(self.batch.in_flight.rows))
        self.told += self.table.ended(outcome.ended)
        items = [item for _, items in outcome.by_gateway.values() for item in items]
        return {(i.request_id, i.choice): (i.index, i.finish) for i in items}


def test_sequences_join_and_leave_between_steps() -> None:
    """Sequences join and leave between steps, and their positions continue from the prompt."""
    w = World()
    w.run(reserve("a", 6, max_tokens=4))
    plan = w.batch.plan(w.stuck.append)
    assert plan is not None and [(r.token, r.position) for r in plan.rows] == [(100, 6)]
    w.run(reserve("b", 3, max_tokens=2))
    assert w.step() == {("a", 0): (1, None)}
    assert w.step() == {("a", 0): (2, None), ("b", 0): (1, FinishReason.LENGTH)}
    assert w.told == [Finished("b", 1, 2, 0)]
    assert w.step(STOP_TOKEN) == {("a", 0): (3, FinishReason.STOP)}
    assert w.told[-1] == Finished("a", 1, 4, 0) and w.table.allocator.room == POOL and not w.table.attempts


def test_joins_and_leaves_are_counted() -> None:
    w = World()
    metrics = DecodeMetrics(w.table, {}, lambda: 3)

    def counted(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(f"crossdock_{name}_total", labels)

    w.run(reserve("a", 6, choices=2, max_tokens=4))
    w.run(reserve("b", 3, max_tokens=2))
    metrics.step_done(1.0, len(w.step()), StepOutcome())
    assert (counted("decode_joined_sequences"), counted("decode_left_sequences")) == (3, 1)
    assert counted("step_tokens", phase="decode") == 3 and counted("decode_padding_rows") == 3


def test_choices_copy_only_written_blocks() -> None:
    """Choices of one prompt share its blocks, and each copies only the block that it writes to."""
    w = World()
    w.run(reserve("a", 6, choices=3))
    assert w.table.allocator.held_count == 2
    plan = w.batch.plan(w.stuck.append)
    assert plan is not None and len(plan.copies) == 2, "the last of three to write owns the block alone"
    tables = [row.table for row in plan.rows]
    assert len({t[0] for t in tables}) == 1 and len({t[1] for t in tables}) == 3
    w.step()
    for _ in range(3):
        w.step()
    assert w.told == [Finished("a", 1, 15, 0)] and w.table.allocator.free_count == POOL


def test_choice_ended_in_prefill_is_counted() -> None:
    """It ended in prefill, and only the others came here."""
    w = World()
    order = reserve("a", 6, choices=3, max_tokens=4)
    blocks = w.receive(order)
    attempt = w.table.attempts[("a", 1)]
    tables = w.table.fork(attempt, blocks, 2)
    going_on = [
        DecodeRequest(attempt.key, choice, order.gateway, order.sampling, table, "state", 100, 1)
        for choice, table in zip((0, 2), tables, strict=True)
    ]
    w.table.start(attempt, going_on)
    for _ in range(3):
        w.step()
    assert w.told == [Finished("a", 1, 4 + 1 + 4, 0)]


def test_resumed_tokens_count_only_to_limit() -> None:
    """Resumed tokens count towards the token limit, but not as output of the attempt that resumes."""
    w = World()
    w.run(reserve("a", 10, max_tokens=5, resumed=3))
    assert w.step() == {("a", 0): (4, FinishReason.LENGTH)}
    assert w.told == [Finished("a", 1, 2, 0, resumed_tokens=3)]


def test_received_prefix_is_not_sent_again() -> None:
    """Prompt blocks that were received and committed are reused by later attempts with the same beginning."""
    w = World()
    w.run(reserve("a", 10, text=1))
    known = w.batch.running[0].blocks.table[:2]
    second = w.accept(reserve("b", 15, text=1))
    assert second.cached_blocks == 2 and list(second.block_ids[:2]) == known
    assert w.accept(reserve("c", 15, text=1)).cached_blocks == 2, "a third block of `b` is not here yet"
    w.commit(w.table.attempts[("b", 1)].order, list(second.block_ids))
    for _ in range(9):
        w.step()
    assert w.accept(reserve("d", 15, text=1)).cached_blocks == 3
    assert w.accept(reserve("e", 12, text=1)) == OfferAccepted(second.block_ids[:3], 3), "all of a prompt may be here"
    assert w.accept(reserve("f", 15, text=2)).cached_blocks == 0


def test_failed_transfer_releases_shared_blocks() -> None:
    """A failed transfer gives back the blocks that it shared and adds none to the cache."""
    w = World()
    w.run(reserve("a", 8, text=1))
    blocks = w.receive(reserve("b", 16, text=1))
    assert w.table.allocator.refs(blocks[0]) == 2
    w.table.received_nothing(("b", 1), blocks, WorkFailed("b", 1, Interrupt.TRANSFER_FAILED, "lost"))
    assert w.table.allocator.refs(blocks[0]) == 1
    assert w.accept(reserve("c", 16, text=1)).cached_blocks == 2


def test_quarantined_blocks_are_not_reused() -> None:
    """Blocks that a sender may still write to are given to no other attempt until that has ended."""
    w = World(pool=8)
    w.run(reserve("a", 8, text=1))
    blocks = w.receive(reserve("b", 16, text=1))
    w.table.quarantine(("b", 1), blocks[2:])
    allocator = w.table.allocator
    allocator.check_invariants()
    assert allocator.quarantined_count == 2 and ("b", 1) in w.table.attempts, "it counts as holding them"
    fresh = w.receive(reserve("c", 16))
    assert not set(fresh) & set(blocks)
    assert w.table.target_blocks(("d", 1), 9, 1) is None
    w.table.received_nothing(("b", 1), blocks, Released("b", 1))
    allocator.check_invariants()
    assert allocator.quarantined_count == 0 and set(w.receive(reserve("d", 8))) == set(blocks[2:])


def test_shared_blocks_are_never_written() -> None:
    """Choices and new tokens go to blocks of their own, never to blocks that attempts share."""
    w = World()
    w.run(reserve("a", 8, text=1, max_tokens=9))
    w.run(reserve("b", 8, text=1, max_tokens=9, choices=3))
    shared = w.batch.running[0].blocks.table[:2]
    for _ in range(7):
        plan = w.batch.plan(w.stuck.append)
        assert plan is not None
        assert not {row.table[row.position // BLOCK] for row in plan.rows} & set(shared)
        assert len({row.table[row.position // BLOCK] for row in plan.rows}) == 4, (
            "each sequence writes to its own block"
        )
        w.step()


def test_release_works_in_every_phase() -> None:
    for phase in Phase:
        w = World()
        order = reserve("a", 6)
        if phase is Phase.RESERVED:
            w.table.reserve(order)
        elif phase is Phase.RECEIVING:
            blocks = w.receive(order)
        else:
            w.run(order)
        attempt = w.table.attempts[("a", 1)]
        said = w.table.close(attempt, Released("a", 1))
        if phase is Phase.RECEIVING:
            assert said == []
            said = w.table.received_nothing(("a", 1), blocks, WorkFailed("a", 1, Interrupt.TRANSFER_FAILED, "aborted"))
        assert said == [Released("a", 1)] and w.table.allocator.room == POOL and not w.table.attempts


def test_release_waits_for_step_in_flight() -> None:
    """A release during a step is reported after that step, and the step's token is not sent."""
    w = World()
    w.run(reserve("a", 6))
    w.run(reserve("b", 6))
    w.batch.plan(w.stuck.append)
    assert w.table.close(w.table.attempts[("a", 1)], Released("a", 1)) == []
    assert w.table.allocator.held_count > 2
    assert w.step() == {("b", 0): (1, None)}
    assert w.told == [Released("a", 1)]


def test_offer_must_fit_the_reservation() -> None:
    """Offers from another prefill worker, of other sizes or made twice are refused."""
    w = World()
    assert w.table.target_blocks(("a", 1), 9, 2) is None
    w.table.reserve(reserve("a", 6))
    assert "another prefill" in str(w.table.target_blocks(("a", 1), 8, 2))
    assert "3 blocks offered" in str(w.table.target_blocks(("a", 1), 9, 3))
    assert w.table.allocator.free_count == POOL
    assert w.table.target_blocks(("a", 1), 9, 2) == OfferAccepted((0, 1), 0)
    assert "receiving" in str(w.table.target_blocks(("a", 1), 9, 2))


def test_sequence_without_block_fails_alone() -> None:
    """A sequence for which no block is free is stuck by itself, and the other one goes on."""
    w = World(pool=4)
    w.run(reserve("a", 8, max_tokens=50))
    w.run(reserve("b", 6, max_tokens=50))
    while not w.stuck:
        w.step()
    assert [[s.key for s in attempt] for attempt in w.stuck] == [[("a", 1)]]
    assert ("b", 0) in w.step()


def test_stuck_attempt_leaves_as_a_whole() -> None:
    """A stuck attempt leaves with all its choices, and the others go on with its blocks."""
    w = World(pool=6)

    def stuck(sequences: list[DecodeRequest[str]]) -> None:
        attempt = w.table.attempts[sequences[0].key]
        attempt.final_report = WorkFailed(*attempt.key, Interrupt.PREEMPTED, "no block")
        w.told += w.table.ended(sequences)

    w.run(reserve("two", 4, choices=2, max_tokens=50))
    w.run(reserve("a", 7, max_tokens=50))
    for _ in range(3):
        plan = w.batch.plan(stuck)
        assert plan is not None and len(plan.rows) == 3 and not w.told
        w.step()
    # All 6 blocks are held. The first choice finds none for its fifth token, and neither may the second one write any more.
    assert w.table.allocator.free_count == 0
    while not w.told:
        plan = w.batch.plan(stuck)
        assert plan is not None
        keys = [row.running.key[0] for row in plan.rows]
        w.batch.apply([(50, None)] * len(plan.rows))
    assert w.told == [WorkFailed("two", 1, Interrupt.PREEMPTED, "no block", 2 * 4)]
    assert "two" not in keys and "a" in keys and not plan.copies
    assert w.table.allocator.held_count == sum(-(-s.blocks.length // BLOCK) for s in w.batch.running)


def test_release_reports_emitted_tokens() -> None:
    """A release reports the tokens sent so far; first tokens and those of a step in flight are not included."""
    w = World()
    w.run(reserve("a", 6, choices=2, resumed=2, max_tokens=9))
    w.step()
    w.step()
    w.batch.plan(w.stuck.append)
    assert w.table.close(w.table.attempts[("a", 1)], Released("a", 1)) == []
    w.step()
    assert w.told == [Released("a", 1, 4)], "two choices, two tokens each; those of the step in flight were not sent"
    w.table.reserve(reserve("b", 6))
    assert w.table.close(w.table.attempts[("b", 1)], Released("b", 1)) == [Released("b", 1, 0)]


def test_failed_step_ends_its_sequences() -> None:
    w = World()
    w.run(reserve("a", 6, choices=2))
    w.batch.plan(w.stuck.append)
    assert len(w.batch.abandon()) == 2 and not w.batch.running


def test_undrawable_sequence_ends_alone() -> None:
    """A sequence without a token that can be drawn ends, and the others in its step go on."""
    w = World()
    w.run(reserve("a", 6))
    w.run(reserve("b", 6))
    w.batch.plan(w.stuck.append)
    outcome = w.batch.apply([None, (50, None)])
    assert [s.key for s in outcome.broken] == [("a", 1)] == [s.key for s in outcome.ended]
    said = w.table.close(w.table.attempts[("a", 1)], WorkFailed("a", 1, Interrupt.ENGINE_ERROR, "not finite"))
    assert len(said) == 1 and w.table.ended(outcome.ended) == []
    assert w.step() == {("b", 0): (2, None)}


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_attempts_report_once_and_free_blocks(data: st.DataObject) -> None:
    """Each attempt gets one final report and all blocks come back, for random sequences of events."""
    w = World(pool=400)
    receiving: dict[str, tuple[Reserve, list[int]]] = {}
    made = 0
    for _ in range(data.draw(st.integers(1, 50))):
        match data.draw(st.sampled_from(["offer", "commit", "doubt", "lose", "plan", "step", "close"])):
            case "offer":
                made += 1
                order = reserve(
                    f"r{made}",
                    data.draw(st.integers(1, 12)),
                    max_tokens=data.draw(st.integers(2, 6)),
                    choices=data.draw(st.integers(1, 3)),
                    gateway=made % 2,
                    text=data.draw(st.sampled_from([None, 1, 2])),
                )
                receiving[order.request_id] = (order, w.receive(order))
            case "doubt" if receiving.keys() - w.table_doubts():
                order, blocks = receiving[data.draw(st.sampled_from(sorted(receiving.keys() - w.table_doubts())))]
                ours = [block for block in blocks if w.table.allocator.refs(block) == 1]
                w.table.quarantine(
                    (order.request_id, 1), data.draw(st.lists(st.sampled_from(ours), unique=True)) if ours else []
                )
            case "commit" if receiving.keys() - w.table_doubts():
                order, blocks = receiving.pop(data.draw(st.sampled_from(sorted(receiving.keys() - w.table_doubts()))))
                if w.table.attempts[(order.request_id, 1)].final_report is None:
                    w.commit(order, blocks)
                else:
                    w.told += w.table.received_nothing((order.request_id, 1), blocks, Released(order.request_id, 1))
            case "lose" if receiving:
                order, blocks = receiving.pop(data.draw(st.sampled_from(sorted(receiving))))
                key = (order.request_id, 1)
                w.told += w.table.received_nothing(key, blocks, WorkFailed(*key, Interrupt.TRANSFER_FAILED, "lost"))
            case "plan" if w.batch.in_flight is None:
                w.batch.plan(w.stuck.append)
            case "step":
                w.step(data.draw(st.sampled_from([50, STOP_TOKEN])))
            case "close" if w.table.attempts:
                attempt = w.table.attempts[data.draw(st.sampled_from(sorted(w.table.attempts)))]
                w.told += w.table.close(attempt, Released(*attempt.key))
        w.table.allocator.check_invariants()
    for order, blocks in receiving.values():
        key = (order.request_id, 1)
        w.told += w.table.received_nothing(key, blocks, WorkFailed(*key, Interrupt.TRANSFER_FAILED, "lost"))
    while w.batch.running or w.batch.in_flight:
        w.step()
    assert not w.table.attempts and w.table.allocator.free_count + w.table.allocator.cached_count == 400
    assert not w.stuck
    assert sorted(f.request_id for f in w.told) == sorted(f"r{n}" for n in range(1, made + 1))
