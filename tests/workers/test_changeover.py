"""When a process with one registration or two takes another role."""

from dataclasses import dataclass, field

from proto.messages import Role
from worker.changeover import Changeover


@dataclass(eq=False)
class Half:
    """A registration that has been told `Drained` already, unless it is `busy`."""

    busy: bool = False
    ready: bool = False
    flipped: bool = False
    why: str = ""
    changeover: Changeover | None = None

    @property
    def could_flip(self) -> bool:
        return self.ready and not self.busy

    def flip(self) -> None:
        assert not self.flipped, "once"
        self.flipped = True

    def ready_to_flip(self) -> None:
        self.ready = True
        if self.could_flip and self.changeover is not None:
            self.changeover.look()

    def not_ready_to_flip(self) -> None:
        self.ready = False

    def cannot_flip(self, why: str) -> None:
        self.why = why
        assert self.changeover is not None
        self.changeover.ordered(self, None)


@dataclass
class World:
    halves: list[Half] = field(default_factory=lambda: [Half(), Half()])
    prepared: list[Role] = field(default_factory=list)
    dropped: int = 0

    def __post_init__(self) -> None:
        self.changeover = Changeover(self.prepared.append, self._drop)
        for half in self.halves:
            half.changeover = self.changeover
            self.changeover.add(half)

    def _drop(self) -> None:
        self.dropped += 1

    def order(self, role: Role | None, *numbers: int) -> None:
        for number in numbers or range(len(self.halves)):
            self.changeover.ordered(self.halves[number], role)

    @property
    def flipped(self) -> list[bool]:
        return [half.flipped for half in self.halves]


def test_halves_flip_together() -> None:
    """Both halves change role only when the last of them holds nothing, and nothing takes it back."""
    w = World()
    w.halves[1].busy = True
    w.order(Role.PREFILL)
    assert w.prepared == [Role.PREFILL], "once for the process"
    w.changeover.prepared()
    assert w.flipped == [False, False] and not w.changeover.is_decided
    w.halves[1].busy = False
    w.changeover.look()
    assert w.flipped == [True, True] and w.changeover.is_decided
    w.order(None)
    assert w.changeover.is_decided and not w.dropped, "nothing takes it back"


def test_flip_waits_for_role_and_orders() -> None:
    """No half changes role before the new role is prepared and both halves have the order."""
    w = World()
    w.order(Role.PREFILL, 0)
    w.changeover.look()
    w.changeover.prepared()
    assert w.flipped == [False, False]
    w.order(Role.PREFILL, 1)
    assert w.flipped == [True, True], "the order came late on the other connection"


def test_withdrawn_order_keeps_all_halves() -> None:
    """Both halves stay if the order is withdrawn from one, until they are told again."""
    w = World()
    w.halves[0].busy = True
    w.order(Role.DECODE)
    w.changeover.prepared()
    w.order(None, 1)
    w.halves[0].busy = False
    w.changeover.look()
    assert w.dropped == 1 and not w.halves[0].ready and w.flipped == [False, False]
    w.order(Role.DECODE, 1)
    w.changeover.prepared()
    assert w.flipped == [False, False], "the other one has an order that was taken back"
    w.order(Role.DECODE, 0)
    assert w.flipped == [True, True] and w.prepared == [Role.DECODE] * 2


def test_another_role_is_prepared_anew() -> None:
    """A new order for another role drops what was prepared and prepares that role."""
    w = World([Half()])
    w.order(Role.DECODE)
    w.order(Role.MIXED)
    assert w.prepared == [Role.DECODE, Role.MIXED] and w.dropped == 1
    w.changeover.prepared()
    assert w.flipped == [True]


def test_all_halves_report_failed_preparation() -> None:
    """All halves report why the role could not be prepared, and a later order can succeed."""
    w = World()
    w.order(Role.MIXED)
    w.changeover.failed("--kv-gib: too small")
    assert [half.why for half in w.halves] == ["--kv-gib: too small"] * 2 and w.dropped
    w.changeover.look()
    assert w.flipped == [False, False] and not w.changeover.is_decided
    w.order(Role.MIXED)
    w.changeover.prepared()
    assert w.flipped == [True, True]
