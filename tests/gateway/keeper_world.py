"""A keeper on a bench: short words for events and actions, and a text that shows each token as a word."""

from dataclasses import dataclass
from typing import Any

from gateway.streams.keeper import StreamKeeper
from gateway.streams.prompt_scores import PromptScores
from gateway.streams.types import (
    Action,
    Deliver,
    Ended,
    Event,
    FailKind,
    LinkUp,
    Open,
    SendCancel,
    SendSubmit,
    StreamLimits,
    Tick,
    TokensReceived,
    Work,
)
from gateway.text.block_hashes import BlockNames
from proto.codec import pack_tokens, unpack_tokens
from proto.errors import CancelReason, FinishReason, Interrupt
from proto.messages import Interrupted, Submit, TokenItem
from proto.sampling import Sampling


@dataclass(frozen=True)
class Word:
    text: str
    stop: str = ""


class Words:
    """Token 6 becomes `"6 "`; a stop string is one such word."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops

    def push(self, token: int) -> Word:
        word = f"{token} "
        return Word("", word) if word in self._stops else Word(word)

    def finish(self) -> Word:
        return Word("")


LIMITS = StreamLimits(link_wait_s=10, idle_s=120, resume_delay_s=0.1, stall_s=5, streams_max=4, settle_s=0)


SAMPLING = Sampling(max_tokens=9)


def work(
    name: str = "r",
    prompt: tuple[int, ...] = (1, 2, 3),
    *,
    stops: tuple[str, ...] = (),
    sampling: Sampling = SAMPLING,
    names: BlockNames | None = None,
    prompt_scores: PromptScores | None = None,
    **fields: Any,
) -> Work:
    """The work on a prompt; `fields` are its message's."""
    if names is not None:
        fields |= {"block_hashes": names.hashes, "hash_block_size": names.block_size}
    submit = Submit(name, 1, "m", len(prompt), sampling, **fields)
    return Work(submit, pack_tokens(prompt), lambda: Words(stops), names, prompt_scores)


class Bench:
    """A keeper, its clock, and short words for events."""

    def __init__(self, *, link: bool = True) -> None:
        self.keeper = StreamKeeper(LIMITS)
        self.now = 100.0
        if link:
            self.do(LinkUp(7))

    def do(self, event: Event) -> list[Action]:
        return self.keeper.handle(event, self.now)

    def open(self, name: str = "r", choices: int = 1, max_tokens: int = 9, stops: tuple[str, ...] = ()) -> list[Action]:
        return self.do(Open(work(name, choices=choices, sampling=Sampling(max_tokens=max_tokens), stops=stops)))

    def tokens(
        self,
        index: int,
        *tokens: int,
        finish: FinishReason | None = None,
        name: str = "r",
        attempt: int = 1,
        choice: int = 0,
        decoder: int = 20,
    ) -> list[Action]:
        return self.do(TokensReceived((TokenItem(name, attempt, choice, index, tokens, finish),), decoder))

    def wait(self) -> list[Action]:
        """On to the next deadline."""
        at = self.keeper.next_deadline()
        assert at is not None
        self.now = max(self.now, at)
        return self.do(Tick())

    def interrupt(self, name: str = "r", attempt: int = 1) -> list[Action]:
        return self.do(Interrupted(name, attempt, Interrupt.DECODE_LOST))


def submits(actions: list[Action]) -> list[tuple[str, int, list[int], int, int, int]]:
    found = [action for action in actions if isinstance(action, SendSubmit)]
    return [
        (s.request_id, s.attempt, unpack_tokens(a.blob, s.prompt_tokens), s.resumed_tokens, s.choices, s.first_choice)
        for a in found
        for s in [a.submit]
    ]


def texts(actions: list[Action]) -> list[str]:
    return [action.text for action in actions if isinstance(action, Deliver)]


def cancels(actions: list[Action]) -> list[tuple[str, int, CancelReason]]:
    found = [action.cancel for action in actions if isinstance(action, SendCancel)]
    return [(c.request_id, c.attempt, c.reason) for c in found]


def failures(actions: list[Action]) -> list[FailKind]:
    return [action.failure.kind for action in actions if isinstance(action, Ended) and action.failure]
