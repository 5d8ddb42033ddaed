"""Whatever well-formed messages peers send, in whatever order: the core calls it misbehaviour or takes it, and never fails."""

import random

from coordinator.core import Core
from coordinator.events import Limits, PeerDown, PeerUp, ProtocolViolation, Received, Tick
from proto.codec import decode
from proto.errors import RemoteProtocolError
from proto.messages import Hello, Role
from tests.fuzz_frames import corpus, hello, mutated

FRAMES = 30_000
SEED = 6
ROLES = (Role.PREFILL, Role.DECODE, Role.GATEWAY, Role.OBSERVER)


def test_random_messages_never_fail_core() -> None:
    """Well-formed messages in random order never make the core fail."""
    generator, known, core = random.Random(SEED), corpus(), Core(Limits())
    there: list[int] = []
    now, taken, protocol_violation = 0.0, 0, 0
    for _ in range(FRAMES):
        now += generator.random() * 0.2
        if len(there) < 6:
            greeting, _ = decode([hello(generator, generator.choice(ROLES), "m", "f")])
            assert isinstance(greeting, Hello)
            if core.refusal(greeting) is None:
                there.append(greeting.incarnation)
                core.handle(PeerUp(greeting.incarnation, greeting), now)
        incarnation = generator.choice(there)
        try:
            message, blob = decode(mutated(generator, known))
        except RemoteProtocolError:
            continue
        taken += 1
        actions = list(core.handle(Received(incarnation, message, blob), now))
        for action in actions:
            if isinstance(action, ProtocolViolation) and action.incarnation in there:
                protocol_violation += 1
                there.remove(action.incarnation)
                core.handle(PeerDown(action.incarnation, "misbehaved"), now)
        core.handle(Tick(), now)
    # Enough of both kinds that the run says something; their shares move with the corpus of messages.
    assert taken > FRAMES / 20 and protocol_violation > taken / 30, (taken, protocol_violation)
