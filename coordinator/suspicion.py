"""What speaks for it that a request ends the workers it runs on. Pure."""

import msgspec

PROGRESS_TOKENS = 4
"""Of an answer. A worker that dies takes fewer with it that were on their way to a gateway, and are computed once more."""
LOSSES_MAX = 3


class Suspicion(msgspec.Struct, frozen=True, gc=False):
    """A request was in a running step of a worker that was lost, and has made no progress since."""

    losses: int
    """Workers lost so, one after the other."""
    prompt_tokens: int = 0
    """The last one was lost in prefill: the request is cleared once so much of its prompt is computed. 0: in decode."""

    @property
    def own_step(self) -> bool:
        """Its chunks run in prefill steps with nothing else in them."""
        return self.prompt_tokens > 0 or self.own_worker

    @property
    def own_worker(self) -> bool:
        """It decodes on a worker with no other request. To empty one takes long, so one loss is not enough."""
        return self.losses >= LOSSES_MAX - 1
