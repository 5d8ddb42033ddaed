"""What a prefill worker fetches of a prompt's beginning from its decode worker: both ends, in any order of events."""

from collections.abc import Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from decode_worker.batch import RunningBatch
from decode_worker.core import DecodeCore
from decode_worker.requests import AttemptTable
from engine.kv.allocator import BlockAllocator
from kvtransfer.session.session import KvFailed, KvSent, OfferAccepted
from prefill_worker.core import PrefillCore
from prefill_worker.prompts import FetchPhase, PromptTable
from proto.codec import pack_tokens
from proto.kv import NO_FIRST_TOKENS, Commit, Fetch, FetchRefused, Offer
from proto.messages import CacheMiss, Chunk, Destination, Message, Prefill, Release, Released, Reserve, Step, StepDone
from proto.sampling import Sampling
from tests.workers.test_batch import BLOCK
from worker.ports import TakeChanges

PREFILL, DECODE, GATEWAY = 9, 2, 1
PROMPT = tuple(range(1, 4 * BLOCK + 2))
HASHES = b"".join(bytes([block]) * 16 for block in range(4))
BELIEVED = 3 * BLOCK
KEY = ("a", 1)


class Ports:
    """Those of either core, and what went through them."""

    up = True

    def __init__(self) -> None:
        self.registration = self.gateways = self.sender = self.receiver = self
        self.said: list[Message] = []
        self.aborted = False
        self.lent: Sequence[int] = ()

    def send(self, *message: Message | Destination) -> None:
        self.said += [part for part in message if isinstance(part, Message)]

    def report_cache(self, take_changes: TakeChanges) -> None: ...
    def connect(self, to: Destination) -> None: ...
    def open(self, *order: Any) -> None: ...
    def commit(self, *order: Any) -> None: ...

    def blocks_ready(self, request_id: str, attempt: int, first_block: int, block_ids: Sequence[int]) -> None:
        self.lent = block_ids

    def abort(self, request_id: str, attempt: int, reason: str) -> None:
        self.aborted = True

    def now(self) -> float:
        return 0.0

    def fetch(self, decode: Destination, message: Fetch) -> None:
        self.said.append(message)

    def refuse_fetch(self, incarnation: int, message: FetchRefused) -> None:
        self.said.append(message)


def prefill_core(here: int) -> tuple[PrefillCore, Ports]:
    """So many of the prompt's first blocks are cached; it is to fetch the others that are believed to be elsewhere."""
    ports, allocator = Ports(), BlockAllocator(8)
    cached = allocator.allocate(here)
    allocator.insert([HASHES[16 * block : 16 * block + 16] for block in range(here)], cached)
    allocator.free(cached)
    core = PrefillCore(
        ports, PromptTable(allocator, BLOCK), vocab_size=99, step_tokens_max=64, tokens_forwarded=lambda: 0
    )
    order = Prefill(
        *KEY, len(PROMPT), Sampling(max_tokens=5), 1, 0, 0, Destination("g", GATEWAY), Destination("d", DECODE), BLOCK,
        HASHES, BELIEVED, True,
    )  # fmt: skip
    core.order(order, pack_tokens(PROMPT))
    core.order(Step(1, (Chunk(*KEY, BELIEVED, len(PROMPT) - BELIEVED),)), b"")
    return core, ports


def test_step_starts_after_its_fetch() -> None:
    """A step waits until the blocks of its prompt are fetched, and computes only the tokens after them."""
    core, ports = prefill_core(here=1)
    assert ports.said == [Fetch(*KEY, 1, 2)]
    assert core.begin_step() is None
    answer = core.fetches.offered(DECODE, Offer(*KEY, 1, 2))
    assert isinstance(answer, OfferAccepted) and answer.block_ids == tuple(core.table.prompts[KEY].blocks[1:3])
    core.fetches.committed(Commit(*KEY, (), 0, NO_FIRST_TOKENS), list(answer.block_ids))
    begun = core.begin_step()
    assert begun is not None and begun.work[0][1].start == BELIEVED
    assert core.table.prompts[KEY].cached_tokens == BELIEVED == core.table.found_tokens
    again = core.table.allocator.match_prefix([HASHES[16 * block : 16 * block + 16] for block in range(4)])
    assert len(again) == 3, "it is there for other prompts too"


def test_other_prompts_run_during_fetch() -> None:
    """A step of another prompt runs while the first one waits for its fetch."""
    core, _ = prefill_core(here=0)
    other = Prefill(
        "b", 1, BLOCK, Sampling(max_tokens=5), 1, 0, 0, Destination("g", GATEWAY), Destination("d", DECODE), BLOCK
    )
    core.order(other, pack_tokens(PROMPT[:BLOCK]))
    core.order(Step(2, (Chunk("b", 1, 0, BLOCK),)), b"")
    begun = core.begin_step()
    assert begun is not None and begun.step.step_id == 2
    assert [step.step_id for step in core.steps] == [1]


def test_waiting_step_keeps_chunk_order() -> None:
    """No later chunk of a prompt runs while a step with an earlier chunk of it waits for a fetch."""
    core, _ = prefill_core(here=0)
    to = Destination("g", GATEWAY), Destination("d", DECODE)
    other = Prefill("b", 1, 2 * BLOCK, Sampling(max_tokens=5), 1, 0, 0, *to, BLOCK)
    core.order(other, pack_tokens(PROMPT[: 2 * BLOCK]))
    core.order(Step(2, (Chunk(*KEY, BELIEVED + 1, 1), Chunk("b", 1, 0, BLOCK))), b"")
    core.order(Step(3, (Chunk("b", 1, BLOCK, BLOCK),)), b"")
    assert core.begin_step() is None


