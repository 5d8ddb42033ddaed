"""The wait queue: first come, first served. Fairness between tenants will take this class's place behind its methods."""

from collections.abc import Callable, Iterator

from coordinator.request import Request


class WaitQueue:
    """Requests in the state QUEUED. Bounded by its owner, which asks `len` before it pushes."""

    def __init__(self) -> None:
        self._waiting: dict[str, Request] = {}
        self.prompt_tokens = 0
        """Tokens to be prefilled, over all that wait."""

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._waiting.values())

    def push(self, request: Request) -> None:
        assert request.id not in self._waiting
        self._waiting[request.id] = request
        self.prompt_tokens += request.submit.prompt_tokens

    def remove(self, request: Request) -> None:
        del self._waiting[request.id]
        self.prompt_tokens -= request.submit.prompt_tokens

    def pop_first(self, eligible: Callable[[Request], bool], hopeless: Callable[[Request], bool]) -> Request | None:
        """Take the head out if it can run now; a head that cannot holds up those behind it, so that big ones do not starve.

        One that no worker of now could ever hold is passed over: it waits for a larger worker to come (back), or expires.

        Each model has a pool and therefore a queue of its own, so a head only waits for room.
        """
        head = next((request for request in self._waiting.values() if not hopeless(request)), None)
        if head is None or not eligible(head):
            return None
        self.remove(head)
        return head
