"""The second tier of a prefill worker's KV: what is copied there comes back, or is computed."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kv.allocator import BlockAllocator
from kvtransfer.memory.layout import KvLayout
from kvtransfer.memory.pool import PoolRows
from kvtransfer.memory.tier import TierFile
from prefill_worker.core import PrefillCore, PrefillStepResult
from prefill_worker.prompts import FetchPhase, Key, PromptTable
from prefill_worker.tier import Slot
from prefill_worker.tier_copies import TierCopies
from proto.codec import pack_tokens, split_hashes
from proto.errors import BadOption
from proto.messages import CacheMiss, Chunk, Destination, Prefill, Release, Step
from proto.sampling import Sampling
from runtime.process.rate_limited_log import RateLimitedLog
from runtime.settings.workers import WorkerSettings
from tests.workers.test_batch import BLOCK
from tests.workers.test_fetches import Ports

LAYOUT = KvLayout(2, 1, 4, BLOCK, "float32")
POOL_BLOCKS = 6


def pool() -> torch.Tensor:
    return torch.rand(LAYOUT.shape(POOL_BLOCKS))


def test_tier_file_returns_blocks_unchanged(tmp_path: Path) -> None:
    """Blocks come back from the tier file as they were, up to the first one that is damaged."""
    memory = pool()
    file = TierFile(PoolRows(memory, LAYOUT), 4, str(tmp_path))
    before, digests = memory.clone(), file.write([0, 1, 2], [3, 0, 2])
    memory.zero_()
    assert file.read([3, 0, 2], digests, [5, 4, 3]) == 3
    assert all(torch.equal(memory[5 - at], before[at]) for at in range(3))
    assert file.read([3, 0, 2], [digests[0], bytes(8), digests[2]], [0, 1, 2]) == 1, "nothing behind what is lost"
    assert not list(tmp_path.iterdir()), "the file has no name"
    file.close()


def test_bad_tier_settings_name_their_option(tmp_path: Path) -> None:
    """A tier without room, or whose folder does not exist, is refused with the name of the option."""
    rows, warn = PoolRows(pool(), LAYOUT), RateLimitedLog(lambda event, **values: None)

    async def made(**options: object) -> None:
        settings = WorkerSettings(role="prefill", model="m", **options)  # type: ignore[arg-type]
        TierCopies(settings, rows, warn, lambda blocks: None, lambda: None)

    for options, option in (
        ({"kv_tier_gib": 1e-9}, "--kv-tier-gib"),
        ({"kv_tier_gib": 0.1, "kv_tier_folder": str(tmp_path / "nowhere")}, "--kv-tier-folder"),
    ):
        with pytest.raises(BadOption) as raised:
            asyncio.run(made(**options))
        assert raised.value.option == option


@dataclass
class Copies:
    """Copies that the test carries out."""

    saves: list[tuple[Key, Sequence[bytes], Sequence[int], Sequence[int]]] = field(default_factory=list)
    loads: list[tuple[Key, Sequence[Slot], Sequence[int]]] = field(default_factory=list)

    def save(self, key: Key, hashes: Sequence[bytes], blocks: Sequence[int], slots: Sequence[int]) -> None:
        self.saves.append((key, hashes, blocks, slots))

    def load(self, key: Key, slots: Sequence[Slot], blocks: Sequence[int]) -> None:
        self.loads.append((key, slots, blocks))


class World:
    """A prefill core with a second tier, the contents of both tiers, and a coordinator's picture of what is cached."""

    def __init__(self, slots: int) -> None:
        self.ports, self.copies = Ports(), Copies()
        self.table = PromptTable(BlockAllocator(POOL_BLOCKS), BLOCK)
        self.core = PrefillCore(self.ports, self.table, vocab_size=99, step_tokens_max=64, tokens_forwarded=lambda: 0)
        self.tier = self.core.use_tier(self.copies, slots)
        self.pool: dict[int, bytes] = {}  # by block, the hash of what is in it
        self.slots: dict[int, bytes] = {}
        self.known: set[bytes] = set()
        self.asked = 0

    def ask(self, text: int, blocks: int) -> Key:
        """A prompt of so many full blocks and one token more; what the coordinator believes to be cached is used."""
        self.asked += 1
        hashes = [bytes([text, at]) * 8 for at in range(blocks)]
        believed = next((at for at, one in enumerate(hashes) if one not in self.known), blocks)
        tokens = list(range(1, blocks * BLOCK + 2))
        order = Prefill(
            f"r{self.asked}", 1, len(tokens), Sampling(max_tokens=5), 1, 0, 0, Destination("g", 1), Destination("d", 2), BLOCK,
            b"".join(hashes), believed * BLOCK,
        )  # fmt: skip
        self.core.order(order, pack_tokens(tokens))
        return (order.request_id, 1)

    def copy(self, *, fails: bool) -> None:
        """The oldest copy under way is done."""
        if self.copies.saves:
            key, hashes, blocks, slots = self.copies.saves.pop(0)
            done = [] if fails else list(hashes)
            assert [self.pool[block] for block in blocks] == list(hashes), "a block was given away while it was copied"
            self.slots.update(zip(slots, done, strict=False))
            self.tier.saved(key, hashes, slots, [one[:8] for one in done])
        elif self.copies.loads:
            key, slots_of, blocks = self.copies.loads.pop(0)
            count = 0 if fails else len(blocks)
            for slot, block in zip(slots_of[:count], blocks, strict=False):
                assert self.table.allocator.refs(block) == 1
                self.pool[block] = self.slots[slot.number]
            self.tier.loaded(key, count, 1.0)
            prompt = self.table.prompts.get(key)
            if prompt is not None and prompt.final_report is None:
                full = prompt.cached_tokens // BLOCK
                assert [self.pool[block] for block in prompt.blocks[:full]] == prompt.hashes[:full], "a wrong token"

    def compute(self, key: Key) -> None:
        """All of a prompt at once, if it waits for nothing; it then ends."""
        prompt = self.table.prompts.get(key)
        if prompt is None or prompt.fetch is not FetchPhase.NONE or prompt.final_report is not None:
            return
        full = prompt.cached_tokens // BLOCK
        assert [self.pool[block] for block in prompt.blocks[:full]] == prompt.hashes[:full], "a wrong token"
        self.core.order(
            Step(1, (Chunk(*key, prompt.computed_tokens, len(prompt.tokens) - prompt.computed_tokens),)), b""
        )
        begun = self.core.begin_step()
        assert begun is not None
        for hash_, block in zip(prompt.hashes, prompt.blocks, strict=False):
            self.pool[block] = hash_
        self.core.step_done(begun, PrefillStepResult(1.0, {}, frozenset()))
        prompt.sending = False
        self.core.order(Release(*key), b"")

    def report(self) -> None:
        inserted, evicted = self.core.take_changes(1000)
        self.known |= set(split_hashes(inserted))
        self.known -= set(split_hashes(evicted))


