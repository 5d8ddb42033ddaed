"""Blocks that several streams share are counted once on their decode worker, and the pool never runs out all the same."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.kv_utilization_load import Figures, Job, OverloadedCluster
from coordinator.events import PeerDown
from proto.messages import Released
from proto.parts import PrefixPart
from proto.progress import DecodeProgress, SharedPrefix
from scheduler.kv_admission.admission import NEVER, KvAdmission, KvDemand
from scheduler.kv_admission.shared_blocks import SharedBlocks
from tests.coordinator.consistent import all_covered, check_room
from tests.coordinator.consistent import covered as covered_by_others
from tests.coordinator.test_kv_admission import key
from tests.coordinator.world import MODEL, Harness, submit
from tests.helpers import first
from tests.uniform_cluster import FIRST_DECODE

SHARED = 2048


def held_at(step: int, ends: dict[tuple[str, int], int], parts: dict[tuple[str, int], dict[int, int]]) -> int:
    """Blocks of all chains that those alive at a step hold, each once."""
    alive = [parts[name] for name, end in ends.items() if end >= step and name in parts]
    return sum(max(part.get(chain, 0) for part in alive) for chain in {chain for part in alive for chain in part})


@settings(max_examples=150, deadline=None)
@given(st.randoms(use_true_random=False))
def test_shared_block_is_counted_once(rnd: Random) -> None:
    """Each shared block counts once for the streams alive at any step."""
    shared, covered = SharedBlocks(), dict[tuple[str, int], int]()
    ends, parts = dict[tuple[str, int], int](), dict[tuple[str, int], dict[int, int]]()
    for number in range(rnd.randint(1, 25)):
        move = rnd.random()
        if move < 0.5 or not ends:
            name = key(number)
            ends[name], parts[name] = rnd.choice([NEVER, rnd.randint(0, 9)]), {}
        name = rnd.choice(sorted(ends))
        if move < 0.7:
            more = {
                chain: rnd.randint(parts[name].get(chain, 1), 6) for chain in rnd.sample(range(4), rnd.randint(1, 3))
            }
            parts[name] = {**parts[name], **more}
            covered[name] = covered.get(name, 0) + shared.hold(name, parts[name], ends[name])
        elif move < 0.85:
            ends[name] = rnd.choice([NEVER, rnd.randint(0, 9)])
            shared.moved(name, ends[name])
        else:
            shared.release(name)
            del ends[name], parts[name]
            covered.pop(name, None)
        if rnd.random() < 0.5:
            continue  # several changes are settled together
        for changed, by in shared.settle().items():
            covered[changed] += by
        assert all(covered_by_others(shared, name) == covered.get(name, 0) for name in ends)
        for step in (*range(11), NEVER):
            counted = sum(sum(parts[name].values()) - covered.get(name, 0) for name, end in ends.items() if end >= step)
            assert counted == held_at(step, ends, parts)


def test_prefix_shared_once_worker_reports_it() -> None:
    """A prefix counts once from the worker's report until its last holder ends."""
    room = KvAdmission(100, 1)
    for number in range(2):
        room.place(key(number), KvDemand(40, 5))
    assert room.peak == 90 and not room.fits(KvDemand(40, 5)), "what is only placed may find the prefix gone"
    assert room.shares(key(0), {1: 30}) and room.shares(key(1), {1: 30, 2: 8})
    assert room.peak == 60 and all_covered(room) == 30 and room.fits(KvDemand(35, 5))
    room.joined(key(0), 0)
    assert room.peak == 60
    assert room.release(key(1))
    check_room(room)
    assert room.peak == 45 and all_covered(room) == 0, "the one that stays counts all of it"
    assert not room.shares(key(0), {1: 41}), "more than its prompt has"
    assert room.shares(key(9), {1: 3}), "of one that is over"


def test_prefix_count_passes_to_next_stream() -> None:
    """Blocks counted with the longest stream are counted with another one when it ends."""
    room = KvAdmission(1000, 4)
    for number, left in enumerate((400, 80, 200)):
        room.place(key(number), KvDemand(64, left))
        room.shares(key(number), {7: 12})
        room.joined(key(number), 0)
    assert all_covered(room) == 24
    before = room.peak
    for number, shared in ((0, 12), (2, 0)):
        assert room.release(key(number))
        check_room(room)
        assert all_covered(room) == shared and room.peak <= before
    assert room.peak == KvDemand(64, 80).whole(4)


