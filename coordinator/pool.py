"""Workers, and what is reserved on them. A pool is the workers of one model."""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

import msgspec

from coordinator.breakers import Breakers
from coordinator.fairqueue import REFUSALS_MAX
from coordinator.locality import Locality
from coordinator.nodes import Path
from coordinator.request import Request
from coordinator.room import NEVER, Life, Room
from coordinator.score import Weights
from proto.messages import Capacity, Chunk, Hello, Role, Step, Submit
from proto.status import KvHeld, KvPair

WORKERS = (Role.PREFILL, Role.DECODE)


class Holding(msgspec.Struct, frozen=True, gc=False):
    """What one attempt has reserved on one worker, until that worker itself says that it has let go."""

    kv_blocks: int
    """In decode: at the end of its longest life. What it holds until then is in the worker's `room`."""
    seqs: int
    path: Path = ()
    """Whom to charge what the worker says it has emitted; empty for what was adopted."""
    life: Life | None = None
    """In decode, but for what was adopted."""
    resumed_tokens: int = 0
    """Of the answer, before this attempt."""


@dataclass(eq=False)
class Worker:
    epoch: int
    hello: Hello
    capacity: Capacity
    free_seqs: int
    room: Room | None = None
    """Decode only. What a prefill worker holds does not grow: `kv_blocks_taken` says it all."""
    kv_blocks_taken: int = 0
    holdings: dict[tuple[str, int], Holding] = field(default_factory=dict)
    placed: dict[str, Request] = field(default_factory=dict)
    """Prefill only: prompts with tokens not yet dispatched, oldest first."""
    steps: dict[int, tuple[Step, list[Request]]] = field(default_factory=dict)
    """Steps in flight, by id, with the request of each chunk."""
    tokens_in_flight: int = 0
    kv_pairs: tuple[KvPair, ...] = ()
    """Prefill only, as it last reported."""
    kv_held: KvHeld = KvHeld(0, 0, 0)  # noqa: RUF009 (it is frozen)
    """As it last reported, for people alone."""
    next_step_id: int = 0
    tokens_forwarded: int = 0
    tokens_per_s: float = 0.0
    """Measured prefill rate, smoothed."""
    trouble: float = 0.0
    """0 … 1: how much of what it was given lately has failed."""
    draining: bool = False
    """Nothing new is placed here."""
    leaving: bool = False
    """It has said so itself: it is to end."""
    hand_over_at: float = inf
    """When what still runs here goes elsewhere, while it is draining."""
    dismissed: bool = False
    """It was told that nothing will come any more."""

    @staticmethod
    def from_hello(hello: Hello) -> "Worker":
        assert hello.capacity is not None
        capacity = hello.capacity
        room = Room(capacity.kv_blocks, capacity.block_size) if hello.role is Role.DECODE else None
        return Worker(hello.epoch, hello, capacity, capacity.max_seqs, room)

    @property
    def free_blocks(self) -> int:
        """Blocks that nothing held here will ever need."""
        taken = self.kv_blocks_taken if self.room is None else self.room.taken
        return max(self.capacity.kv_blocks - taken, 0)  # more may have been adopted than is sure to fit

    def fits(self, submit: Submit, expected_left: int = NEVER) -> bool:
        """Whether there is room for it now."""
        if self.room is None:
            return self.free_seqs > 0 and self.whole_blocks(submit) <= self.free_blocks
        return submit.choices <= self.free_seqs and self.room.fits(Life.of(submit, expected_left))

    def could_ever_take(self, submit: Submit) -> bool:
        """Whether it has room if nothing else is there."""
        seqs = 1 if self.room is None else submit.choices
        return self.whole_blocks(submit) <= self.capacity.kv_blocks and seqs <= self.capacity.max_seqs

    def hold(self, key: tuple[str, int], holding: Holding) -> None:
        """The caller has asked `fits`."""
        assert holding.seqs <= self.free_seqs
        self._count(key, holding)

    def adopt(self, key: tuple[str, int], holding: Holding) -> bool:
        """Count what the worker held before it registered; False if that cannot be. Of its decode streams only the most they
        may need is known, and together that may be more than the pool, which their ends keep apart."""
        blocks = self.capacity.kv_blocks if self.room is not None else self.free_blocks
        if key in self.holdings or holding.seqs > self.free_seqs or holding.kv_blocks > blocks:
            return False
        self._count(key, holding)
        return True

    def _count(self, key: tuple[str, int], holding: Holding) -> None:
        assert key not in self.holdings
        self.holdings[key] = holding
        self.free_seqs -= holding.seqs
        if self.room is None:
            self.kv_blocks_taken += holding.kv_blocks
        elif holding.life is None:
            self.room.adopt(key, holding.kv_blocks)
        else:
            self.room.place(key, holding.life)

    def let_go(self, key: tuple[str, int]) -> Holding | None:
        """Count a holding as free again; None if there is none, as when a message is repeated."""
        holding = self.holdings.pop(key, None)
        if holding is None:
            return None
        self.free_seqs += holding.seqs
        if self.room is None:
            self.kv_blocks_taken -= holding.kv_blocks
        else:
            self.room.let_go(key)
            if not self.holdings:
                self.room.short = False  # nothing runs there any more that would say so
        return holding

    def forwarded(self, key: tuple[str, int]) -> int:
        """Tokens that an attempt has emitted for certain in decode, first ones aside, by the worker's steps."""
        return self.room.forwarded(key) if self.room is not None and key in self.room else 0

    def begin_step(self, chunks: list[Chunk], requests: list[Request]) -> Step:
        step = Step(self.next_step_id, tuple(chunks))
        self.next_step_id += 1
        self.steps[step.step_id] = step, requests
        for chunk in chunks:
            self.tokens_in_flight += chunk.length
        return step

    def end_step(self, step_id: int) -> tuple[tuple[Chunk, ...], list[Request]]:
        """What was asked for in a step that is over, and whose it is; empty if it is not known."""
        found = self.steps.pop(step_id, None)
        if found is None:
            return (), []
        step, requests = found
        for chunk in step.chunks:
            self.tokens_in_flight -= chunk.length
        return step.chunks, requests

    def undispatched_tokens(self) -> int:
        return sum(r.submit.prompt_tokens - r.dispatched_tokens for r in self.placed.values())

    def whole_blocks(self, submit: Submit) -> int:
        """The most blocks it comes to hold here."""
        size = self.capacity.block_size
        return -(-submit.prompt_tokens // size) if self.room is None else Life.of(submit).whole(size)

    def prefill_holding(self, submit: Submit, path: Path = ()) -> Holding:
        return Holding(self.whole_blocks(submit), 1, path, None, submit.resumed_tokens)

    def decode_holding(self, submit: Submit, path: Path = (), expected_left: int = NEVER) -> Holding:
        life = Life.of(submit, expected_left)
        longest = life if expected_left == NEVER else Life.of(submit)
        return Holding(longest.whole(self.capacity.block_size), submit.choices, path, life, submit.resumed_tokens)

    def check_invariants(self) -> None:
        assert self.free_seqs + sum(h.seqs for h in self.holdings.values()) == self.capacity.max_seqs
        assert self.free_seqs >= 0
        if self.room is None:
            assert self.kv_blocks_taken == sum(h.kv_blocks for h in self.holdings.values()) <= self.capacity.kv_blocks
        else:
            self.room.check_invariants()
            assert len(self.room) == len(self.holdings) and all(key in self.room for key in self.holdings)


class Pool:
    """The workers that serve one model; `admission` lets in only those between which KV can cross."""

    def __init__(self, model: str, weights: Weights | None = None) -> None:
        self.model = model
        self.weights = weights or Weights()
        self.locality = Locality()
        self.breakers = Breakers()
        self.prefill: dict[int, Worker] = {}
        self.decode: dict[int, Worker] = {}
        self.context_tokens = 0
        """The longest prompt + output every worker takes."""
        self.full: set[int] = set()
        """Prefill workers on which the next requests in turn had no room when last looked at; none has come free since."""
        self.kept_for: Request | None = None
        self.kept_since = 0.0
        self.kept_rate = 0.0
        """Cost per second at which tenants were served when it began."""
        self.rents: dict[tuple[str, int], tuple[float, float, float]] = {}
        """Attempts for which room had been kept: the cost of that, since when they have it, and what would run there else per
        second."""
        self.claims: dict[str, Request] = {}
        """Those that lost their prefill worker and keep their room in decode, by id."""
        self.refused: list[Request] = []
        """Those that the pop in hand has found without room."""
        self.no_room = self.cache_waits = 0
        """Turns that passed a request over: without room for it, or for a worker that has more of it cached."""

    def add(self, worker: Worker) -> None:
        self._side(worker)[worker.epoch] = worker
        self.locality.join(worker.epoch, worker.capacity.kv_blocks)
        self.full.clear()
        self._measure()

    def remove(self, worker: Worker) -> None:
        del self._side(worker)[worker.epoch]
        self.locality.leave(worker.epoch)
        self.breakers.leave(worker.epoch)
        self.full.discard(worker.epoch)
        self._measure()

    def blame(self, worker: Worker) -> None:
        """Something failed on it."""
        worker.trouble += 0.2 * (1.0 - worker.trouble)

    def forgive(self) -> None:
        """Something went well: old troubles count less, for whoever had them, or they would never be tried again."""
        for worker in (*self.prefill.values(), *self.decode.values()):
            worker.trouble = worker.trouble * 0.95 if worker.trouble > 0.01 else 0.0

    def may_pair(self, prefill: Worker, decode: Worker, now: float) -> bool:
        return not self.breakers.pairs or self.breakers.allows(
            (prefill.epoch, decode.epoch), now, lambda key: key in decode.holdings
        )

    def has_pair(self, prefill: Worker, now: float) -> bool:
        """Whether anything may be placed on it, as far as its pairs go."""
        return any(not decode.draining and self.may_pair(prefill, decode, now) for decode in self.decode.values())

    def hash_block_size(self) -> int:
        """Tokens that one hash of a prompt covers: the smallest block size, of which all others are multiples."""
        return min(worker.capacity.block_size for worker in (*self.prefill.values(), *self.decode.values()))

    def servable(self) -> bool:
        return bool(self.prefill) and bool(self.decode)

    def tokens_per_s(self) -> float:
        """Measured prefill rate of all workers together; 0 until something was measured."""
        return sum(worker.tokens_per_s for worker in self.prefill.values())

    def could_ever_fit(self, submit: Submit) -> bool:
        for side in (self.prefill, self.decode):
            for worker in side.values():
                if worker.could_ever_take(submit):
                    break
            else:
                return False
        return True

    def could_place(self, submit: Submit) -> bool:
        """Likewise, on workers that take work."""
        sides = (self.prefill, self.decode)
        return all(any(not w.draining and w.could_ever_take(submit) for w in side.values()) for side in sides)

    def takes_work(self) -> bool:
        return all(any(not w.draining for w in side.values()) for side in (self.prefill, self.decode))

    # --- waiting for room -----------------------------------------------------------------------------------------------

    def refusals_allowed(self, prefill: Worker) -> int:
        """How many requests without room its next pop may look at: none while nothing has changed, while room is kept, or where
        nothing is to be placed."""
        return 0 if prefill.draining or prefill.epoch in self.full or self.kept_for is not None else REFUSALS_MAX

    def found_full(self, prefill: Worker) -> None:
        """Nothing runs on it, and those `refused` had no room: on it alone, or on no decode worker, which is so for all. Where
        room is kept, nobody has looked whether others would have some."""
        if self.kept_for is not None:
            return
        if self.breakers.concern(prefill.epoch) or any(not prefill.fits(request.submit) for request in self.refused):
            self.full.add(prefill.epoch)
        elif self.refused:
            self.full.update(self.prefill)

    def refuse(self, request: Request, bypasses_max: int, served: Callable[[float], float], now: float) -> None:
        """It is its turn, and there is no room for it. Once it was bypassed so often, what comes free is kept for it.

        `served`: cost per second at which tenants are served."""
        self.refused.append(request)
        self.no_room += 1
        if request.course.bypassed >= bypasses_max and self.kept_for is None and self.could_place(request.submit):
            self.kept_for, self.kept_since, self.kept_rate = request, now, served(now)

    def stop_keeping(self, now: float) -> float:
        """Room is kept no longer; the cost of what might have been placed meanwhile."""
        self.kept_for = None
        return self.kept_rate * (now - self.kept_since)

    def rent(self, key: tuple[str, int], decode: Worker, now: float) -> None:
        """It has got the room that was kept for it. It pays when it lets go: a debt would not outlast its own chunks, which may
        be all that can run, so that the ring comes round to them at once."""
        share = decode.holdings[key].kv_blocks / sum(worker.capacity.kv_blocks for worker in self.decode.values())
        self.rents[key] = (self.stop_keeping(now), now, self.kept_rate * share)

    def rent_due(self, key: tuple[str, int], now: float) -> float:
        """It has let go of it."""
        kept, since, rate = self.rents.pop(key, (0.0, now, 0.0))
        return kept + rate * (now - since)

    def count_bypasses(self) -> None:
        """A request got room, and those `refused` in the same pop, which were before it, did not."""
        for request in self.refused:
            request.begin().bypassed += 1

    def waits_for_room(self) -> Request | None:
        """The request for which all room that comes free is kept."""
        if self.kept_for is not None and not self.could_place(self.kept_for.submit):
            self.kept_for = None  # a worker was lost, or drained, which is nobody's fault
        return self.kept_for

    def _measure(self) -> None:
        both = (*self.prefill.values(), *self.decode.values())
        self.context_tokens = min((worker.capacity.context_tokens for worker in both), default=0)

    def _side(self, worker: Worker) -> dict[int, Worker]:
        return self.prefill if worker.hello.role is Role.PREFILL else self.decode
