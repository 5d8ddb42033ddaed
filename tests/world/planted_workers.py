"""Bugs of the prefill and the decode worker, of transfers between them, and of the prefix cache."""

from typing import Any

import pytest

from decode_worker.batch import RunningBatch
from decode_worker.requests import Attempt, AttemptTable
from engine.kv.allocator import BlockAllocator
from engine.kv.sequence import SequenceBlocks
from kvtransfer.session.receiver import COMMITTED, FAILED, ReceiverSession
from kvtransfer.session.sender import SenderSession
from kvtransfer.session.session import Action, KvCommitted, SegmentDone, SegmentDropped, SessionEnded, TransferSession
from prefill_worker.core import PrefillCore
from prefill_worker.prompts import PrefillRequest, PromptTable
from proto.messages import Released, TokenItem, Tokens
from proto.parts import Returns
from tests.world.planted import Planted
from worker import step_watch
from worker.step_watch import StepWatch

BUGS = Planted()
bug = BUGS.add


# --- both -----------------------------------------------------------------------------------------------------------------


@bug
def a_step_that_hangs_is_waited_for(m: pytest.MonkeyPatch) -> None:
    """Its heartbeats are answered, and its streams stand still."""
    m.setattr(StepWatch, "hung_for", lambda self, now: None)


@bug
def a_process_that_was_stopped_takes_its_step_for_hung(m: pytest.MonkeyPatch) -> None:
    """A worker ends itself, and its streams with it, whenever it was stopped for a while."""
    m.setattr(step_watch, "_stopped_s", lambda *_: 0.0)


# --- prefill worker ---------------------------------------------------------------------------------------------------------


@bug
def a_prefill_worker_keeps_the_blocks_of_an_aborted_prompt(m: pytest.MonkeyPatch) -> None:
    """Its pool fills up."""
    original = PromptTable._release

    def release(self: PromptTable, prompt: PrefillRequest) -> Any:
        if isinstance(prompt.final_report, Released):
            prompt.blocks = []
        return original(self, prompt)

    m.setattr(PromptTable, "_release", release)


@bug
def a_prefill_worker_frees_blocks_under_a_running_step(m: pytest.MonkeyPatch) -> None:
    """The next prompt's KV is written over."""
    original = PromptTable._release

    def release(self: PromptTable, prompt: PrefillRequest) -> Any:
        in_step, prompt.in_step = prompt.in_step, False
        said = original(self, prompt)
        prompt.in_step = in_step
        return said

    m.setattr(PromptTable, "_release", release)


@bug
def a_prefill_worker_frees_blocks_that_are_being_sent(m: pytest.MonkeyPatch) -> None:
    """The other end gets another prompt's KV."""
    original = PromptTable.close

    def close(self: PromptTable, prompt: PrefillRequest, final_report: Any) -> Any:
        prompt.sending = False
        return original(self, prompt, final_report)

    at_once = SenderSession._fail

    def fail(self: SenderSession, reason: str, tell_peer: bool) -> list[Action]:
        return [] if self.in_flight else at_once(self, reason, False)

    m.setattr(PromptTable, "close", close)
    m.setattr(SenderSession, "_fail", fail)


@bug
def chunks_need_not_continue_what_is_computed(m: pytest.MonkeyPatch) -> None:
    """A step that comes twice computes in the wrong place."""

    def runnable(self: PromptTable, chunks: Any) -> Any:
        found = []
        for chunk in chunks:
            prompt = self.prompts.get((chunk.request_id, chunk.attempt))
            if prompt is not None and prompt.final_report is None and not prompt.in_step:
                found.append((prompt, chunk))
        return found

    m.setattr(PromptTable, "runnable", runnable)


@bug
def the_first_token_is_sent_twice(m: pytest.MonkeyPatch) -> None:
    """By the prefill worker: once when drawn, once when handed over."""
    original = PrefillCore._first_tokens_drawn

    def drawn(self: PrefillCore, prompt: PrefillRequest, items: list[TokenItem]) -> None:
        original(self, prompt, items)
        self._ports.gateways.send(prompt.order.gateway, Tokens(tuple(items)))

    m.setattr(PrefillCore, "_first_tokens_drawn", drawn)


# --- decode worker ----------------------------------------------------------------------------------------------------------


@bug
def a_decode_worker_frees_blocks_under_a_running_step(m: pytest.MonkeyPatch) -> None:
    """A cancelled sequence's last write lands in another's KV."""

    def leave(self: RunningBatch[Any], key: tuple[str, int]) -> bool:
        self.running = [sequence for sequence in self.running if sequence.key != key]
        return True

    m.setattr(RunningBatch, "leave", leave)
    m.setattr(AttemptTable, "close", _close_at_once)


