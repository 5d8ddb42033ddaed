"""Random traces over the fair queue, with the service of each tenant written down, so that the bound can be checked."""

import random
from dataclasses import dataclass, field
from itertools import combinations

from scheduler.fairness.fair_queue import FairQueue, Terms
from scheduler.fairness.tenant_queue import Entry
from tests.coordinator.turns import Answer, MoveTo, pop

Path = tuple[str, ...]


@dataclass(eq=False)
class Job:
    cost: int
    chunks: int
    path: Path
    arrival: int
    key: int
    """Under which it waits at first."""
    only_on: int = 0
    """If it is to run on one worker, which it is told when it is offered on another one."""


@dataclass
class Pair:
    """Two siblings over one interval in which both are backlogged and able to run."""

    low: float = 0.0
    high: float = 0.0
    now: float = 0.0

    def add(self, amount: float) -> None:
        self.now += amount
        self.low, self.high = min(self.low, self.now), max(self.high, self.now)


CLASSES = 3


def bound(worker: int) -> int:
    """The key of requests that are to run on this worker."""
    return 100 + worker


@dataclass
class Trace:
    """Organisations of users on several workers. `violation` is the greatest excess over the bound, in cost per weight."""

    seed: int
    queue_class: type[FairQueue[Job]] = FairQueue
    events: int = 150
    errors: bool = False
    """Whether estimates are wrong, and trued up later."""
    violation: float = 0.0
    served: dict[Path, float] = field(default_factory=dict)
    idle_with_work: int = 0

    def __post_init__(self) -> None:
        self.random = rnd = random.Random(self.seed)
        self.quantum = rnd.choice([0.0, 256.0, 4096.0, 131072.0])
        users = [(f"o{o}", f"u{u}") for o in range(rnd.randint(1, 4)) for u in range(rnd.randint(1, 3))]
        self.nodes: list[Path] = sorted({path[:1] for path in users} | set(users))
        self.weight = {path: rnd.choice([0.1, 1.0, 10.0, rnd.uniform(0.1, 10)]) for path in self.nodes}
        self.queue = self.queue_class(self.quantum, {"/".join(p): w for p, w in self.weight.items()}, 10**9)
        self.entries: dict[Path, list[Entry[Job]]] = {path: [] for path in users}
        self.places = list(range(1, rnd.randint(1, 4) + 1))
        # In one trace of two, some tenants can run on some of the workers only, keys close, and requests move to other keys.
        self.mixed = mixed = self.seed % 2 == 1
        self.workers = {
            path: set(rnd.sample(self.places, rnd.randint(1, len(self.places))) if mixed else self.places)
            for path in users
        }
        self.keys = {path: -1 - CLASSES * n for n, path in enumerate(users)} if mixed else dict.fromkeys(users, -1)
        self.worker_keys = {
            w: [
                w,
                bound(w),
                *{self.keys[path] - n for path in users if w in self.workers[path] for n in range(CLASSES)},
            ]
            for w in self.places
        }
        self.arrivals = 0
        self.largest = dict.fromkeys(self.nodes, 0.0)
        self.error = dict.fromkeys(self.nodes, 0.0)
        self.owing: list[tuple[Path, float]] = []
        self.pairs: dict[tuple[Path, Path], Pair] = {}

    def run(self) -> "Trace":
        for path in self.entries:
            if self.random.random() < 0.8:
                self.arrive(path)
        for _ in range(self.events):
            dice = self.random.random()
            path = self.random.choice(list(self.entries))
            if dice < 0.25:
                self.arrive(path)
            elif dice < 0.3 and self.entries[path]:
                self.leave(path, self.random.choice(self.entries[path]))
            elif dice < 0.4 and self.owing:
                self.correct(*self.owing.pop(self.random.randrange(len(self.owing))))
            else:
                self.serve(self.random.choice(self.places))
        return self

    def arrive(self, path: Path) -> None:
        for _ in range(self.random.choice([1, 1, 8])):
            self.arrivals += 1
            cost = int(self.random.choice([1, 131072, 2 ** self.random.uniform(0, 17)]))
            key = self.keys[path] - self.random.randrange(CLASSES)  # type: ignore[index]
            job = Job(cost, self.random.randint(1, 3), path, self.arrivals, key)
            if self.mixed and self.random.random() < 0.2:
                job.only_on = self.random.choice(sorted(self.workers[path]))  # type: ignore[index]
            self.entries[path].append(self.queue.push(job, path, key, self.random.random(), job.chunks))
            for node in (path[:1], path):
                self.largest[node] = max(self.largest[node], cost)

    def leave(self, path: Path, entry: Entry[Job]) -> None:
        self.queue.remove(entry)
        self.entries[path].remove(entry)
        self.watch(None, [])

    def correct(self, path: Path, error: float) -> None:
        """What was charged was wrong by `error`."""
        self.queue.adjust(path, error)
        for node in (path[:1], path):
            self.error[node] += abs(error)
        self.count(path, error)

    def runs(self, entry: Entry[Job], worker: int, keys: list[int]) -> bool:
        return entry.key in keys and not self.moves(entry.item, worker)

    def moves(self, job: Job, worker: int) -> bool:
        return job.key < 0 and job.only_on not in (0, worker)

    def able(self, worker: int | None, keys: list[int]) -> set[Path]:
        users = {
            p
            for p, entries in self.entries.items()
            if any(worker is None or self.runs(entry, worker, keys) for entry in entries)
        }
        return users | {path[:1] for path in users}

    def watch(self, worker: int | None, keys: list[int]) -> None:
        """Intervals end where a tenant is idle or passed over, and begin where both of a pair are there."""
        able = self.able(worker, keys)
        for pair in [pair for pair in self.pairs if not able.issuperset(pair)]:
            del self.pairs[pair]
        if worker is not None:
            for a, b in combinations(sorted(able), 2):
                if a[:-1] == b[:-1] and len(a) == len(b):
                    self.pairs.setdefault((a, b), Pair())

    def serve(self, worker: int) -> None:
        named, closing = self.worker_keys[worker], set[int]()
        if self.mixed:
            named = [key for key in named if self.random.random() < 0.9]
            closing = {key for key in named if self.random.random() < 0.1}
        keys = [key for key in named if key not in closing]
        self.watch(worker, keys)
        expected = self.first_by_brute_force(worker, keys) if self.queue_class is FairQueue else None
        offered = 0

        def offer(job: Job) -> Answer:
            nonlocal offered
            offered += 1
            if job.key in closing:
                return None
            if self.moves(job, worker):
                job.key = bound(job.only_on)
                return MoveTo(job.key)
            job.key = worker
            return Terms(float(job.cost), job.chunks == 1, worker)

        found = pop(self.queue, named, offer)
        if found.entry is None:
            self.idle_with_work += bool(self.able(worker, keys))
            return
        entry, cost = found.entry, found.cost
        assert expected is None or found.entry is expected
        job = entry.item
        job.chunks -= 1
        if job.chunks == 0:
            self.entries[job.path].remove(entry)
        if self.errors and self.random.random() < 0.5:
            self.owing.append((job.path, self.random.uniform(-cost, cost)))
        self.count(job.path, cost)
        self.watch(None, [])

    def first_by_brute_force(self, worker: int, keys: list[int]) -> Entry[Job] | None:
        """Whose turn it is, by comparing all that can run."""
        able = [entry for entries in self.entries.values() for entry in entries if self.runs(entry, worker, keys)]

        def order(entry: Entry[Job]) -> list[tuple[float, ...]]:
            node, orders = entry.leaf, [entry.queue.order(entry)]
            while node.parent is not None:
                orders.append((node.round, node.position))  # type: ignore[arg-type]
                node = node.parent
            return orders[::-1]  # type: ignore[return-value]

        return min(able, key=order, default=None)

    def count(self, path: Path, cost: float) -> None:
        for node in (path[:1], path):
            self.served[node] = self.served.get(node, 0.0) + cost
        for (a, b), pair in self.pairs.items():
            pair.add(cost / self.weight[a] * (path[: len(a)] == a) - cost / self.weight[b] * (path[: len(b)] == b))
            bound = self.quantum + sum((self.largest[node] + self.error[node]) / self.weight[node] for node in (a, b))
            self.violation = max(self.violation, (pair.high - pair.low - bound) / bound)
