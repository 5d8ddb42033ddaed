"""Log-probabilities of a prompt's tokens, on their way to the gateway."""

from typing import Annotated

from msgspec import Meta

from proto import limits
from proto.fields import Attempt, RequestId
from proto.messages import Message

_TOP_BYTES_MAX = 4 * limits.MAX_PROMPT_LOGPROBS * limits.MAX_TOP_LOGPROBS


class PromptLogprobs(Message, frozen=True):
    """Log-probabilities of consecutive tokens of an attempt's prompt, where its sampling asks for them: all those of the
    prompt come, in order, before its first token. Numbers are packed, little-endian; rows are tokens."""

    request_id: RequestId
    attempt: Attempt
    start: Annotated[int, Meta(ge=1, le=limits.MAX_CONTEXT_TOKENS)]
    """Position in the prompt of the first of these tokens. The prompt's own first token has no probability."""
    top: Annotated[int, Meta(ge=0, le=limits.MAX_TOP_LOGPROBS)]
    """How many of the likeliest tokens there are for each."""
    logprobs: Annotated[bytes, Meta(min_length=4, max_length=4 * limits.MAX_PROMPT_LOGPROBS)]
    """float32 [rows], of the prompt's tokens."""
    ranks: Annotated[bytes, Meta(min_length=4, max_length=4 * limits.MAX_PROMPT_LOGPROBS)]
    """int32 [rows]: the place of each among all tokens, likeliest first; 1 is the likeliest."""
    top_ids: Annotated[bytes, Meta(max_length=_TOP_BYTES_MAX)] = b""
    """int32 [rows, top], likeliest first."""
    top_logprobs: Annotated[bytes, Meta(max_length=_TOP_BYTES_MAX)] = b""
    """float32 [rows, top]."""
