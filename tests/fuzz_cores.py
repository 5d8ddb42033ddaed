"""Random messages that are right on the wire, to pure cores in random states. Everything comes from a seed.

`RUNS` has a function for each core: `run(seed, events)` returns the fault that it met, or None. What a core gets from peers is
anything that the codec lets through; what it gets from its own driver is what that driver says.

    python -m tests.fuzz_cores CORE FIRST_SEED MINUTES_OF_CPU
"""

import sys
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from tests.fuzz_coordinator import CoordinatorWorld
from tests.fuzz_keeper import KeeperWorld
from tests.fuzz_transfers import TransferWorld
from tests.fuzz_workers import DecodeWorld, PrefillWorld

FRAMES_SHOWN = 5


@dataclass
class Fault:
    """An exception that a core raised."""

    core: str
    seed: int
    error: str
    where: list[str]
    events: list[str]
    """The last ones, the one that it raised at last."""


class World(Protocol):
    trail: deque[Any]
    """The last events."""

    def step(self) -> None:
        """One random event."""
        ...

    def end(self) -> None:
        """Everybody leaves; then nothing is held."""
        ...


Run = Callable[[int, int], Fault | None]


def run_in(name: str, make: Callable[[int], World], seed: int, events: int) -> Fault | None:
    world = make(seed)
    try:
        for _ in range(events):
            world.step()
        world.end()
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)[-FRAMES_SHOWN:]
        where = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]
        return Fault(
            name, seed, f"{type(error).__name__}: {error}"[:300], where, [str(one)[:400] for one in world.trail]
        )
    return None


WORLDS: dict[str, Callable[[int], World]] = {
    "coordinator": CoordinatorWorld,
    "keeper": KeeperWorld,
    "prefill": PrefillWorld,
    "decode": DecodeWorld,
    "transfers": TransferWorld,
}
RUNS: dict[str, Run] = {name: partial(run_in, name, make) for name, make in WORLDS.items()}


def main(core: str, first_seed: int, minutes: float, events: int = 300) -> int:
    """Seeds from `first_seed` on for so long; prints each kind of fault once."""
    until, seed, kinds = time.process_time() + 60 * minutes, first_seed, dict[tuple[str, ...], int]()
    while time.process_time() < until:
        fault = RUNS[core](seed, events)
        if fault is not None:
            kind = (fault.error.split(":")[0], fault.where[-1])
            kinds[kind] = kinds.get(kind, 0) + 1
            if kinds[kind] == 1:
                print(fault.core, fault.seed, fault.error, *fault.where, *fault.events, sep="\n    ", flush=True)  # noqa: T201
        seed += 1
    print(core, "seeds", first_seed, "to", seed - 1, "faults", kinds)  # noqa: T201
    return 1 if kinds else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
