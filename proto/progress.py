"""Reports on a worker's unfinished work: its progress, a hung step and, for gateways, the log probabilities of a prompt. From
the progress of a decode worker, one number, the coordinator computes the blocks of all its attempts. Also messages about
finished answers and ended conversations."""

from typing import Annotated

import msgspec
from msgspec import Meta

from proto import limits
from proto.fields import Attempt, BlockHashes, BlockSize, ChoiceIndex, Count, DurationMs, RequestId, SessionName, Text
from proto.messages import Message
from proto.parts import PrefixParts


class Joined(msgspec.Struct, frozen=True, gc=False, array_like=True):
    request_id: RequestId
    attempt: Attempt
    step: Count  # it forwards its first token in the step after this one


class SharedPrefix(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Full blocks at the beginning of an attempt's prompt that others may hold too. It holds them until it ends here."""

    request_id: RequestId
    attempt: Attempt
    parts: PrefixParts  # in the order of the prompt


class DecodeProgress(Message, frozen=True):
    """The progress of a decode worker, sent a few times a second while it runs steps. Every running choice advances by one
    token in each step."""

    steps: Count  # Begun since the process started. Every attempt that joined by then has been named, here or before.
    free_blocks: Count  # free blocks, with those that are only cached, and given up when needed
    short_blocks: Count  # that may be missing within the next steps; 0 unless the coordinator overcommits
    joined: Annotated[tuple[Joined, ...], Meta(max_length=1 << 16)] = ()  # since the last message
    prefixes: Annotated[tuple[SharedPrefix, ...], Meta(max_length=1 << 16)] = ()
    """Attempts whose shared prefix became known, or longer, since the last message."""
    timed_steps: Count = 0  # since the last message, without a pause between them; sums over them follow
    timed_ms: DurationMs = 0.0  # each from the end of the step before to its own end
    timed_sequences: Count = 0
    timed_kv_tokens: Count = 0  # that they read


class Hung(Message, frozen=True):
    """The last message of a worker: a step of its model does not end, and the worker is about to end its process."""

    ran_ms: DurationMs


class AnswerNames(Message, frozen=True):
    """Names of the full KV blocks of an answer that has ended, from its gateway to its decode worker: the next turn of a
    conversation finds them."""

    request_id: RequestId
    attempt: Attempt
    choice: ChoiceIndex
    block_size: BlockSize  # tokens that each of them covers
    first_block: Annotated[int, Meta(ge=0, le=limits.MAX_BLOCK_HASHES)]
    """The first of them, counted from the beginning of the context: those before it are the prompt's."""
    block_hashes: BlockHashes


class EndSession(Message, frozen=True):
    """A gateway says that a client has ended a conversation."""

    tenant: Text
    session: SessionName


class EndPrefix(Message, frozen=True):
    """Names the last blocks of the last prompt of an ended conversation, for a worker that has one of them. The worker drops
    the blocks that only this conversation has, unless a running attempt holds them."""

    block_hashes: BlockHashes  # the last one that the worker knows counts: its blocks may be larger than those hashed


_TOP_BYTES_MAX = 4 * limits.MAX_PROMPT_LOGPROBS * limits.MAX_TOP_LOGPROBS


class PromptLogprobs(Message, frozen=True):
    """Log-probabilities of consecutive tokens of an attempt's prompt, where its sampling asks for them: all those of the
    prompt come, in order, before its first token. Numbers are packed, little-endian; rows are tokens."""

    request_id: RequestId
    attempt: Attempt
    start: Annotated[int, Meta(ge=1, le=limits.MAX_CONTEXT_TOKENS)]
    """Position in the prompt of the first of these tokens. The prompt's own first token has no probability."""
    top: Annotated[int, Meta(ge=0, le=limits.MAX_TOP_LOGPROBS)]  # how many of the likeliest tokens there are for each
    logprobs: Annotated[bytes, Meta(min_length=4, max_length=4 * limits.MAX_PROMPT_LOGPROBS)]  # float32 [rows]
    ranks: Annotated[bytes, Meta(min_length=4, max_length=4 * limits.MAX_PROMPT_LOGPROBS)]
    """int32 [rows]: the place of each among all tokens, likeliest first; 1 is the likeliest."""
    top_ids: Annotated[bytes, Meta(max_length=_TOP_BYTES_MAX)] = b""  # int32 [rows, top], likeliest first
    top_logprobs: Annotated[bytes, Meta(max_length=_TOP_BYTES_MAX)] = b""  # float32 [rows, top]
