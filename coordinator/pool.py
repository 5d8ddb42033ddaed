"""Workers, and what is reserved on them. A pool is the workers of one model."""

from dataclasses import dataclass, field

from coordinator.request import Request, kv_blocks_needed
from proto.messages import Capacity, Chunk, Hello, Role, Submit

WORKERS = (Role.PREFILL, Role.DECODE)


@dataclass(frozen=True)
class Holding:
    """What one attempt has reserved on one worker, until that worker itself says that it has let go."""

    kv_blocks: int
    seqs: int


@dataclass(eq=False)
class Worker:
    epoch: int
    hello: Hello
    capacity: Capacity
    free_blocks: int
    free_seqs: int
    holdings: dict[tuple[str, int], Holding] = field(default_factory=dict)
    placed: dict[str, Request] = field(default_factory=dict)
    """Prefill only: prompts with tokens not yet dispatched, oldest first."""
    steps: dict[int, tuple[Chunk, ...]] = field(default_factory=dict)
    """Steps in flight, by id."""
    next_step_id: int = 0
    tokens_forwarded: int = 0
    tokens_per_s: float = 0.0
    """Measured prefill rate, smoothed."""

    @staticmethod
    def from_hello(hello: Hello) -> "Worker":
        assert hello.capacity is not None
        return Worker(hello.epoch, hello, hello.capacity, hello.capacity.kv_blocks, hello.capacity.max_seqs)

    def fits(self, holding: Holding) -> bool:
        return holding.kv_blocks <= self.free_blocks and holding.seqs <= self.free_seqs

    def could_ever_fit(self, holding: Holding) -> bool:
        return holding.kv_blocks <= self.capacity.kv_blocks and holding.seqs <= self.capacity.max_seqs

    def hold(self, key: tuple[str, int], holding: Holding) -> None:
        assert key not in self.holdings and self.fits(holding)
        self.holdings[key] = holding
        self.free_blocks -= holding.kv_blocks
        self.free_seqs -= holding.seqs

    def let_go(self, key: tuple[str, int]) -> bool:
        """Count a holding as free again; False if there is none, as when a message is repeated."""
        holding = self.holdings.pop(key, None)
        if holding is None:
            return False
        self.free_blocks += holding.kv_blocks
        self.free_seqs += holding.seqs
        return True

    def undispatched_tokens(self) -> int:
        return sum(r.submit.prompt_tokens - r.dispatched_tokens for r in self.placed.values())

    def prefill_holding(self, submit: Submit) -> Holding:
        return Holding(-(-submit.prompt_tokens // self.capacity.block_size), 1)

    def decode_holding(self, submit: Submit) -> Holding:
        return Holding(kv_blocks_needed(submit, self.capacity.block_size), submit.choices)

    def check_invariants(self) -> None:
        assert self.free_blocks + sum(h.kv_blocks for h in self.holdings.values()) == self.capacity.kv_blocks
        assert self.free_seqs + sum(h.seqs for h in self.holdings.values()) == self.capacity.max_seqs
        assert min(self.free_blocks, self.free_seqs) >= 0


class Pool:
    """The workers that serve one model; all of one fingerprint, so that any pair can hand over KV."""

    def __init__(self, model: str, fingerprint: str) -> None:
        self.model = model
        self.fingerprint = fingerprint
        self.prefill: dict[int, Worker] = {}
        self.decode: dict[int, Worker] = {}

    def add(self, worker: Worker) -> None:
        self._side(worker)[worker.epoch] = worker

    def remove(self, worker: Worker) -> None:
        del self._side(worker)[worker.epoch]

    def servable(self) -> bool:
        return bool(self.prefill) and bool(self.decode)

    def context_tokens(self) -> int:
        """The longest prompt + output every worker takes."""
        return min(w.capacity.context_tokens for w in (*self.prefill.values(), *self.decode.values()))

    def could_ever_fit(self, submit: Submit) -> bool:
        return any(w.could_ever_fit(w.prefill_holding(submit)) for w in self.prefill.values()) and any(
            w.could_ever_fit(w.decode_holding(submit)) for w in self.decode.values()
        )

    def choose_pair(self, submit: Submit, backlog_tokens_max: int) -> tuple[Worker, Worker] | None:
        """The prefill worker with the least to do that has room now, and the decode worker with the most room.

        A prefill worker with `backlog_tokens_max` tokens not yet dispatched takes no more: what waits there could no longer
        be reordered.
        """
        decode = [w for w in self.decode.values() if w.fits(w.decode_holding(submit))]
        prefill = [
            (w.undispatched_tokens() + sum(c.length for chunks in w.steps.values() for c in chunks), w.epoch, w)
            for w in self.prefill.values()
            if w.fits(w.prefill_holding(submit))
        ]
        free = [entry for entry in prefill if entry[2].undispatched_tokens() < backlog_tokens_max]
        if not decode or not free:
            return None
        return min(free)[2], max(decode, key=lambda w: (w.free_seqs, w.free_blocks, w.epoch))

    def _side(self, worker: Worker) -> dict[int, Worker]:
        return self.prefill if worker.hello.role is Role.PREFILL else self.decode
