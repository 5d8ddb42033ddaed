"""Conversations: which request is the next turn of which, how long their KV is worth keeping, and what it costs."""

import random
from collections import Counter
from hashlib import blake2b

import pytest

from engine.kv.allocator import BlockAllocator
from proto.codec import pack_tokens, split_hashes
from proto.limits import HASH_BYTES
from proto.messages import Submit
from proto.progress import EndPrefix, EndSession
from proto.sampling import Sampling
from scheduler.kv_admission import sessions as module
from scheduler.kv_admission.sessions import OpenTurn, Sessions
from tests.coordinator.consistent import check_sessions
from tests.coordinator.test_suffixes import World

BLOCK = 4
PROMPT = tuple(range(10, 32))
"""Five blocks and two tokens."""


def submit(prompt: tuple[int, ...], tenant: str = "a", session: bytes = b"", salt: str = "") -> tuple[Submit, bytes]:
    hashes, last = b"", f"{tenant} {salt}".encode()
    for end in range(BLOCK, len(prompt) + 1, BLOCK):
        last = blake2b(last + pack_tokens(prompt[end - BLOCK : end]), digest_size=HASH_BYTES).digest()
        hashes += last
    one = Submit(
        "r", 1, "m", len(prompt), Sampling(max_tokens=8), tenant=tenant, block_hashes=hashes, hash_block_size=BLOCK,
        session=session,
    )  # fmt: skip
    return one, pack_tokens(prompt)


def came(sessions: Sessions, prompt: tuple[int, ...], now: float, tenant: str = "a", session: bytes = b"") -> OpenTurn:
    return sessions.came(*submit(prompt, tenant, session), 1.0, now)


def answered(sessions: Sessions, turn: OpenTurn, now: float) -> None:
    sessions.answered(turn, turn.prompt_tokens + 8, now)


def played(sessions: Sessions, prompt: tuple[int, ...], at: float, **more: str) -> OpenTurn:
    turn = came(sessions, prompt, at, **more)  # type: ignore[arg-type]
    answered(sessions, turn, at)
    return turn


def test_next_turn_is_found_by_prompt() -> None:
    """A next turn is found by its prompt, charged for kept KV, and the gap between turns is learnt."""
    sessions = Sessions()
    first = played(sessions, PROMPT, 0.0)
    before = sessions.returns("a")
    turn = came(sessions, (*PROMPT, 1, 2, 3, 4, 5), 7.0)
    assert turn.session is first.session and (turn.kept_tokens, turn.kept_s) == (22, 7.0)
    assert turn.cost == 22 * 7 / module.COMPUTED_ANEW_S
    after = sessions.returns("a")
    assert after.mean_s == 7.0 and after.share > before.share
    answered(sessions, turn, 8.0)
    late = came(sessions, (*PROMPT, *range(1, 30)), 3000.0)
    assert late.cost == late.kept_tokens * module.CHARGE_MAX


@pytest.mark.parametrize(
    ("prompt", "tenant"),
    [
        (PROMPT, "a"),
        ((*PROMPT[:20], 99, 98, 97), "a"),
        ((*PROMPT[:20],), "a"),
        ((99, *PROMPT[1:], 1, 2, 3), "a"),
        ((*PROMPT, 1, 2, 3), "b"),
    ],
    ids=["the same again", "another end behind the same blocks", "only the beginning", "another beginning", "a tenant"],
)
def test_other_prompts_start_new_sessions(prompt: tuple[int, ...], tenant: str) -> None:
    """A prompt that does not continue a session, or of another tenant, begins a new one."""
    sessions = Sessions()
    first = played(sessions, PROMPT, 0.0)
    turn = came(sessions, prompt, 1.0, tenant)
    assert turn.session is not first.session and turn.kept_tokens == 0


def test_session_names_are_per_tenant() -> None:
    """A session name belongs to its tenant, and stands for all sessions that it was given to."""
    sessions = Sessions()
    first = played(sessions, PROMPT, 0.0, session=b"name")  # type: ignore[arg-type]
    assert came(sessions, PROMPT, 1.0, "b", b"name").session is not first.session
    turn = came(sessions, (7, 8, 9), 2.0, "a", b"name")
    answered(sessions, turn, 3.0)
    assert sessions.end("b", b"name") == [], "its turn runs"
    assert sessions.end("a", b"other") == []
    went_on = came(sessions, (7, 8, 9, *PROMPT), 4.0, "a", b"name")
    assert went_on.session is turn.session and went_on.kept_tokens == 3
    answered(sessions, went_on, 5.0)
    assert sorted(sessions.end("a", b"name")) == sorted((first.tail, went_on.tail)) and sessions.end("a", b"name") == []


ANSWERS = {"first": tuple(range(100, 120)), "again": tuple(range(200, 220))}


