"""Structs that messages are made of; `proto.messages` exports those of its own messages."""

from enum import StrEnum
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from proto import limits
from proto.errors import FinishReason
from proto.fields import (
    Attempt,
    BlockSize,
    ChoiceIndex,
    Count,
    DurationMs,
    Incarnation,
    RequestId,
    Seconds,
    Text,
    Tokens_,
)
from proto.sampling import TokenId, TokenLogprobs

STEP_TOKENS: Final = 256  # of a prefill step on a CPU
STALL_SHARE: Final = 0.5  # of a decode step, by which a slice of a prompt may lengthen it, without a target


class Role(StrEnum):
    COORDINATOR = "coordinator"
    GATEWAY = "gateway"
    PREFILL = "prefill"
    DECODE = "decode"
    OBSERVER = "observer"  # `crossdock status`, `drain` and `flip`
    MIXED = "mixed"  # A worker process with both roles. It registers as two workers, so no `Hello` has this role.

    @property
    def registers_as(self) -> "tuple[Role, ...]":
        return (Role.PREFILL, Role.DECODE) if self is Role.MIXED else (self,)


class Destination(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Where another process is and which incarnation of it is meant."""

    address: Text
    incarnation: Incarnation


class Returns(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """How often and how soon the turns of a tenant's conversations follow each other. It helps to decide what is kept for the
    next turn."""

    share: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0  # of the turns, followed by another one
    mean_s: Seconds = 0.0  # seconds from the end of a turn until the next one comes, on average


class RateState(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The rest of a tenant's rates, for the `x-ratelimit-*` headers; a limit of 0 means that there is none."""

    limit_requests: Count
    remaining_requests: Count
    reset_requests_s: Seconds  # until all of the limit is there again
    limit_tokens: Count
    remaining_tokens: Count
    reset_tokens_s: Seconds


class Waits(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """How long a request waited until it was placed, in milliseconds by reason: see `proto.errors.WaitReason`."""

    own_queue: DurationMs = 0.0
    other_tenants: DurationMs = 0.0
    no_room: DurationMs = 0.0
    cold_start: DurationMs = 0.0

    @property
    def total(self) -> float:
        return self.own_queue + self.other_tenants + self.no_room + self.cold_start


class Chunk(msgspec.Struct, frozen=True, gc=False, array_like=True):
    request_id: RequestId
    attempt: Attempt
    start: Tokens_
    length: Annotated[int, Meta(ge=1, le=limits.MAX_CONTEXT_TOKENS)]


class TokenItem(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Consecutive tokens of one choice, `tokens[0]` being number `index` of the answer."""

    request_id: RequestId
    attempt: Attempt
    choice: ChoiceIndex
    index: Tokens_
    tokens: Annotated[tuple[TokenId, ...], Meta(max_length=limits.MAX_TOKENS_PER_ITEM)]
    finish: FinishReason | None = None  # Set with the last token. A stop token is the last token and is not text.
    logprobs: Annotated[tuple[TokenLogprobs, ...], Meta(max_length=limits.MAX_TOKENS_PER_ITEM)] = ()
    cached_tokens: Tokens_ = 0  # of the prompt, found in the prefix cache; with an attempt's first token


class PrefixPart(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The blocks of a chain that an attempt holds. A chain is a sequence of blocks that one attempt brought to this worker."""

    chain: Annotated[int, Meta(ge=0, lt=1 << 40)]  # never used again in the life of the process
    blocks: Annotated[int, Meta(ge=1, le=limits.MAX_CONTEXT_TOKENS)]
    """The number of blocks, counted from the beginning of the chain. Attempts with parts of the same chain hold the same
    blocks of the pool."""


PrefixParts = Annotated[tuple[PrefixPart, ...], Meta(max_length=limits.MAX_PREFIX_PARTS)]


class Capacity(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The most that a worker can hold."""

    kv_blocks: Count
    block_size: BlockSize
    max_seqs: Annotated[int, Meta(ge=1, le=1 << 20)]  # in prefill, prompts being computed; in decode, the batch
    context_tokens: Tokens_
    step_tokens: Annotated[int, Meta(ge=1, le=1 << 16)] = STEP_TOKENS  # of a prefill step, without another budget
    computes_suffixes: bool = False  # a decode worker computes what a prompt adds to KV that it has, beside its streams
    fetches: bool = False  # a prefill worker fetches KV from decode workers; a decode worker offers it
    tier_blocks: Count = 0  # blocks that its second tier can cache in addition


class Room(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The largest request that the workers of one model can hold."""

    context_tokens: Tokens_  # prompt and answer together, as the model takes
    prompt_tokens: Tokens_  # as the KV cache of prefill workers takes
    kv_blocks: Count  # of the largest decode worker
    block_size: BlockSize


class Held(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """An allocation that a worker still holds for an attempt when it registers (again); `resumed_tokens` as in the order it
    has."""

    request_id: RequestId
    attempt: Attempt
    kv_blocks: Count
    seqs: Count
    resumed_tokens: Tokens_ = 0
    prompt_tokens: Tokens_ = 0  # prompt tokens, from here on in decode only; 0: nothing more is known than `kv_blocks`
    left_tokens: Tokens_ = 0  # most tokens that each choice forwards after joining the batch
    steps: Count = 0  # as in `DecodeProgress`, when this was said
    joined_step: Count | None = None  # as in `Joined`; None: it has not joined yet
    prefix: PrefixParts = ()  # as in `SharedPrefix`
