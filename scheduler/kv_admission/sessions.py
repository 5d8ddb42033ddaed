"""Conversations of one model, and what of their KV is kept between turns. Pure.

A session is found by its prompt, which continues the last one. Its client may give it a name; parallel sessions may share one.
When a turn ends, its
sequence and reservations are free at once. Its KV stays in its workers' caches as a lease, which takes no room from others:
leases are given up when the room is needed, least likely to be used again first (`engine.kv.idle_blocks`). This module
estimates how likely that is: the share of a tenant's turns that another one follows, and the mean time between them. A turn
that is not followed within `PATIENCE` times that mean counts as not followed, until a next turn comes.

Leases cost their tenants a little: KV that a session finds again is charged by its tokens times the time they were kept, up to
a tenth of computing them. If leases and open turns together exceed the caches, organisations with more of them than their share
of the room lose their leases first: those of their users with more than an equal part of that share.
"""

from collections import OrderedDict
from collections.abc import Iterator
from hashlib import blake2b
from itertools import islice
from typing import Final, NamedTuple

import msgspec

from proto.limits import HASH_BYTES
from proto.messages import Submit
from proto.parts import Returns

SESSIONS_MAX: Final = 1 << 16
TENANTS_MAX: Final = 1 << 14
KEPT_S: Final = 3600.0  # a session of which nothing was heard for so long is forgotten
SCANNED_BLOCKS: Final = 128  # a session without a name is found if its turn adds less than so many blocks to its prompt
PATIENCE: Final = 8
PATIENCE_S: Final = 60.0  # a lease lasts for so long at least
TAIL_BLOCKS: Final = 8
LEARNT: Final = 0.1  # weight of a new observation
COMPUTED_ANEW_S: Final = 6000.0  # keeping a token for so long would cost as much as computing it
CHARGE_MAX: Final = 0.1  # keeping KV costs at most this part of computing it
AT_ONCE: Final = 64  # sessions that one event forgets at most


class SessionTenant(msgspec.Struct, eq=False, gc=False):
    share: float = 0.5  # the part of its turns that another one follows
    mean_s: float = 0.0  # the mean time between the end of a turn and the next turn; 0: there was none yet

    def patience_s(self) -> float:
        return max(PATIENCE * self.mean_s, PATIENCE_S)


class _Organisation(msgspec.Struct, eq=False, gc=False):
    weight: float  # its weight when it began to have sessions
    tokens: int = 0  # the tokens of leases and of open turns' prompts
    users: dict[str, int] = {}  # the same tokens by tenant


class Session(msgspec.Struct, eq=False):
    tenant: str
    name: bytes  # empty: it has none
    prompt_tokens: int = 0
    """The length of the last prompt that was answered; 0: none was. `tail` and `rest` are of that prompt."""
    tail: bytes = b""  # the hashes of its last full blocks, `TAIL_BLOCKS` at most
    rest: bytes = b""  # a digest of the tokens behind them
    tokens: int = 0  # the prompt and its answer
    running: int = 0  # turns
    idle_since: float = 0.0
    leased: bool = False

    @property
    def end(self) -> bytes:
        """The hash of the last full block of its last prompt."""
        return self.tail[-HASH_BYTES:]


class OpenTurn(NamedTuple):
    """A turn that has not ended."""

    session: Session
    prompt_tokens: int  # `prompt_tokens`, `tail` and `rest` are as in `Session`, for this turn's prompt
    tail: bytes
    rest: bytes
    kept_tokens: int  # the length of the last turn's prompt, which it continues; 0: it continues none
    kept_s: float  # the time since the last turn ended, in seconds
    weight: float

    @property
    def cost(self) -> float:
        """The charge to the tenant for keeping it, in prompt tokens."""
        return self.kept_tokens * min(self.kept_s / COMPUTED_ANEW_S, CHARGE_MAX)


