"""Structs that messages are made of; `proto.messages` exports those of its own messages."""

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from proto import limits
from proto.errors import FinishReason
from proto.fields import Attempt, ChoiceIndex, Count, Incarnation, RequestId, Seconds, Text, Tokens_
from proto.sampling import TokenId, TokenLogprobs


class Role(StrEnum):
    COORDINATOR = "coordinator"
    GATEWAY = "gateway"
    PREFILL = "prefill"
    DECODE = "decode"
    OBSERVER = "observer"
    """`crossdock status`, `drain` and `flip`: asks, and may stop placement on a worker or change its role."""
    MIXED = "mixed"
    """A worker process that does both, and registers as two workers: nobody says `Hello` in it."""

    @property
    def registers_as(self) -> "tuple[Role, ...]":
        return (Role.PREFILL, Role.DECODE) if self is Role.MIXED else (self,)


class Peer(msgspec.Struct, frozen=True, gc=False, array_like=True, forbid_unknown_fields=True):
    """Where another process is and which incarnation of it is meant."""

    address: Text
    incarnation: Incarnation


class RateState(msgspec.Struct, frozen=True, gc=False, array_like=True, forbid_unknown_fields=True):
    """What is left of a tenant's rates, for the `x-ratelimit-*` headers; a limit of 0 means that there is none."""

    limit_requests: Count
    remaining_requests: Count
    reset_requests_s: Seconds
    """Until all of the limit is there again."""
    limit_tokens: Count
    remaining_tokens: Count
    reset_tokens_s: Seconds


class Chunk(msgspec.Struct, frozen=True, gc=False, array_like=True, forbid_unknown_fields=True):
    request_id: RequestId
    attempt: Attempt
    start: Tokens_
    length: Annotated[int, Meta(ge=1, le=limits.MAX_CONTEXT_TOKENS)]


class TokenItem(msgspec.Struct, frozen=True, gc=False, array_like=True, forbid_unknown_fields=True):
    """Consecutive tokens of one choice, `tokens[0]` being number `index` of the answer."""

    request_id: RequestId
    attempt: Attempt
    choice: ChoiceIndex
    index: Tokens_
    tokens: Annotated[tuple[TokenId, ...], Meta(max_length=limits.MAX_TOKENS_PER_ITEM)]
    finish: FinishReason | None = None
    """Set with the last token. A stop token is the last token and is not text."""
    logprobs: Annotated[tuple[TokenLogprobs, ...], Meta(max_length=limits.MAX_TOKENS_PER_ITEM)] = ()
    cached_tokens: Tokens_ = 0
    """With an attempt's first token: how many of the prompt's tokens came from the prefix cache and were not computed."""


class PrefixPart(msgspec.Struct, frozen=True, gc=False, array_like=True, forbid_unknown_fields=True):
    """Blocks that an attempt holds of a chain: one that some attempt brought to this worker, one block after the other."""

    chain: Annotated[int, Meta(ge=0, lt=1 << 40)]
    """Never used again in the life of the process."""
    blocks: Annotated[int, Meta(ge=1, le=limits.MAX_CONTEXT_TOKENS)]
    """The first so many of it. Attempts with parts of the same chain hold the same blocks of the pool."""


PrefixParts = Annotated[tuple[PrefixPart, ...], Meta(max_length=limits.MAX_PREFIX_PARTS)]
