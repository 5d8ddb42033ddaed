"""Random traces over the fair queue, with the service of each tenant written down, so that the bound can be checked."""

import random
from dataclasses import dataclass, field
from itertools import combinations

from coordinator.fairqueue import FairQueue, Terms
from coordinator.lanes import ANYWHERE, Entry

Path = tuple[str, ...]


@dataclass(eq=False)
class Job:
    cost: int
    chunks: int
    path: Path
    arrival: int


@dataclass
class Pair:
    """Two siblings over one interval in which both are backlogged and able to run."""

    low: float = 0.0
    high: float = 0.0
    now: float = 0.0

    def add(self, amount: float) -> None:
        self.now += amount
        self.low, self.high = min(self.low, self.now), max(self.high, self.now)


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
        # In one trace of two, some tenants can run on some of the workers only.
        mixed = self.seed % 2 == 1
        self.workers = {
            path: set(rnd.sample(self.places, rnd.randint(1, len(self.places))) if mixed else self.places)
            for path in users
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
            job = Job(cost, self.random.randint(1, 3), path, self.arrivals)
            self.entries[path].append(self.queue.push(job, path, self.random.random(), job.chunks))
            for node in (path[:1], path):
                self.largest[node] = max(self.largest[node], cost)

    def leave(self, path: Path, entry: Entry[Job]) -> None:
        self.queue.remove(entry)
        self.entries[path].remove(entry)
        self.watch(None)

    def correct(self, path: Path, error: float) -> None:
        """What was charged was wrong by `error`."""
        self.queue.adjust(path, error)
        for node in (path[:1], path):
            self.error[node] += abs(error)
        self.count(path, error)

    def runs(self, entry: Entry[Job], worker: int) -> bool:
        return entry.place == worker or (entry.place == ANYWHERE and worker in self.workers[entry.item.path])

    def able(self, worker: int | None) -> set[Path]:
        users = {
            p
            for p, entries in self.entries.items()
            if any(worker is None or self.runs(entry, worker) for entry in entries)
        }
        return users | {path[:1] for path in users}

    def watch(self, worker: int | None) -> None:
        """Intervals end where a tenant is idle or passed over, and begin where both of a pair are there."""
        able = self.able(worker)
        for pair in [pair for pair in self.pairs if not able.issuperset(pair)]:
            del self.pairs[pair]
        if worker is not None:
            for a, b in combinations(sorted(able), 2):
                if a[:-1] == b[:-1] and len(a) == len(b):
                    self.pairs.setdefault((a, b), Pair())

    def serve(self, worker: int) -> None:
        self.watch(worker)

        def offer(job: Job) -> Terms | None:
            return (float(job.cost), job.chunks == 1) if placed(job) or worker in self.workers[job.path] else None

        def placed(job: Job) -> bool:
            return any(entry.item is job and entry.place == worker for entry in self.entries[job.path])

        found = self.queue.pop(worker, offer, 10**9)
        if found is None:
            self.idle_with_work += bool(self.able(worker))
            return
        entry, cost = found
        job = entry.item
        job.chunks -= 1
        if job.chunks == 0:
            self.entries[job.path].remove(entry)
        if self.errors and self.random.random() < 0.5:
            self.owing.append((job.path, self.random.uniform(-cost, cost)))
        self.count(job.path, cost)
        self.watch(None)

    def count(self, path: Path, cost: float) -> None:
        for node in (path[:1], path):
            self.served[node] = self.served.get(node, 0.0) + cost
        for (a, b), pair in self.pairs.items():
            pair.add(cost / self.weight[a] * (path[: len(a)] == a) - cost / self.weight[b] * (path[: len(b)] == b))
            bound = self.quantum + sum((self.largest[node] + self.error[node]) / self.weight[node] for node in (a, b))
            self.violation = max(self.violation, (pair.high - pair.low - bound) / bound)
