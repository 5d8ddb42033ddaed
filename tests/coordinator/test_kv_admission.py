"""The room in a decode worker's pool, against a worker simulated token by token."""

import random
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.kv_admission.admission import NEVER, KvAdmission, KvDemand
from tests.coordinator.consistent import check_room
from tests.coordinator.world import submit
from tests.helpers import first

lives = st.builds(KvDemand, st.integers(1, 20), st.integers(0, 16), st.sampled_from([1, 1, 1, 2, 3]), st.just(NEVER))


def key(number: int) -> tuple[str, int]:
    return (f"r{number}", 1)


def test_whole_life_counts_blocks() -> None:
    """The blocks of a whole life cover the prompt, the answer and each choice."""

    def whole(prompt: int, *, max_tokens: int, choices: int = 1, resumed: int = 0) -> int:
        return KvDemand.of(submit("a", prompt, max_tokens=max_tokens, choices=choices, resumed=resumed)).whole(4)

    assert whole(8, max_tokens=1) == 2
    assert whole(8, max_tokens=2) == 3
    assert whole(6, max_tokens=2, choices=3) == 1 + 3
    assert whole(6, max_tokens=5, choices=2) == 1 + 2 * 2
    assert whole(10, max_tokens=5, resumed=4) == 3


def naive_peak(lives: list[KvDemand], starts: list[int | None], now: int, block_size: int) -> int:
    """The highest sum over all steps from now on; a start of None: pending since step 0."""
    horizon = now + 60
    sums = []
    for step in range(now, horizon):
        sums.append(0)
        for life, start in zip(lives, starts, strict=True):
            if start is None:
                sums[-1] += life.grown(step, block_size)
            elif step <= start + life.left:
                sums[-1] += life.grown(step - start, block_size)
    return max(sums)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(lives, st.one_of(st.none(), st.integers(0, 5))), max_size=12),
    lives,
    st.integers(1, 5),
    st.integers(0, 90),
)
def test_peak_equals_stepwise_count(
    there: list[tuple[KvDemand, int | None]], candidate: KvDemand, block_size: int, kv_blocks: int
) -> None:
    """The peak equals a count step by step, and decides whether a candidate fits."""
    room = KvAdmission(kv_blocks, block_size)
    for number, (life, _) in enumerate(there):
        room.place(key(number), life)
    for number, (_, start) in enumerate(there):
        if start is not None:
            room.joined(key(number), start)
    check_room(room)
    now = max((start for _, start in there if start is not None), default=0)
    over = [n for n, (life, start) in enumerate(there) if start is not None and start + life.left < now]
    assert all(room.release(key(number)) for number in over)
    known = [life for number, (life, _) in enumerate(there) if number not in over]
    starts = [start for number, (_, start) in enumerate(there) if number not in over]
    assert room.peak == naive_peak(known, starts, now, block_size)
    assert room.fits(candidate) == (naive_peak([*known, candidate], [*starts, None], now, block_size) <= kv_blocks)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.builds(KvDemand, st.integers(1, 6), st.integers(0, 5), st.sampled_from([1, 2]), st.just(NEVER)),
        min_size=1,
        max_size=3,
    )
)
def test_pending_peak_is_worst_join_order(found: list[KvDemand]) -> None:
    """The peak of attempts just placed is what the worst order of joining needs."""
    room = KvAdmission(1000, 2)
    for number, life in enumerate(found):
        room.place(key(number), life)
    worst = 0
    for starts in product(range(7), repeat=len(found)):
        for step in range(14):
            held = 0
            for life, start in zip(found, starts, strict=True):
                if step <= start + life.left:
                    held += life.grown(step - start, 2)
            worst = max(worst, held)
    assert room.peak == worst


def test_late_short_meets_long_at_peak() -> None:
    """A short attempt does not fit if it could meet a long one at its longest."""
    room = KvAdmission(16, 1)
    room.place(key(0), KvDemand(2, 9))
    room.joined(key(0), 0)
    short = KvDemand(5, 1)
    assert room.peak == 11 and not room.fits(short), "together they would need 11, but eight steps late 17"
    room.kv_blocks = 17
    assert room.fits(short)
    room.place(key(1), short)
    room.joined(key(1), 1)
    assert room.peak == 11


def test_more_fit_than_by_whole_lives() -> None:
    """More attempts fit than if each counted with its whole life."""
    room = KvAdmission(100, 1)
    placed = 0
    for step in range(0, 60, 4):
        room.reached(step)
        if room.fits(KvDemand(10, 30)):
            room.place(key(step), KvDemand(10, 30))
            room.joined(key(step), step)
            placed += 1
        if step >= 30:
            room.release(key(step - 32))
        if step == 20:
            assert placed == 3 > 100 // 40
    assert room.peak <= 100