def filled(prompts: int) -> World:
    """So many prompts of three blocks were computed, copied and reported."""
    world = World(slots=20)
    for text in range(prompts):
        world.compute(world.ask(text, 3))
        while world.copies.saves:
            world.copy(fails=False)
        world.report()
    return world


def test_evicted_prompt_returns_from_tier() -> None:
    """A prompt that the pool has evicted is loaded from the tier and is not computed again."""
    world = filled(4)
    assert len(world.known) == 12 > POOL_BLOCKS, "all is cached, for the coordinator"
    key = world.ask(0, 3)
    assert len(world.copies.loads[0][1]) == 3
    world.copy(fails=False)
    assert world.table.prompts[key].cached_tokens == 3 * BLOCK
    assert CacheMiss not in map(type, world.ports.said)
    world.compute(key)
    assert world.tier.counts() == (12, 3 * BLOCK, 0)


def test_unreadable_blocks_are_computed() -> None:
    """Blocks that cannot be read from the tier are reported as a cache miss and computed."""
    world = filled(3)
    key = world.ask(0, 3)
    world.copy(fails=True)
    assert world.ports.said[-1] == CacheMiss(*key, 0)
    world.compute(key)
    assert world.tier.counts()[2] == 1


def test_slow_tier_is_not_used() -> None:
    """A prompt is computed if loading it from the tier would take longer."""
    world = filled(3)
    key = world.ask(0, 3)
    world.copies.loads.clear()
    world.tier.loaded(key, 3, 1e6)
    world.table.prompts[key].sending = False
    world.core.order(Release(*key), b"")
    other = world.ask(1, 3)
    assert not world.copies.loads and world.ports.said[-1] == CacheMiss(*other, 0)


