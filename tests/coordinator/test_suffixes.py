"""Where a prompt is computed of which a decode worker has the beginning, and that nobody gets ahead of others by it."""

from collections import Counter
from hashlib import blake2b

import pytest

from coordinator.core import Core
from coordinator.event_log.timeline import Placed, Timeline
from coordinator.events import Limits
from lab.cluster.decode import ClusterDecodeWorker
from lab.cluster.surroundings import Timing
from proto.limits import HASH_BYTES
from scheduler.limits import Prices
from tests.coordinator.logged_core import LoggedCore, as_logged, replay
from tests.uniform_cluster import UniformCluster

BLOCK = 16
STEP_TOKENS = 256


def names(tenant: str, session: str, blocks: int) -> bytes:
    found, last = b"", b""
    for number in range(blocks):
        last = blake2b(last + f"{tenant} {session} {number}".encode(), digest_size=HASH_BYTES).digest()
        found += last
    return found


class World(UniformCluster):
    def __init__(
        self,
        *,
        decode_blocks: int = 4000,
        rate: float = 2000.0,
        core: type[Core] = Core,
        computes_suffixes: bool = True,
        fetches: bool = False,
    ) -> None:
        limits = Limits(prices=Prices(1.0, 0.0), queue_wait_s_max=1e6, step_tokens=STEP_TOKENS, queue_tokens_max=10**9)
        timing = Timing(prefill_tokens_per_s=rate, decode_step_s=0.02, hand_over_s=(0.002, 0.002), report_s=0.001)
        super().__init__(
            limits,
            timing,
            batched=True,
            decode_blocks=decode_blocks,
            max_seqs=64,
            computes_suffixes=computes_suffixes,
            fetches=fetches,
            core=core,
        )

    def turn(self, name: str, session: str, prompt: int, output: int, tenant: str = "a") -> None:
        """One that goes on from whatever this session's last was."""
        hashes = names(tenant, session, (prompt + output) // BLOCK)
        ends = prompt // BLOCK * HASH_BYTES
        self.submit(name, tenant, prompt, output, block_hashes=hashes[:ends], answer_hashes=hashes[ends:])

    def computed(self) -> Counter[str]:
        """Prompt tokens by request, wherever."""
        found: Counter[str] = Counter()
        for worker in self.prefill.values():
            found.update({name: tokens for (name, _), tokens in worker.computed.items()})
        return found

    @property
    def on_decode(self) -> int:
        return self.core.cluster.counters["suffixes_on_decode"]


def test_turn_runs_where_its_kv_is() -> None:
    """The next turn is computed where its KV is while the prefill worker is busy."""
    world = World(core=LoggedCore)
    world.turn("t0", "s", 800, 80)
    world.run(5.0)
    for number in range(4):
        world.submit(f"long-{number}", "b", 4000)
    world.at(5.5, world.turn, "t1", "s", 960, 40)
    world.run(20.0)
    assert world.on_decode == 1 and world.requests["t1"].cached_tokens == 864, (
        "the answer included, but for its last token"
    )
    assert "t1" not in world.computed() and world.ttft_s["t1"] < 0.5
    world.turn("t2", "s", 1200, 40)
    world.run(40.0)
    assert world.requests["t2"].cached_tokens >= 960
    story = Timeline("t1")
    assert replay(as_logged(world.core).event_log()).run(story) is None
    [placed] = [entry for entry in story.finish() if isinstance(entry, Placed)]
    assert placed.workers == "decode-10000" and 0 < placed.there_s < placed.elsewhere_s, "explain says why"


def test_idle_prefill_worker_takes_next_turn() -> None:
    """An idle prefill worker computes the next turn if streams run on the decode worker."""
    world = World(rate=400.0)
    world.turn("t0", "s", 800, 8)
    for number in range(8):
        world.submit(f"stream-{number}", "b", 64, 2000)
    world.run(8.0)
    world.turn("t1", "s", 1000, 8)
    world.run(20.0)
    assert world.on_decode == 0 and world.computed()["t1"] > 0


@pytest.mark.parametrize("added", [400, 1200])
def test_suffix_never_exceeds_its_prefix(added: int) -> None:
    """A turn is computed on the decode worker only if its suffix is no longer than what it continues."""
    world = World()
    world.turn("t0", "s", 800, 8)
    world.run(5.0)
    for number in range(8):
        world.submit(f"long-{number}", "b", 4000)
    world.at(5.5, world.turn, "t1", "s", 800 + added, 8)
    world.run(40.0)
    assert world.on_decode == (added <= 800)


def test_other_tenants_sessions_are_not_found() -> None:
    """A prompt never finds the KV of another tenant's session."""
    world = World()
    world.turn("t0", "s", 800, 80)
    world.run(5.0)
    for number in range(4):
        world.submit(f"long-{number}", "b", 4000)
    world.at(5.5, world.turn, "t1", "s", 960, 8, "b")
    world.run(20.0)
    assert world.on_decode == 0 and world.requests["t1"].cached_tokens == 0


@pytest.mark.parametrize("sessions", [1, 4])
def test_local_suffixes_keep_fair_shares(sessions: int) -> None:
    """Tenant a has turns whose KV is on the decode worker, and like b more prompts than the prefill worker can compute. What is
    computed for it there counts: b has as much, to the bound of the fair queue."""
    world = World(rate=1000.0)
    lengths = dict.fromkeys(range(sessions), 512)
    for session in lengths:
        world.turn(f"s{session}-0", f"s{session}", 512, 16)
    world.run(10.0)
    begun = world.computed()
    for number in range(60):
        for tenant in ("a", "b"):
            world.submit(f"{tenant}-{number}", tenant, 1024)
    turns: Counter[int] = Counter()

    def go_on(request: object) -> None:
        for session, length in lengths.items():
            name = f"s{session}-{turns[session]}"
            if request is world.requests.get(name) and length < 3000:
                turns[session] += 1
                lengths[session] = length + 64 + 16
                world.turn(f"s{session}-{turns[session]}", f"s{session}", length + 64, 16)

    world.on_end = go_on  # type: ignore[assignment]
    for session in lengths:
        turns[session] += 1
        world.turn(f"s{session}-1", f"s{session}", 512 + 16 + 64, 16)
        lengths[session] = 512 + 16 + 64
    bound = world.core.limits.quantum_tokens + 2 * STEP_TOKENS
    for _ in range(60):
        world.run(world.now + 0.5)
        served = Counter[str]()
        for name, tokens in (world.computed() - begun).items():
            served["b" if name.startswith("b") else "a"] += tokens
        decode = next(iter(world.decode.values()))
        assert isinstance(decode, ClusterDecodeWorker)
        served["a"] += decode.suffix_tokens
        if not any(r.tenant == "b" for r in (one.submit for one in world.core.cluster.requests.values())):
            break
        assert served["b"] >= served["a"] - bound, (world.now, served)
    assert world.on_decode > 2


def test_turn_waits_behind_earlier_for_room() -> None:
    """A turn waits for room in decode behind requests that came before it."""
    world = World(decode_blocks=200)
    world.turn("t0", "s", 800, 8)
    world.run(5.0)
    world.submit("long", "b", 1600, 800)
    world.run(6.5)
    world.submit("large", "c", 1600, 400)
    world.run(7.0)
    assert world.core.cluster.requests["large"].state.value == "queued", "it has no room"
    world.turn("t1", "s", 900, 400)
    world.run(60.0)
    assert 6.5 + world.ttft_s["large"] < 7.0 + world.ttft_s["t1"]