@pytest.mark.parametrize(
    ("turns", "left"),
    [
        ([("", "first"), ("first", "again")], 0),
        ([("", "first"), ("", "again")], 0),
        ([("", "first"), ("", "again"), ("again", "first")], 0),
        ([("", "first"), ("first", "again"), ("", "again"), ("again", "first")], 0),
        ([("", "first"), ("again", "first")], 5 + 5),
    ],
    ids=["goes on", "generated again", "the new answer goes on", "goes back", "the client changed the answer"],
)
def test_ended_name_leaves_no_kv(turns: list[tuple[str, str]], left: int) -> None:
    """A worker keeps no block of a name's sessions, answers that were generated again included, after the name is ended."""
    sessions, kept, now = Sessions(), BlockAllocator(200), 0.0
    for number, (before, answer) in enumerate(turns):
        prompt = (*PROMPT, *ANSWERS[before], number) if before else PROMPT
        turn = came(sessions, prompt, now := now + 1.0, "a", b"name")
        hashes = split_hashes(submit((*prompt, *ANSWERS[answer]))[0].block_hashes)
        blocks = kept.match_prefix(hashes)
        blocks += kept.allocate(len(hashes) - len(blocks))
        kept.insert(hashes, blocks)
        kept.free(blocks)
        answered(sessions, turn, now)
    for tail in sessions.end("a", b"name"):
        kept.end(split_hashes(tail))
    assert kept.cached_count == left


def test_name_used_again_follows_nothing() -> None:
    """A name that comes again with an unrelated prompt is no followed turn, and each prompt has its own lease."""
    sessions = Sessions()
    for number in range(70):
        played(sessions, (number, *PROMPT), 100.0 * number, session=b"%d" % (number % 35))  # type: ignore[arg-type]
    assert sessions.returns("a").share < 0.1
    both = [came(sessions, (number, *PROMPT), 8000.0, session=b"x") for number in range(2)]
    for turn in both:
        answered(sessions, turn, 8001.0)
    assert sessions.leases == 2


def test_unfollowed_turns_devalue_leases() -> None:
    """Turns without a next one make a tenant's leases worth less, until next turns come again."""
    sessions = Sessions()
    for number in range(40):
        played(sessions, (number, *PROMPT), 100.0 * number)
    low = sessions.returns("a")
    assert low.share < 0.1 and sessions.leases == 1 and sessions.leased_tokens == 31
    for number in range(40):
        came(sessions, (number, *PROMPT, 1, 2), 3990.0)
    assert sessions.returns("a").share > 0.8 and not sessions.leases
    assert sessions.returns("b").share == 0.5, "of another tenant nothing is known"


def test_tenant_over_share_loses_leases_first() -> None:
    """Leases of a tenant over its share are given up first if not all of them fit."""
    sessions = Sessions()
    sessions.kv_tokens = 200
    played(sessions, PROMPT, 0.0, tenant="small")
    for number in range(5):
        played(sessions, (number, *PROMPT), 0.0, tenant="large")
    assert sessions.returns("large").share > 0, "all of it fits"
    running = [came(sessions, (number, *PROMPT), 0.0, "large") for number in range(5, 9)]
    assert sessions.returns("large").share == 0.0 and sessions.returns("small").share > 0
    sessions.kv_tokens = 1000
    assert sessions.returns("large").share > 0
    sessions.kv_tokens = 200
    for turn in running:
        sessions.over(turn, 1.0)
    assert sessions.returns("large").share > 0


def test_users_add_no_share_to_organisation() -> None:
    """Many users of one organisation have the share of one between them, and one of them cannot push out the others."""
    sessions = Sessions()
    sessions.kv_tokens = 400
    played(sessions, PROMPT, 0.0, tenant="quiet")
    for number in range(20):
        played(sessions, (number, *PROMPT), 0.0, tenant=f"loud/{number}")
    assert sessions.returns("loud/3").share == 0.0 and sessions.returns("quiet").share > 0
    sessions = Sessions()
    sessions.kv_tokens = 400
    played(sessions, PROMPT, 0.0, tenant="one/light")
    for number in range(20):
        played(sessions, (number, *PROMPT), 0.0, tenant="one/heavy")
    assert sessions.returns("one/heavy").share == 0.0 and sessions.returns("one/light").share > 0


def test_lone_tenant_keeps_learned_order() -> None:
    """A tenant that is alone loses nothing to others, however many leases it has."""
    sessions = Sessions()
    sessions.kv_tokens = 10
    for number in range(20):
        played(sessions, (number, *PROMPT), 0.0)
    assert sessions.returns("a").share > 0


def test_leases_of_gone_tenants_end() -> None:
    """Leases of a tenant that does not come again leave the sums while others come."""
    sessions = Sessions()
    played(sessions, PROMPT, 0.0, tenant="gone")
    for number in range(3):
        sessions.over(came(sessions, (number,), 100.0, "b"), 100.0)
    assert sessions.leases == sessions.tokens == 0