class Sessions:
    def __init__(self) -> None:
        self.kv_tokens = 0  # room for sessions in the model's caches
        self.tokens = 0  # the tokens of leases and of open turns' prompts
        self.leased_tokens = 0
        self.leases = 0
        self._tenants: OrderedDict[str, SessionTenant] = OrderedDict()  # tenants by name, least recently used first
        self._organisations: dict[str, _Organisation] = {}  # organisations that have leases or open turns
        self._weights = 0.0  # their weights together
        self._by_name: dict[tuple[str, bytes], dict[Session, None]] = {}
        self._by_end: dict[tuple[str, bytes], Session] = {}
        self._idle: OrderedDict[Session, None] = OrderedDict()  # sessions without a running turn, longest idle first
        self._leases_of: OrderedDict[str, OrderedDict[Session, None]] = OrderedDict()
        """Leases of each tenant, in the order of `_idle`."""

    def __len__(self) -> int:
        return len(self._idle)

    def came(self, submit: Submit, blob: bytes, weight: float, now: float) -> OpenTurn:
        """A new request: the next turn of a session, or the first of another one. `weight`: of its organisation."""
        self._forget(now)
        tenant = self._tenant(submit.tenant)
        if self._leases_of:
            longest = next(
                iter(self._leases_of)
            )  # each tenant in turn, so that those that do not come again lose theirs too
            self._leases_of.move_to_end(longest)
            self._give_up_waiting(longest, now)
        self._give_up_waiting(submit.tenant, now)
        session, kept_tokens, gap_s = self._find(submit, blob), 0, 0.0
        if session is None:
            session = Session(submit.tenant, submit.session)
            if session.name:
                self._by_name.setdefault((session.tenant, session.name), {})[session] = None
        elif session in self._idle:
            gap_s, kept_tokens = now - session.idle_since, session.prompt_tokens
            if not session.leased:
                tenant.share += LEARNT * (1 - tenant.share)  # it was taken not to come back
            tenant.mean_s += (LEARNT if tenant.mean_s else 1.0) * (gap_s - tenant.mean_s)
            self._end_lease(session)
            del self._idle[session]
            tenant.share += LEARNT * (1 - tenant.share)
        session.running += 1
        tokens, hashes = submit.prompt_tokens, submit.block_hashes
        self._count(submit.tenant, tokens, weight)
        in_blocks = len(hashes) // HASH_BYTES * submit.hash_block_size
        return OpenTurn(
            session,
            tokens,
            hashes[-TAIL_BLOCKS * HASH_BYTES :],
            _digest(blob[4 * in_blocks :]),
            kept_tokens,
            gap_s,
            weight,
        )

    def answered(self, turn: OpenTurn, tokens: int, now: float) -> None:
        """A turn has ended with an answer, and left so many tokens of KV."""
        session = turn.session
        if self._by_end.get((session.tenant, session.end)) is session:
            del self._by_end[(session.tenant, session.end)]
        session.prompt_tokens, session.tail, session.rest = turn.prompt_tokens, turn.tail, turn.rest
        session.tokens = tokens
        if session.end:
            self._by_end[(session.tenant, session.end)] = session
        self.over(turn, now)
        if session in self._idle and session.end:
            self._lease(session, turn.weight)

    def over(self, turn: OpenTurn, now: float) -> None:
        """End a turn. Only `answered` sets what it leaves."""
        session = turn.session
        self._count(session.tenant, -turn.prompt_tokens)
        session.running -= 1
        if session.running:
            return
        if not session.prompt_tokens:
            self._drop(session)
            return
        session.idle_since = now
        self._idle[session] = None
        self._forget(now)

    def returns(self, tenant_name: str) -> Returns:
        """How likely turns of this tenant are to be followed by another one, for those who keep what they leave."""
        tenant = self._tenants.get(tenant_name) or SessionTenant()
        if self.tokens > self.kv_tokens and self._is_over_share(tenant_name):
            return Returns(0.0, 0.0)
        return Returns(tenant.share, min(tenant.mean_s or PATIENCE_S, KEPT_S))

    def mean_s(self, tenant_name: str) -> float:
        """The mean time between the end of a tenant's turn and its next turn."""
        tenant = self._tenants.get(tenant_name)
        return tenant.mean_s if tenant is not None else PATIENCE_S

    def _is_over_share(self, tenant_name: str) -> bool:
        organisation = self._organisations.get(_organisation_of(tenant_name))
        if organisation is None:
            return False
        room, users = self.kv_tokens * organisation.weight / self._weights, organisation.users
        if organisation.tokens <= room or len(users) == len(self._organisations) == 1:
            return False
        return users.get(tenant_name, 0) > room / len(users)

    def end(self, tenant: str, name: bytes) -> list[bytes]:
        """End the sessions of a name, as their client asks: the last of them, if there are very many. Returns their tails.
        Running turns go on, and what they leave is cached as usual."""
        named = self._by_name.get((tenant, name), {})
        ended = [session for session in islice(reversed(named), AT_ONCE) if session in self._idle]
        for session in ended:
            self._end_lease(session)
            del self._idle[session]
            self._drop(session)
        return [session.tail for session in ended]

    def is_leased(self, submit: Submit, blob: bytes, now: float) -> bool:
        """Whether a request is the next turn of a session whose KV is kept, and came in time."""
        found = self._find(submit, blob)
        return found is not None and self._is_awaited(found, now)

    def awaited(self, now: float) -> int:
        """How many sessions are kept whose next turn is not overdue. Leases of others end when their tenant comes again."""
        return sum(self._is_awaited(one, now) for leases in self._leases_of.values() for one in leases)

    def _is_awaited(self, session: Session, now: float) -> bool:
        return session.leased and session.idle_since + self._tenants[session.tenant].patience_s() > now

    # --- what is kept ---------------------------------------------------------------------------------------------------

    def _find(self, submit: Submit, blob: bytes) -> Session | None:
        for end in _ends(submit.block_hashes):
            found = self._by_end.get((submit.tenant, end))
            if found is not None and found.name == submit.session and _continues(submit, blob, found):
                return found
        last = next(reversed(self._by_name.get((submit.tenant, submit.session), {})), None)
        return last if last is not None and _continues(submit, blob, last) else None

    def _tenant(self, name: str) -> SessionTenant:
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = SessionTenant()
            if len(self._tenants) > TENANTS_MAX:
                oldest = next(iter(self._tenants))
                for session in list(self._leases_of.get(oldest, ())):
                    self._end_lease(session)
                del self._tenants[oldest]
        else:
            self._tenants.move_to_end(name)
        return tenant

    def _lease(self, session: Session, weight: float) -> None:
        self._tenant(session.tenant)
        leases = self._leases_of.setdefault(session.tenant, OrderedDict())
        self._count(session.tenant, session.tokens, weight)
        leases[session] = None
        session.leased = True
        self.leases += 1
        self.leased_tokens += session.tokens

    def _end_lease(self, session: Session) -> None:
        if not session.leased:
            return
        leases = self._leases_of[session.tenant]
        del leases[session]
        session.leased = False
        self.leases -= 1
        self.leased_tokens -= session.tokens
        self._count(session.tenant, -session.tokens)
        if not leases:
            del self._leases_of[session.tenant]

    def _count(self, tenant: str, tokens: int, weight: float = 1.0) -> None:
        """Count tokens of a tenant's leases and open turns. `weight`: of its organisation, if that has had none."""
        name = _organisation_of(tenant)
        organisation = self._organisations.get(name)
        if organisation is None:
            organisation = self._organisations[name] = _Organisation(weight)
            self._weights += weight
        self.tokens += tokens
        organisation.tokens += tokens
        organisation.users[tenant] = organisation.users.get(tenant, 0) + tokens
        if not organisation.users[tenant]:
            del organisation.users[tenant]
            if not organisation.users:
                del self._organisations[name]
                self._weights = self._weights - organisation.weight if self._organisations else 0.0

    def _give_up_waiting(self, name: str, now: float) -> None:
        """End a tenant's leases for which no next turn has come for too long."""
        leases, tenant = self._leases_of.get(name), self._tenants[name]
        for _ in range(AT_ONCE):
            if not leases or (first := next(iter(leases))).idle_since + tenant.patience_s() > now:
                return
            self._end_lease(first)
            tenant.share -= LEARNT * tenant.share

    def _forget(self, now: float) -> None:
        for _ in range(AT_ONCE):
            first = next(iter(self._idle), None)
            if first is None or (first.idle_since + KEPT_S > now and len(self._idle) <= SESSIONS_MAX):
                return
            self._end_lease(first)
            del self._idle[first]
            self._drop(first)

    def _drop(self, session: Session) -> None:
        if self._by_end.get((session.tenant, session.end)) is session:
            del self._by_end[(session.tenant, session.end)]
        named = self._by_name.get((session.tenant, session.name))
        if named is not None:
            named.pop(session, None)
            if not named:
                del self._by_name[(session.tenant, session.name)]


def _continues(submit: Submit, blob: bytes, session: Session) -> bool:
    """Whether a prompt begins with the last one of a session, and goes on."""
    size, tokens = submit.hash_block_size, session.prompt_tokens
    if not size or submit.prompt_tokens <= tokens:
        return False
    blocks = tokens // size
    if not submit.block_hashes[: blocks * HASH_BYTES].endswith(session.end):
        return False
    return _digest(blob[4 * blocks * size : 4 * tokens]) == session.rest


def _organisation_of(tenant: str) -> str:
    return tenant.partition("/")[0]


def _digest(packed: bytes) -> bytes:
    return blake2b(packed, digest_size=HASH_BYTES).digest()


def _ends(hashes: bytes) -> Iterator[bytes]:
    """The hashes of the last blocks of a prompt, the last one first."""
    first = max(0, len(hashes) - SCANNED_BLOCKS * HASH_BYTES)
    for at in range(len(hashes) - HASH_BYTES, first - 1, -HASH_BYTES):
        yield hashes[at : at + HASH_BYTES]
