"""Types of message fields, with their bounds."""

from typing import Annotated

import msgspec
from msgspec import Meta

from proto import limits

RequestId = Annotated[str, Meta(min_length=1, max_length=limits.MAX_ID_CHARS, pattern=r"^[A-Za-z0-9_.:-]+$")]
Incarnation = Annotated[int, Meta(gt=0, le=(1 << 63) - 1)]
"""One incarnation of one process: drawn at random when it starts, never used again."""
Attempt = Annotated[int, Meta(ge=1, le=1_000)]
Name = Annotated[str, Meta(min_length=1, max_length=limits.MAX_ID_CHARS, pattern=r"^[A-Za-z0-9_.:-]+$")]
Text = Annotated[str, Meta(max_length=limits.MAX_TEXT_CHARS)]
Count = Annotated[int, Meta(ge=0, lt=1 << 40)]
Tokens_ = Annotated[int, Meta(ge=0, le=limits.MAX_CONTEXT_TOKENS)]
AnswerTokens = Annotated[int, Meta(ge=0, le=limits.MAX_CONTEXT_TOKENS * limits.MAX_CHOICES)]
Choices = Annotated[int, Meta(ge=1, le=limits.MAX_CHOICES)]
ChoiceIndex = Annotated[int, Meta(ge=0, lt=limits.MAX_CHOICES)]
BlockHashes = Annotated[bytes, Meta(max_length=limits.MAX_BLOCK_HASHES * limits.HASH_BYTES)]
"""Names of a prompt's full KV blocks, in the size of the worker they go to: `HASH_BYTES` each, chained, and keyed by tenant."""
CacheChanges = Annotated[bytes, Meta(max_length=limits.MAX_CACHE_CHANGES * limits.HASH_BYTES)]
BlockSize = Annotated[int, Meta(ge=1, le=4096)]  # tokens per KV block
DurationMs = Annotated[float, Meta(ge=0.0, le=1e12)]
Seconds = Annotated[float, Meta(ge=0.0, le=86_400.0)]
HandOverMs = Annotated[float, Meta(ge=0.0, le=1e12)] | None


class RateState(msgspec.Struct, frozen=True, gc=False, array_like=True, forbid_unknown_fields=True):
    """What is left of a tenant's rates, for the `x-ratelimit-*` headers; a limit of 0 means that there is none."""

    limit_requests: Count
    remaining_requests: Count
    reset_requests_s: Seconds
    """Until all of the limit is there again."""
    limit_tokens: Count
    remaining_tokens: Count
    reset_tokens_s: Seconds


class Peer(msgspec.Struct, frozen=True, gc=False, array_like=True, forbid_unknown_fields=True):
    """Where another process is and which incarnation of it is meant."""

    address: Text
    incarnation: Incarnation


class Chunk(msgspec.Struct, frozen=True, gc=False, array_like=True, forbid_unknown_fields=True):
    request_id: RequestId
    attempt: Attempt
    start: Tokens_
    length: Annotated[int, Meta(ge=1, le=limits.MAX_CONTEXT_TOKENS)]
