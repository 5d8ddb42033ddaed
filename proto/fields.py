"""Types of message fields, with their bounds."""

from typing import Annotated

from msgspec import Meta

from proto import limits

RequestId = Annotated[str, Meta(min_length=1, max_length=limits.MAX_ID_CHARS, pattern=r"^[A-Za-z0-9_.:-]+\Z")]
Incarnation = Annotated[int, Meta(gt=0, le=(1 << 63) - 1)]  # drawn at random when a process starts, never used again
Attempt = Annotated[int, Meta(ge=1, le=1_000)]
Name = Annotated[str, Meta(min_length=1, max_length=limits.MAX_ID_CHARS, pattern=r"^[A-Za-z0-9_.:-]+\Z")]
NameOrEmpty = Annotated[str, Meta(max_length=limits.MAX_ID_CHARS, pattern=r"^[A-Za-z0-9_.:-]*\Z")]
Text = Annotated[str, Meta(max_length=limits.MAX_TEXT_CHARS)]
Count = Annotated[int, Meta(ge=0, lt=1 << 40)]
Tokens_ = Annotated[int, Meta(ge=0, le=limits.MAX_CONTEXT_TOKENS)]
AnswerTokens = Annotated[int, Meta(ge=0, le=limits.MAX_CONTEXT_TOKENS * limits.MAX_CHOICES)]
Choices = Annotated[int, Meta(ge=1, le=limits.MAX_CHOICES)]
ChoiceIndex = Annotated[int, Meta(ge=0, lt=limits.MAX_CHOICES)]
BlockHashes = Annotated[bytes, Meta(max_length=limits.MAX_BLOCK_HASHES * limits.HASH_BYTES)]
"""Names of a prompt's full KV blocks, in the size of the worker they go to: `HASH_BYTES` each, chained, and keyed by tenant."""
HashKey = Annotated[bytes, Meta(max_length=32)]  # a cluster's key for hashes of prompts; empty: none
SessionName = Annotated[bytes, Meta(max_length=limits.HASH_BYTES)]  # a hash of the client's name for it; empty: none
CacheChanges = Annotated[bytes, Meta(max_length=limits.MAX_CACHE_CHANGES * limits.HASH_BYTES)]
BlockSize = Annotated[int, Meta(ge=1, le=4096)]  # tokens per KV block
DurationMs = Annotated[float, Meta(ge=0.0, le=1e12)]
Seconds = Annotated[float, Meta(ge=0.0, le=86_400.0)]
HandOverMs = Annotated[float, Meta(ge=0.0, le=1e12)] | None
