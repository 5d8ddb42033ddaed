"""When a choice ends, as a worker sees it (stop strings are found in the gateway). Pure."""

from proto.errors import FinishReason
from proto.sampling import Sampling


def finish_reason(token: int, output_count: int, sampling: Sampling) -> FinishReason | None:
    """Why the choice ends with `token`, its `output_count`-th output token (counted from 1), or None when it goes on.

    `sampling.stop_token_ids` holds the end-of-sequence ids too, unless the user asked to ignore them.
    """
    assert output_count >= 1, output_count
    if token in sampling.stop_token_ids:
        return FinishReason.STOP
    if output_count >= sampling.max_tokens:
        return FinishReason.LENGTH
    return None
