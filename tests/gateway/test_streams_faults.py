"""Whatever the network and the processes do, every stream delivers its tokens once, in order, and ends once."""

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.streams.keeper import StreamKeeper
from gateway.streams.types import (
    Action,
    ClientGone,
    Deliver,
    Ended,
    Finish,
    LinkDown,
    LinkUp,
    Open,
    SendCancel,
    SendSubmit,
    StreamLimits,
    Tick,
    TokensReceived,
)
from proto.codec import unpack_tokens
from proto.errors import FinishReason, Interrupt, Reject
from proto.messages import Accepted, Interrupted, Rejected, Submit, TokenItem
from proto.sampling import Sampling
from tests.gateway.keeper_world import work

LIMITS = StreamLimits(attempts_max=6, idle_s=60, link_wait_s=20)
LENGTH = 6
FAULTS = st.sampled_from(
    ["step", "step", "step", "step", "drop", "repeat", "overtake", "late", "interrupt", "reject", "down", "up", "wait"]
)


def word(choice: int, index: int) -> int:
    """What any worker draws there, in any attempt."""
    return 100 * (choice + 1) + index


class World:
    """Workers and a coordinator that answer the keeper, badly when told to."""

    def __init__(self, choices: int) -> None:
        self.keeper = StreamKeeper(LIMITS)
        self.now = 0.0
        self.up = False
        self.incarnation = 1
        self.live: dict[str, tuple[Submit, int]] = {}
        """Request id → current attempt and the index its workers have come to."""
        self.sent: list[TokenItem] = []
        self.got: dict[int, list[int]] = {choice: [] for choice in range(choices)}
        self.finished: set[int] = set()
        self.ended: list[Ended] = []
        self.attempts: dict[str, int] = {}
        self.post(Open(work("r", (1, 2), sampling=Sampling(max_tokens=LENGTH), choices=choices)))

    def post(self, event: object) -> None:
        actions = self.keeper.handle(event, self.now)  # type: ignore[arg-type]
        for action in actions:
            self.see(action)

    def see(self, action: Action) -> None:
        match action:
            case SendSubmit(submit, blob):
                assert self.up
                ids = unpack_tokens(blob, submit.prompt_tokens)
                assert ids[:2] == [1, 2]
                if submit.resumed_tokens:
                    assert submit.choices == 1
                assert ids[2:] == [word(submit.first_choice, index) for index in range(submit.resumed_tokens)]
                assert submit.attempt >= self.attempts.get(submit.request_id, 1)
                assert submit.attempt <= LIMITS.attempts_max
                self.attempts[submit.request_id] = submit.attempt
                self.live[submit.request_id] = (submit, submit.resumed_tokens)
            case SendCancel(cancel):
                assert self.up
                self.live.pop(cancel.request_id, None)
            case Deliver(_, choice, text, tokens, _, finish):
                assert not self.ended
                assert choice not in self.finished
                have = len(self.got[choice])
                assert list(tokens) == [word(choice, have + k) for k in range(len(tokens))]
                assert text == "".join(f"{token} " for token in tokens)
                self.got[choice] += tokens
                if finish is not None:
                    assert finish is Finish.LENGTH
                    self.finished.add(choice)
            case Ended():
                self.ended.append(action)

    def items(self, request_id: str) -> list[TokenItem]:
        submit, index = self.live[request_id]
        self.live[request_id] = (submit, index + 1)
        choices = range(submit.first_choice, submit.first_choice + submit.choices)
        last = FinishReason.LENGTH if index + 1 == LENGTH else None
        return [
            TokenItem(request_id, submit.attempt, choice, index, (word(choice, index),), last)
            for choice in choices
            if index < LENGTH
        ]

    def receive(self, items: list[TokenItem]) -> None:
        """The first token of an attempt comes from its prefill worker, the others from its decode worker."""
        for item in items:
            submit, _ = self.live.get(item.request_id, (None, 0))
            first = submit is not None and item.index == submit.resumed_tokens
            self.post(TokensReceived((item,), 0 if first else 20))

    def act(self, what: str, pick: int) -> None:
        names = sorted(self.live)
        name = names[pick % len(names)] if names else None
        if what == "down" and self.up:
            self.up = False
            self.post(LinkDown())
        elif what == "up" and not self.up:
            self.up = True
            if pick % 2:
                self.incarnation += 1
                self.live = {k: v for k, v in self.live.items() if v[1] > v[0].resumed_tokens}
            else:
                self.live.clear()
            self.post(LinkUp(self.incarnation))
        elif what == "wait":
            self.now += 0.3
            self.post(Tick())
        elif what == "late" and self.sent:
            self.post(TokensReceived((self.sent[pick % len(self.sent)],), 20))
        elif name is not None and what in ("step", "repeat", "overtake", "drop"):
            if self.up:
                self.post(Accepted(name, self.live[name][0].attempt))
            if name not in self.live:
                return
            items = self.items(name)
            self.sent += items
            if what == "overtake":
                following = self.items(name)
                self.sent += following
                self.receive(following)
            if what != "drop" and name in self.live:
                self.receive(items)
                if what == "repeat":
                    self.receive(items[::-1])
        elif name is not None and self.up and what == "interrupt":
            submit, _ = self.live.pop(name)
            self.post(Interrupted(name, submit.attempt, Interrupt.DECODE_LOST))
        elif name is not None and self.up and what == "reject" and self.live[name][0].attempt > 1:
            submit, index = self.live[name]
            if index > submit.resumed_tokens:
                return  # it was accepted
            del self.live[name]
            self.post(Rejected(name, submit.attempt, Reject.QUEUE_FULL, "full", 0.1))


@settings(deadline=None, max_examples=300)
@given(st.integers(1, 3), st.lists(st.tuples(FAULTS, st.integers(0, 50)), max_size=60))
def test_every_stream_ends_once_and_whole(choices: int, story: list[tuple[str, int]]) -> None:
    """Every stream delivers its tokens in order and ends once, whatever faults occur before."""
    world = World(choices)
    world.act("up", 0)
    for what, pick in story:
        world.act(what, pick)
    # The faults are over: all must come to an end by itself.
    world.act("up", 1)
    for _ in range(400):
        if world.ended:
            break
        for turn in range(max(1, len(world.live))):
            world.act("step", turn)
        at = world.keeper.next_deadline()
        if not world.live and at is not None:
            world.now = max(world.now, at)
        world.post(Tick())
        # A worker that was cut off and never told goes silent: time shows it.
        if world.live and all(index >= LENGTH for _, index in world.live.values()):
            world.now += 6
            world.post(Tick())
    (ended,) = world.ended
    if ended.failure is None:
        assert world.finished == set(range(choices))
        assert all(tokens == [word(choice, k) for k in range(LENGTH)] for choice, tokens in world.got.items())
    else:
        assert world.finished != set(range(choices))
    assert not world.keeper.streams
    assert not world.keeper.submissions
    assert world.keeper.next_deadline() is None


@settings(deadline=None)
@given(st.integers(1, 3), st.lists(st.tuples(FAULTS, st.integers(0, 50)), max_size=25))
def test_leaving_client_leaves_nothing_behind(choices: int, story: list[tuple[str, int]]) -> None:
    """A client that leaves after any faults leaves no stream, submission or running work."""
    world = World(choices)
    world.act("up", 0)
    for what, pick in story:
        world.act(what, pick)
    world.act("up", 1)
    world.post(ClientGone("r"))
    assert not world.keeper.streams
    assert not world.keeper.submissions
    assert world.ended or all(index >= LENGTH for _, index in world.live.values())
    assert world.keeper.next_deadline() is None