def test_retained_room_must_fit_in_full() -> None:
    """Room of an interrupted attempt is kept only where it fits in full without the shared prefix."""
    h = Harness.make(prefill=2, kv_blocks=10)
    for name in ("a", "b"):
        h.receive(1, submit(name, 16, max_tokens=5))
    prefixes = tuple(SharedPrefix(name, 1, (PrefixPart(1, 4),)) for name in ("a", "b"))
    h.receive(20, DecodeProgress(1, 5, 0, (), prefixes))
    h.receive(1, submit("c", 16, max_tokens=1))
    decode = h.core.cluster.pools[MODEL].decode[20]
    assert len(decode.allocations) == 3 and decode.free_blocks == 0
    h.post(PeerDown(h.core.cluster.requests["b"].prefill_incarnation, "killed"))
    h.receive(20, Released("b", 1))
    assert decode.admission.peak <= 10, "b's blocks were those of a, which counts them still"
    assert "b" not in h.core.cluster.pools[MODEL].retained


class Sharing(OverloadedCluster):
    """Clients leave at any time; what is really held is compared with what the coordinator counts."""

    most_taken = most_shared = 0

    def run_steps(self, steps: int, leaving: float) -> Figures:
        cluster, rnd = self.cluster, Random(1)
        for step in range(steps):
            figures = self.run(0, 1)
            room = cluster.core.cluster.pools[MODEL].decode[FIRST_DECODE].admission
            held = self.decode.allocator.held_count
            assert held <= room.taken <= self.kv_blocks, "more is held than counted"
            self.most_taken = max(self.most_taken, room.taken)
            self.most_shared = max(self.most_shared, all_covered(room))
            if step % 20 == 0:
                check_room(room)
            if rnd.random() < leaving and cluster.core.cluster.requests:
                cluster.cancel(rnd.choice(sorted(cluster.core.cluster.requests)))
        return figures


def load(seed: int) -> Sharing:
    """Prompts of a few texts of any length, answers of any length, pools that hold few of them, news that comes late."""
    rnd = Random(seed)
    most, block_size = rnd.choice([24, 64, 120]), rnd.choice([1, 4, 16])
    texts = rnd.choice([1, 2, 5])

    def draw(random: Random) -> Job:
        prompt = random.randint(1, 3 * most)
        outputs = tuple(random.randint(1, most) for _ in range(random.choice([1, 1, 1, 3])))
        return Job(prompt, most, outputs, str(random.randrange(texts)), random.randint(0, prompt))

    world = Sharing(draw, (12 * most) // block_size + 8, block_size, overload=3.0, seed=seed)
    figures = world.run_steps(250, rnd.choice([0.0, 0.1, 0.5]))
    assert figures.refused_after_prefill == figures.out_of_memory == 0
    return world


SEEDS = [seed for seed in range(25) if seed != 6]  # in 6, no two attempts with one text run at once


@pytest.mark.parametrize("seed", first(8, SEEDS))
def test_sharing_never_exhausts_pool(seed: int) -> None:
    """The pool never runs out, whatever is shared, cancelled or given up."""
    world = load(seed)
    assert world.most_taken > 0.8 * world.kv_blocks, "the pool was never under pressure"
    assert world.most_shared > 0
    world.decode.allocator.check_invariants()


def streams(shared: bool) -> float:
    """Mean number of streams at once, of prompts that begin with the same 2,048 tokens."""

    def draw(random: Random) -> Job:
        return Job(SHARED + 64, 512, (random.randint(1, 512),), "system prompt" if shared else "", SHARED)

    world = OverloadedCluster(draw, 2048, 16, overload=8.0)
    figures = world.run(400, 300)
    assert figures.refused_after_prefill == figures.out_of_memory == 0
    return figures.output_tokens / figures.steps


def test_shared_prefix_multiplies_streams() -> None:
    """Streams that share a long prefix run more than three times as many at once."""
    assert streams(shared=True) > 3 * streams(shared=False)