EVENTS = ("ask", "ask", "compute", "compute", "copy", "copy", "copy", "fail", "release", "report", "lost", "forget")


@settings(max_examples=300, deadline=None)
@given(slots=st.integers(1, 9), events=st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 3)), max_size=60))
def test_tier_never_loses_a_block(slots: int, events: list[tuple[str, int]]) -> None:
    """No block is lost, given away or filled with wrong content, for random sequences of events."""
    world, keys = World(slots), list[Key]()
    for event, number in events:
        match event:
            case "ask":
                keys.append(world.ask(number, 1 + number % 3))
            case "compute" if keys:
                world.compute(keys[number % len(keys)])
            case "copy" | "fail":
                world.copy(fails=event == "fail")
            case "release" if keys:
                world.core.order(Release(*keys[number % len(keys)]), b"")
            case "report":
                world.report()
            case "lost":
                world.core.coordinator_lost("planted")
                world.known.clear()
            case "forget":
                world.tier.forget([bytes([number, 0]) * 8])
        world.table.allocator.check_invariants()
    while world.copies.saves or world.copies.loads:
        world.copy(fails=False)
    for key in keys:
        prompt = world.table.prompts.get(key)
        if prompt is not None:
            prompt.sending = False
            world.core.order(Release(*key), b"")
    assert not world.table.prompts and not world.table.allocator.held_count
    used = world.tier.counts()[0]
    assert used + len(world.tier._free) == slots
    assert not [count for count in Counter(world.tier._free).values() if count > 1]
    world.report()
    there = {one for one in world.known if world.table.allocator.knows(one) or one in world.tier._slots}
    assert world.known == there, "what is in neither tier is not believed to be"


def test_copies_end_before_pool_is_freed(tmp_path: Path) -> None:
    """Copies that run on threads end before the memory of the pool is given away."""
    memory = pool()

    async def run() -> None:
        settings_ = WorkerSettings(role="prefill", model="m", kv_tier_gib=0.001, kv_tier_folder=str(tmp_path))
        warned: list[str] = []
        changed: list[Sequence[int]] = []
        warn = RateLimitedLog(lambda event, **values: warned.append(event))
        copies = TierCopies(settings_, PoolRows(memory, LAYOUT), warn, changed.append, lambda: None)
        done = asyncio.Event()

        class Told:
            saved_digests: Sequence[bytes] = ()
            loaded_blocks = 0

            def saved(self, key: Key, hashes: object, slots: object, digests: Sequence[bytes]) -> None:
                self.saved_digests = digests
                done.set()

            def loaded(self, key: Key, blocks: int, ms: float) -> None:
                self.loaded_blocks = blocks
                done.set()

        told = Told()
        copies.tier = told  # type: ignore[assignment]
        before = memory[1].clone()
        copies.save(("a", 1), [b"h" * 16], [1], [0])
        await asyncio.wait_for(done.wait(), 5)
        done.clear()
        memory[1].zero_()
        copies.load(("a", 1), [Slot(0, told.saved_digests[0])], [2])
        await asyncio.wait_for(done.wait(), 5)
        assert told.loaded_blocks == 1 and torch.equal(memory[2], before) and changed == [[2]] and not warned
        await copies.close()

    asyncio.run(run())
