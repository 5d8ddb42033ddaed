"""What a worker has and holds, as it registers."""

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from proto.fields import Attempt, BlockSize, Count, RequestId, Tokens_
from proto.parts import PrefixParts

STEP_TOKENS: Final = 256
"""Of a prefill step on a CPU."""


class Capacity(msgspec.Struct, frozen=True, gc=False, array_like=True, forbid_unknown_fields=True):
    """What a worker can hold."""

    kv_blocks: Count
    block_size: BlockSize
    max_seqs: Annotated[int, Meta(ge=1, le=1 << 20)]
    """Most sequences at once: in prefill, prompts being computed; in decode, the running batch."""
    context_tokens: Tokens_
    step_tokens: Annotated[int, Meta(ge=1, le=1 << 16)] = STEP_TOKENS
    """Of a prefill step, where the coordinator is not told another budget."""


class Held(msgspec.Struct, frozen=True, gc=False, array_like=True, forbid_unknown_fields=True):
    """What a worker still holds for an attempt when it registers (again); `resumed_tokens` as in the order it has."""

    request_id: RequestId
    attempt: Attempt
    kv_blocks: Count
    seqs: Count
    resumed_tokens: Tokens_ = 0
    prompt_tokens: Tokens_ = 0
    """From here on in decode only; 0: nothing more is known than `kv_blocks`."""
    left_tokens: Tokens_ = 0
    """Most tokens that each choice forwards after joining the batch."""
    steps: Count = 0
    """As in `DecodeProgress`, when this was said."""
    joined_step: Count | None = None
    """As in `Joined`; None: it has not joined yet."""
    prefix: PrefixParts = ()
    """As in `SharedPrefix`."""
