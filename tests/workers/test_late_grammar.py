"""A grammar that is compiled after its prompt was computed: nobody waits, and the first token is drawn when it is there."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from engine.kv.allocator import BlockAllocator
from prefill_worker.compute import draw_late
from prefill_worker.core import Begun, PrefillCore, PrefillStepResult, needs_tokens
from prefill_worker.prompts import PrefillRequest, PromptTable
from proto.codec import pack_tokens
from proto.messages import Chunk, Destination, Message, Prefill, Release, Step, Tokens, WorkFailed
from proto.sampling import Sampling

GRAMMAR = 'start: "a"'
VOCAB = 8
ONLY = 5


class OnlyOne:
    """A constraint that allows one token."""

    def mask(self, row: Any) -> Any:
        row = row.copy()
        row[[token for token in range(VOCAB) if token != ONLY]] = -float("inf")
        return row

    def accept(self, token: int) -> None:
        raise AssertionError("decode takes it in")


class World:
    """The ports of a core, which keep what is said."""

    def __init__(self) -> None:
        self.said: list[Message] = []
        self.sent: list[Tokens] = []
        self.committed: list[Any] = []
        self.registration = self.gateways = self.sender = self
        self.waiting: list[PrefillRequest] = []
        self.core = PrefillCore(
            self,  # type: ignore[arg-type]
            PromptTable(BlockAllocator(16), 2),
            vocab_size=VOCAB,
            step_tokens_max=64,
            tokens_forwarded=int,
            prepare_grammar=self.waiting.append,
        )

    def now(self) -> float:
        return 0.0

    def send(self, *what: Any) -> None:
        if isinstance(what[-1], Tokens):
            self.sent.append(what[-1])
        else:
            self.said.append(what[-1])

    def commit(self, request_id: str, attempt: int, first: Sequence[Any], prompt: Sequence[int]) -> None:
        self.committed.append((first, tuple(prompt)))

    def connect(self, to: Destination) -> None: ...
    def report_cache(self, take: Any) -> None: ...
    def open(self, *_: Any) -> None: ...
    def blocks_ready(self, *_: Any) -> None: ...
    def abort(self, *_: Any) -> None: ...

    def compute(self) -> Begun:
        """The whole prompt, by a step that could not draw."""
        sampling = Sampling(max_tokens=4, temperature=0.0, grammar=GRAMMAR)
        peer = Destination("x", 7)
        self.core.order(Prefill("r", 1, 3, sampling, 1, 0, 0, peer, peer, 2), pack_tokens((1, 2, 3)))
        self.core.order(Step(1, (Chunk("r", 1, 0, 3),)), b"")
        begun = self.core.begin_step()
        assert begun is not None
        self.core.step_done(begun, PrefillStepResult(1.0, {}, frozenset(), {("r", 1): torch.zeros(1, VOCAB)}))
        return begun

    def draw(self) -> None:
        prompts = self.core.begin_draw()
        assert len(prompts) == 1
        self.core.drawn(prompts, draw_late(prompts))


def test_first_token_waits_for_grammar() -> None:
    """The first token is drawn only once the grammar is ready; the prompt is computed before."""
    world = World()
    world.compute()
    assert not world.sent and not world.core.begin_draw()
    world.core.grammar_ready(world.waiting[0], OnlyOne())
    world.draw()
    assert world.sent[0].items[0].tokens == (ONLY,)
    assert [first.token for first in world.committed[0][0]] == [ONLY]
    assert not world.core.begin_draw()


def test_grammar_may_arrive_during_step() -> None:
    """A grammar that becomes ready while the step runs constrains the first token."""
    world = World()
    original = world.core.begin_step

    def begin() -> Begun | None:
        begun = original()
        world.core.grammar_ready(world.waiting[0], OnlyOne())
        return begun

    world.core.begin_step = begin  # type: ignore[method-assign]
    world.compute()
    world.draw()
    assert world.sent[0].items[0].tokens == (ONLY,)


def test_released_request_draws_nothing() -> None:
    """A request that is released while its grammar is compiled draws no token."""
    world = World()
    world.compute()
    world.core.order(Release("r", 1), b"")
    world.core.grammar_ready(world.waiting[0], OnlyOne())
    assert not world.core.begin_draw() and not world.sent


def test_broken_grammar_fails_its_request() -> None:
    world = World()
    world.compute()
    world.core.grammar_ready(world.waiting[0], None, "broken")
    prompt = world.waiting[0]
    assert isinstance(prompt.final_report, WorkFailed) and "broken" in prompt.final_report.message


@pytest.mark.parametrize(
    ("sampling", "resumed", "needed"),
    [
        (Sampling(max_tokens=1), 3, False),
        (Sampling(max_tokens=1, grammar=GRAMMAR), 3, True),
        (Sampling(max_tokens=1, grammar=GRAMMAR), 0, False),
        (Sampling(max_tokens=1, bad_words=((1, 2),)), 3, True),
        (Sampling(max_tokens=1, frequency_penalty=0.1), 3, True),
        (Sampling(max_tokens=1, repetition_penalty=1.1), 0, True),
    ],
)
def test_decode_gets_tokens_its_sampler_needs(sampling: Sampling, resumed: int, needed: bool) -> None:
    """A decode worker gets earlier output tokens only if its sampler needs them."""
    assert needs_tokens(sampling, resumed) is needed