def test_weight_gives_larger_share() -> None:
    """A tenant with a larger weight has a larger share of the room for leases."""
    sessions = Sessions()
    sessions.kv_tokens = 240
    for tenant, weight in (("heavy", 9.0), ("light", 1.0)):
        for number in range(4):
            sessions.answered(sessions.came(*submit((number, *PROMPT), tenant), weight, 0.0), 31, 0.0)
    assert sessions.returns("heavy").share > 0 and sessions.returns("light").share == 0.0


def test_unanswered_turn_keeps_session() -> None:
    """A turn that ends without an answer leaves its session as it was, and keeps no new one."""
    sessions = Sessions()
    first = played(sessions, PROMPT, 0.0)
    refused = came(sessions, (*PROMPT, 1, 2), 1.0)
    sessions.over(refused, 1.0)
    assert sessions.leases == 0
    assert came(sessions, (*PROMPT, 1, 2), 2.0).session is first.session
    sessions.over(came(sessions, (1, 2, 3), 3.0), 3.0)
    assert len(sessions) == 0, "of one that was never answered nothing is kept"


def test_session_table_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions and tenants are kept up to their bounds, and the counts add up."""
    monkeypatch.setattr(module, "SESSIONS_MAX", 50)
    monkeypatch.setattr(module, "TENANTS_MAX", 5)
    rng, sessions, running, now = random.Random(3), Sessions(), list[OpenTurn](), 0.0
    for _ in range(4000):
        now += rng.expovariate(0.3)
        if running and rng.random() < 0.5:
            turn = running.pop(rng.randrange(len(running)))
            if rng.random() < 0.9:
                answered(sessions, turn, now)
            else:
                sessions.over(turn, now)
        else:
            prompt = (rng.randrange(40), *PROMPT[: rng.randrange(1, 20)])
            name = rng.choice([b"", b"x", b"y"])
            running.append(came(sessions, prompt, now, f"t{rng.randrange(9)}", name))
        assert len(sessions) <= 50 and len(sessions._tenants) <= 5
        assert sessions._weights == len(sessions._organisations)
        check_sessions(sessions, Counter(turn.session for turn in running))
    now += 10 * module.KEPT_S
    for number in range(20):
        sessions.over(came(sessions, (number,), now), now)
    assert len(sessions) == 0


@pytest.mark.parametrize("others", [0, 6])
def test_found_kv_charged_if_others_wait(others: int) -> None:
    """KV that a turn finds is charged to its tenant only if other tenants wait."""
    world = World()
    world.turn("t0", "s", 800, 8)
    world.run(5.0)
    charged: list[tuple[str, float]] = []
    world.core.cluster.queues["m"].fair.charge = lambda path, cost: charged.append((path[1], cost))  # type: ignore[method-assign]
    for number in range(others):
        world.at(14.5, world.submit, f"long-{number}", "b", 4000)
    world.at(15.0, world.turn, "t1", "s", 960, 8)
    world.run(100.0)
    assert world.core.cluster.counters["lease_found"] == 1 and not world.core.cluster.counters["lease_broken"]
    assert [who for who, _ in charged] == (["a"] if others else [])
    assert all(0.8 < cost / (800 * 14 / module.COMPUTED_ANEW_S) < 1.2 for _, cost in charged)


def test_session_end_reaches_its_workers() -> None:
    """The end of a session is sent to the workers that have its KV, only if its own tenant ends it."""
    world = World()
    world.turn("t0", "s", 800, 8)
    world.run(5.0)
    pool = world.core.cluster.pools["m"]
    tail = next(iter(pool.sessions._idle)).tail
    session = next(iter(pool.sessions._idle))
    session.name = b"name"
    pool.sessions._by_name[("a", b"name")] = {session: None}
    gateway = next(i for i, hello in world.core.members.peers.items() if hello.role == "gateway")
    said = []
    send = world.core.state.send
    world.core.state.send = lambda incarnation, message, blob=b"": (
        said.append((incarnation, message)),
        send(incarnation, message, blob),
    )  # type: ignore[method-assign, assignment]
    world.receive(gateway, EndSession("b", b"name"))
    assert not [message for _, message in said if isinstance(message, EndPrefix)], "another tenant's"
    world.receive(gateway, EndSession("a", b"name"))
    told = {incarnation for incarnation, message in said if message == EndPrefix(tail)}
    assert told == set(pool.workers)
    world.turn("t1", "s", 960, 8)
    world.run(20.0)
    assert world.requests["t1"].cached_tokens == 0


def test_leases_delay_no_request() -> None:
    """Leases are given up at once when a request of another tenant needs their room."""
    ttft_s = {}
    for conversations in (0, 12):
        world = World(decode_blocks=200)
        for number in range(conversations):
            world.turn(f"t{number}", f"s{number}", 560, 40)
        world.run(60.0)
        assert world.core.cluster.pools["m"].sessions.leases == conversations
        world.submit("long", "b", 2000, 200)
        world.run(90.0)
        ttft_s[conversations] = world.ttft_s["long"]
    assert ttft_s[12] == pytest.approx(ttft_s[0], abs=0.01), "they are given up at once"
