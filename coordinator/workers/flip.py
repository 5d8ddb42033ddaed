"""One worker's change of role, from the order to its first step in the new role."""

from dataclasses import dataclass
from enum import StrEnum

from proto.messages import Hello, Role
from proto.status import FlipStatus


class FlipState(StrEnum):
    DRAINING = "draining"
    """It serves in its old role to the end of what it has."""
    REGISTERING = "registering"
    """It holds nothing, was told so, and is to come back in the new role."""
    DONE = "done"
    FAILED = "failed"


@dataclass(eq=False)
class Flip:
    hello: Hello
    """Of the worker in its old role."""
    role: Role
    """The new one."""
    force: bool
    why: str
    ordered_at: float
    state: FlipState = FlipState.DRAINING
    failure: str = ""
    drained_at: float = 0.0
    registered_at: float = 0.0
    first_step_at: float = 0.0
    """0: none has run yet."""

    def status(self) -> FlipStatus:
        def ms(since: float, until: float) -> float:
            return max(0.0, 1000 * (until - since)) if until else 0.0

        return FlipStatus(
            self.hello.name,
            self.hello.pid,
            self.hello.role,
            self.role,
            self.state.value,
            self.why,
            self.failure,
            ms(self.ordered_at, self.drained_at),
            ms(self.drained_at, self.registered_at),
            ms(self.registered_at, self.first_step_at),
        )