class Decode:
    """A decode worker, honest and unlucky: it counts every block of every sequence; answers end when they like."""

    def __init__(self, rnd: random.Random, kv_blocks: int, block_size: int) -> None:
        self.random, self.kv_blocks, self.block_size = rnd, kv_blocks, block_size
        self.steps = 0
        self.prompts: dict[tuple[str, int], KvDemand] = {}
        self.running: dict[tuple[str, int], tuple[KvDemand, int, list[int]]] = {}
        """Life, step of joining, and after how many steps each choice ends."""
        self.peak = 0

    def count(self) -> None:
        held = sum(-(-life.prompt_tokens // self.block_size) for life in self.prompts.values())
        for life, joined, ends in self.running.values():
            alive = [end for end in ends if joined + end >= self.steps]
            shared = life.prompt_tokens // self.block_size
            tokens = life.prompt_tokens + self.steps - joined
            at_first = self.steps == joined
            own = -(-tokens // self.block_size) - shared
            held += shared + (own if at_first else own * len(alive))
        self.peak = max(self.peak, held)
        assert held <= self.kv_blocks, "a sequence finds no block"

    def step(self) -> list[tuple[str, tuple[str, int] | None, int]]:
        """One token for each; what is to be said of it."""
        self.steps += 1
        self.count()
        over = [k for k, (_, at, ends) in self.running.items() if max(ends) <= self.steps - at]
        for ended in over:
            del self.running[ended]
        return [*(("gone", ended, 0) for ended in over), ("steps", None, self.steps)]


def load(seed: int, *, lockstep_from_placement: bool = False) -> int:
    """Six hundred requests at a worker whose news comes late; its highest count of blocks, and an AssertionError if that is
    beyond the pool. With `lockstep_from_placement`, attempts count as running from the moment they are placed."""
    rnd = random.Random(seed)
    block_size, kv_blocks = rnd.choice([1, 2, 4, 16]), rnd.randint(20, 120)
    worker, room = Decode(rnd, kv_blocks, block_size), KvAdmission(kv_blocks, block_size)
    said: list[tuple[str, tuple[str, int] | None, int]] = []
    greedy, late = rnd.random(), rnd.random()
    for number in range(600):
        life = KvDemand(rnd.randint(1, 60), rnd.choice([0, 1, 5, 40]), rnd.choice([1, 1, 1, 2, 4]))
        if room.fits(life):
            before = room.peak
            room.place(key(number), life)
            assert before <= room.peak <= kv_blocks
            if lockstep_from_placement:
                room.joined(key(number), room.steps)
            worker.prompts[key(number)] = life
        worker.count()
        while worker.prompts and rnd.random() < 0.3:
            joining = rnd.choice(sorted(worker.prompts))
            life = worker.prompts.pop(joining)
            ends = [life.left if rnd.random() < greedy else rnd.randint(0, life.left) for _ in range(life.choices)]
            if max(ends) == 0 or rnd.random() < 0.1:  # its first tokens were its last ones, or it was cancelled
                said.append(("gone", joining, 0))
                continue
            worker.running[joining] = (life, worker.steps, ends)
            said.append(("joined", joining, worker.steps))
        if rnd.random() < 0.8 and worker.running:
            said += worker.step()
        while said and rnd.random() > late * 0.9:
            what, about, steps = said.pop(0)
            before = room.peak
            if what == "joined" and about is not None:
                room.joined(about, steps)
            elif about is not None:
                assert room.release(about)
            else:
                room.reached(steps)
            assert room.peak <= before, "news that comes late leaves a count that is too high, never one too low"
        if number % 50 == 0:
            check_room(room)
    return worker.peak * 3 // kv_blocks


@pytest.mark.parametrize("seed", first(80, range(150)))
def test_pool_never_runs_out(seed: int) -> None:
    """The pool never runs out, whatever the lengths, delays and orders."""
    assert load(seed) >= 1, f"seed {seed}: the pool was never under pressure"


def test_plain_peak_formula_runs_out() -> None:
    """The same test sees it when attempts still to join are taken to run already."""
    broken = 0
    for seed in range(30):
        try:
            load(seed, lockstep_from_placement=True)
        except AssertionError as error:
            broken += "finds no block" in str(error)
    assert broken > 3


def test_adopted_attempts_count_whole() -> None:
    """Adopted attempts count with all their blocks, and may go beyond the pool."""
    room = KvAdmission(10, 4)
    room.adopt(key(0), 7)
    room.adopt(key(1), 6)
    assert room.peak == 13 and not room.fits(KvDemand(1, 1))
    room.joined(key(0), 5)
    assert room.peak == 13
    assert room.release(key(1)) and not room.release(key(1))
    assert room.fits(KvDemand(8, 4)) and not room.fits(KvDemand(9, 4))


def test_overcommit_counts_expected_length() -> None:
    """Overcommit counts the expected length, and twice as much once an attempt outlives it."""
    room = KvAdmission(40, 1)
    for number in range(3):
        life = KvDemand(4, 30, expected=6)
        assert room.fits(life)
        room.place(key(number), life)
    assert room.peak == 30 and not room.fits(KvDemand(4, 30))
    for number in range(3):
        room.joined(key(number), 0)
    room.reached(6)
    assert room.peak == 30
    room.reached(7)
    check_room(room)
    assert room.peak == 3 * (4 + 13) and not room.fits(KvDemand(1, 0)) and room.held_now(key(0)) == 11
    room.reached(14 + 1)
    assert room.peak == 3 * (4 + 27)
    room.reached(29)
    assert room.peak == 3 * (4 + 30), "no more than it may have"
    check_room(room)
    for number in range(3):
        assert room.release(key(number))
    assert room.peak == 0 and len(room) == 0