EVENTS = (
    "offer",
    "offer less",
    "offer more",
    "stranger's",
    "commit",
    "fail",
    "refuse",
    "expire",
    "lost",
    "release",
    "step",
)


@settings(max_examples=400, deadline=None)
@given(here=st.integers(0, 3), events=st.lists(st.sampled_from(EVENTS), max_size=8))
def test_fetch_is_safe_in_any_order(here: int, events: list[str]) -> None:
    """Fetch events in any order never let a prompt be computed, or a block be freed, too early."""
    core, ports = prefill_core(here)
    receiving: list[int] = []
    for event in events:
        prompt = core.table.prompts.get(KEY)
        match event:
            case "offer" | "offer less" | "offer more" | "stranger's":
                blocks = {"offer less": 1, "offer more": 4}.get(event, 3 - here)
                answer = core.fetches.offered(3 if event == "stranger's" else DECODE, Offer(*KEY, 1, max(blocks, 1)))
                if isinstance(answer, OfferAccepted):
                    assert not receiving and event != "stranger's" and here + blocks <= 3
                    receiving = list(answer.block_ids)
            case "commit" if receiving:
                core.fetches.committed(Commit(*KEY, (), 0, NO_FIRST_TOKENS), receiving)
                receiving = []
            case "fail" if receiving:
                core.fetches.not_received(*KEY, "planted")
                receiving = []
            case "refuse":
                core.fetches.refused(DECODE, FetchRefused(*KEY, "planted"))
            case "expire":
                core.fetches.expire(KEY)
            case "lost":
                core.fetches.peer_lost(DECODE)
            case "release":
                core.order(Release(*KEY), b"")
                assert ports.aborted or not receiving
            case "step" if (begun := core.begin_step()) is not None:
                assert prompt is not None and prompt.fetch is FetchPhase.NONE and not receiving
                assert prompt.computed_tokens == BELIEVED, "no token is skipped"
                core.step_failed(begun, "planted")
        if receiving:
            assert all(core.table.allocator.refs(block) == 1 for block in receiving), "they may be written to"
    said = [type(message) for message in ports.said]
    prompt = core.table.prompts.get(KEY)
    if prompt is not None and prompt.fetch is FetchPhase.NONE and prompt.final_report is None:
        assert prompt.computed_tokens == BELIEVED or said.count(CacheMiss) == 1, "the coordinator plans anew"
        if prompt.computed_tokens < BELIEVED and core.begin_step() is None and StepDone in said:
            assert ports.said[-1] == StepDone(1, (), 0.0, 0), "the chunk does not fit any more"
    assert said.count(Released) <= max(events.count("release"), 1)


def lender() -> tuple[DecodeCore[str], Ports]:
    """It has three blocks of the prompt, and a reservation."""
    ports, allocator = Ports(), BlockAllocator(8)
    blocks = allocator.allocate(3)
    allocator.insert([HASHES[16 * block : 16 * block + 16] for block in range(3)], blocks)
    allocator.free(blocks)
    table = AttemptTable(allocator, BLOCK, RunningBatch[str]())
    core = DecodeCore(ports, table, vocab_size=99, make_state=lambda order, first, prompt: "state")  # type: ignore[arg-type]
    core.order(
        Reserve(*KEY, len(PROMPT), Sampling(max_tokens=5), 1, 0, 0, 6, Destination("g", GATEWAY), PREFILL, HASHES)
    )
    return core, ports


def test_lent_blocks_are_held_until_sent() -> None:
    """An attempt that lends blocks ends only after they have been sent or have failed."""
    core, ports = lender()
    core.lending.asked(PREFILL, Fetch(*KEY, 1, 3))
    assert len(ports.lent) == 2, "it has no more"
    core.order(Release(*KEY))
    assert ports.aborted and ports.said == []
    assert core.table.allocator.held_count == 2
    core.lending.sent(KvSent(*KEY, 0, 0.0))
    assert ports.said == [Released(*KEY)] and not core.table.attempts
    assert core.table.allocator.held_count == 0


def test_only_its_own_worker_may_fetch() -> None:
    """Fetches by another worker, without a reservation, beyond the end or made twice are refused."""
    core, ports = lender()
    core.lending.asked(7, Fetch(*KEY, 0, 3))
    core.lending.asked(PREFILL, Fetch("b", 1, 0, 3))
    core.lending.asked(PREFILL, Fetch(*KEY, 3, 1))
    assert [type(message) for message in ports.said] == 3 * [FetchRefused]
    core.lending.asked(PREFILL, Fetch(*KEY, 0, 3))
    core.lending.asked(PREFILL, Fetch(*KEY, 0, 3))
    assert len(ports.said) == 4 and core.table.allocator.held_count == 3
    core.lending.sent(KvFailed(*KEY, "planted"))
    assert isinstance(ports.said[-1], FetchRefused), "perhaps no offer has come there"
    assert core.table.allocator.held_count == 0 and KEY in core.table.attempts
