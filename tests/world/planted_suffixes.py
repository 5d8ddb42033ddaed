"""Bugs of what decode workers compute of prompts, of what is fetched from them, and of the names that answers get."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from decode_worker.ended import EndedStreams
from decode_worker.requests import AttemptTable
from decode_worker.suffixes import Slice, Suffixes
from engine.kv.prefix_tree import PrefixTree
from engine.kv.sequence import SequenceBlocks
from gateway.streams import keeper
from gateway.streams.types import SendNames
from prefill_worker.prompts import FetchPhase, PrefillRequest, PromptTable
from proto.messages import Reserve, TokenItem, Tokens
from scheduler.kv_admission.sessions import Sessions
from scheduler.request import Request
from scheduler.workers.wakeups import Wakeups
from scheduler.workers.worker import Worker
from tests.world.planted import Planted

BUGS = Planted()
bug = BUGS.add


@bug
def a_slice_begins_one_token_late(m: pytest.MonkeyPatch) -> None:
    """A token's KV is never computed."""
    original = Suffixes.next_slice

    def next_slice(self: Suffixes[Any], tokens_max: int, now: float) -> Slice[Any] | None:
        found = original(self, tokens_max, now)
        if found is None or len(found.tokens) < 2:
            return found
        return Slice(found.attempt, found.suffix, found.tokens[1:], found.start + 1)

    m.setattr(Suffixes, "next_slice", next_slice)


@bug
def a_released_suffix_frees_blocks_under_a_running_step(m: pytest.MonkeyPatch) -> None:
    """Another sequence gets them while the step writes."""
    original = AttemptTable.close

    def close(self: AttemptTable[Any], attempt: Any, report: Any, *, is_sound: bool = True) -> Any:
        if attempt.suffix is not None:
            attempt.suffix.in_step = False
        return original(self, attempt, report, is_sound=is_sound)

    m.setattr(AttemptTable, "close", close)


@bug
def a_suffix_that_ends_keeps_its_blocks(m: pytest.MonkeyPatch) -> None:
    """The pool of the decode worker fills up."""
    original = AttemptTable.close

    def close(self: AttemptTable[Any], attempt: Any, report: Any, *, is_sound: bool = True) -> Any:
        if attempt.suffix is not None and not attempt.suffix.in_step:
            attempt.suffix.blocks = []
        return original(self, attempt, report, is_sound=is_sound)

    m.setattr(AttemptTable, "close", close)


@bug
def first_tokens_that_a_decode_worker_draws_are_sent_twice(m: pytest.MonkeyPatch) -> None:
    """By the worker that computed the suffix, and again."""
    original = Suffixes._first_tokens_drawn

    def drawn(self: Suffixes[Any], attempt: Any, suffix: Any, items: list[TokenItem]) -> None:
        self._ports.gateways.send(suffix.order.gateway, Tokens(tuple(items)))
        original(self, attempt, suffix, items)

    m.setattr(Suffixes, "_first_tokens_drawn", drawn)


@bug
def the_last_token_of_an_answer_counts_as_computed(m: pytest.MonkeyPatch) -> None:
    """It was drawn and never forwarded: the block that it would fill has a hole."""
    original = EndedStreams.keep

    def keep(self: EndedStreams, order: Reserve, choice: int, hashes: Sequence[bytes], held: SequenceBlocks) -> None:
        full = (
            held.length % self._block_size == self._block_size - 1 and len(held.table) * self._block_size > held.length
        )
        held.length += full
        original(self, order, choice, hashes, held)
        held.length -= full

    m.setattr(EndedStreams, "keep", keep)


@bug
def a_gateway_names_what_was_never_an_answer(m: pytest.MonkeyPatch) -> None:
    """Its hashes are of the prompt of one stream and the answer of another."""
    last: list[SendNames] = []
    original = keeper.answer_names  # type: ignore[attr-defined]

    def answer_names(submission: Any) -> list[SendNames]:
        found = original(submission)
        made = [
            SendNames(one.decoder, msgspec.structs.replace(one.names, block_hashes=before.names.block_hashes))
            for one, before in zip(found, last, strict=False)
        ]
        last[:] = found or last
        return made or found

    m.setattr(keeper, "answer_names", answer_names)


@bug
def a_decode_worker_is_given_one_suffix_after_another(m: pytest.MonkeyPatch) -> None:
    """More than it was said to take: what comes next waits behind them."""

    def has_own_work(self: Wakeups, worker: Worker) -> None:
        self.ready[worker.incarnation] = None

    m.setattr(Wakeups, "has_own_work", has_own_work)


@bug
def what_a_failed_step_has_left_is_kept(m: pytest.MonkeyPatch) -> None:
    """Under a name by which the next attempt finds it."""
    original = AttemptTable.ended

    def ended(self: AttemptTable[Any], sequences: Any, *, is_sound: bool = True) -> Any:
        return original(self, sequences)

    m.setattr(AttemptTable, "ended", ended)


@bug
def what_is_fetched_is_sent_from_the_first_block_on(m: pytest.MonkeyPatch) -> None:
    """The prefill worker takes it for what comes behind that."""
    original = AttemptTable.lend

    def lend(self: AttemptTable[Any], key: Any, prefill: int, first_block: int, blocks: int) -> Any:
        found = original(self, key, prefill, 0, first_block + blocks)
        return found if isinstance(found, str) else found[: max(len(found) - first_block, 1)]

    m.setattr(AttemptTable, "lend", lend)


@bug
def what_was_lent_is_never_given_back(m: pytest.MonkeyPatch) -> None:
    """The pool of the decode worker fills up."""
    m.setattr(AttemptTable, "lent_back", lambda self, key: [])


@bug
def one_block_more_counts_as_fetched(m: pytest.MonkeyPatch) -> None:
    """Its KV is never computed."""
    original = PromptTable.fetched

    def fetched(self: PromptTable, prompt: PrefillRequest, blocks: int) -> None:
        original(self, prompt, blocks + (prompt.cached_tokens // self.block_size + blocks + 1 < len(prompt.blocks)))

    m.setattr(PromptTable, "fetched", fetched)


@bug
def a_released_prompt_frees_what_is_being_fetched(m: pytest.MonkeyPatch) -> None:
    """Another prompt gets the blocks while the decode worker's segments are written to them."""
    original = PromptTable.close

    def close(self: PromptTable, prompt: PrefillRequest, final_report: Any) -> Any:
        prompt.fetch = FetchPhase.NONE
        return original(self, prompt, final_report)

    m.setattr(PromptTable, "close", close)


@bug
def the_end_of_a_session_frees_blocks_that_are_held(m: pytest.MonkeyPatch) -> None:
    """Another prompt gets them while one that begins with them runs."""
    original = PrefixTree.end

    def end(self: PrefixTree, hash_: bytes) -> list[int]:
        node = self._nodes[hash_]
        held = [] if node.block in self.idle else [*self._remove(node), node.block]
        return held or original(self, hash_)

    m.setattr(PrefixTree, "end", end)


@bug
def a_turn_that_is_not_answered_never_ends(m: pytest.MonkeyPatch) -> None:
    """Its session is kept for ever."""
    original = Request.end_turn

    def end_turn(self: Request, sessions: Sessions, output_tokens: int, now: float) -> None:
        if self.first_token_at:
            original(self, sessions, output_tokens, now)

    m.setattr(Request, "end_turn", end_turn)