def _close_at_once(self: AttemptTable[Any], attempt: Attempt[Any], final_report: Any) -> Any:
    if attempt.final_report is None:
        attempt.final_report = final_report
    if attempt.phase.value == "receiving":
        return []
    if attempt.phase.value == "running":
        self.batch.leave(attempt.key)
        return self.ended(attempt.sequences)
    return self._forget(attempt)


@bug
def blocks_of_a_failed_receive_are_forgotten(m: pytest.MonkeyPatch) -> None:
    """The decode worker's pool shrinks with each failure."""
    original = AttemptTable.received_nothing

    def nothing(self: AttemptTable[Any], key: Any, blocks: list[int], final_report: Any) -> Any:
        return original(self, key, [], final_report)

    m.setattr(AttemptTable, "received_nothing", nothing)


@bug
def choices_share_blocks_without_a_reference(m: pytest.MonkeyPatch) -> None:
    """One choice writes into the other's KV."""
    m.setattr(BlockAllocator, "share", lambda self, blocks: None)
    _free_only_what_is_held(m)


def _free_only_what_is_held(m: pytest.MonkeyPatch) -> None:
    """So that the allocator's own assertion is not what finds it."""
    original = BlockAllocator.free

    def free(self: BlockAllocator, blocks: list[int], returns: Returns | None = None) -> None:
        original(self, [block for block in blocks if self.refs(block)], returns)

    m.setattr(BlockAllocator, "free", free)


@bug
def shared_blocks_are_written_without_a_copy(m: pytest.MonkeyPatch) -> None:
    """Two answers to one prompt overwrite each other."""
    original = SequenceBlocks.append_slot

    def append(self: SequenceBlocks) -> Any:
        if self.length // self._block_size == len(self.table):
            return original(self)
        self.length += 1
        return None

    m.setattr(SequenceBlocks, "append_slot", append)


# --- transfer and cache ---------------------------------------------------------------------------------------------------


@bug
def a_commit_is_taken_without_its_digests(m: pytest.MonkeyPatch) -> None:
    """KV that was damaged on its way is decoded from."""

    def check(self: ReceiverSession) -> Any:
        if self.in_flight or self._commit is None:
            return []
        self.state, self._deadline = COMMITTED, None
        return [self._ack(), SessionEnded(KvCommitted(self._commit.commit, self._block_ids, self._prompt))]

    m.setattr(ReceiverSession, "_check", check)


@bug
def a_failed_transfer_does_not_wait_for_its_thread(m: pytest.MonkeyPatch) -> None:
    """Blocks are given away while a segment is still on its way into them."""

    def fail(self: ReceiverSession, reason: str, tell_peer: bool) -> Any:
        self._reason, self._deadline = reason, None
        return self._over()

    m.setattr(ReceiverSession, "_fail", fail)
    _ignore_late_answers(m, FAILED)


def _ignore_late_answers(m: pytest.MonkeyPatch, state: str) -> None:
    """So that the fault shows in what it does to others, and not in the session's own table."""
    original = TransferSession.handle

    def handle(self: TransferSession, event: object, now: float) -> Any:
        if isinstance(event, SegmentDone | SegmentDropped) and self.state == state:
            return []
        return original(self, event, now)

    m.setattr(TransferSession, "handle", handle)


@bug
def decode_starts_before_all_segments_are_there(m: pytest.MonkeyPatch) -> None:
    """It reads slots that were not written yet."""

    def check(self: ReceiverSession) -> Any:
        assert self._commit is not None
        self.in_flight.clear()
        self.state, self._deadline = COMMITTED, None
        return [self._ack(), SessionEnded(KvCommitted(self._commit.commit, self._block_ids, self._prompt))]

    m.setattr(ReceiverSession, "_check", check)
    _ignore_late_answers(m, COMMITTED)


@bug
def a_prefix_is_shared_without_a_reference(m: pytest.MonkeyPatch) -> None:
    """A cached block is evicted while a prompt that begins with it runs."""

    def take(self: BlockAllocator, hashes: Any) -> list[int]:
        blocks = self._prefixes.longest(hashes)
        for block in blocks:
            self._refs.setdefault(block, 1)
            self._prefixes.hold(block)
            self.pool.holders.setdefault(block, 1)
        return blocks

    m.setattr(BlockAllocator, "match_prefix", take)
    _free_only_what_is_held(m)
