"""One worker process's change of role, from the order to its first step in the new role."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf

from proto.messages import Hello, Role
from proto.status import FlipStatus


class FlipState(StrEnum):
    DRAINING = "draining"  # it serves in its old role to the end of what it has
    REGISTERING = "registering"  # it holds nothing, was told so, and is to come back in the new role
    DONE = "done"
    FAILED = "failed"


@dataclass(eq=False)
class RunningFlip:
    hellos: Sequence[Hello]  # the process's messages in its old role: one, or two of a mixed worker
    role: Role  # the new one
    force: bool
    why: str
    ordered_at: float
    state: FlipState = FlipState.DRAINING
    failure: str = ""
    drained_at: float = 0.0
    registered_at: float = 0.0
    first_step_at: float = 0.0  # 0: none has run yet
    registered: set[Role] = field(default_factory=set)  # roles in which it has come back
    kept: list[tuple[str, int]] = field(default_factory=list)
    """Interrupted streams of this process whose gateways are not told yet. Their next attempts use the KV that the process has
    kept, once it prefills."""
    kept_until: float = inf

    @property
    def name(self) -> str:
        return self.hellos[0].process or self.hellos[0].name

    @property
    def before(self) -> Role:
        return Role.MIXED if len(self.hellos) > 1 else Role(self.hellos[0].role)

    @property
    def incarnations(self) -> tuple[int, ...]:
        """Its incarnations in the old role."""
        return tuple(hello.incarnation for hello in self.hellos)

    def keeps(self, role: Role) -> bool:
        """Whether the KV of streams on its worker of this role is of use to the process afterwards."""
        return role is Role.DECODE and Role.PREFILL in self.role.registers_as

    def came_back(self, hello: Hello) -> bool:
        """Note that the process has come back in this role. Returns True once it has registered in all its new roles."""
        self.registered.add(hello.role)
        return self.registered == set(self.role.registers_as)

    def status(self) -> FlipStatus:
        def ms(since: float, until: float) -> float:
            return max(0.0, 1000 * (until - since)) if until else 0.0

        return FlipStatus(
            self.name,
            self.hellos[0].pid,
            self.before,
            self.role,
            self.state.value,
            self.why,
            self.failure,
            ms(self.ordered_at, self.drained_at),
            ms(self.drained_at, self.registered_at),
            ms(self.registered_at, self.first_step_at if self.state is FlipState.DONE else 0.0),
            self.hellos[0].model,
        )
