"""Work that grows with the cluster or the queue, spread over events. Pure.

A job is an iterator that does a little with each step. Each event does at most `STEPS_PER_EVENT` of them, and its owner asks to
be called again at once while there are more. A job of few steps is done within the event that began it.
"""

from collections.abc import Hashable, Iterator

STEPS_PER_EVENT = 128


class Spread:
    def __init__(self) -> None:
        self.jobs: dict[Hashable, Iterator[None]] = {}  # oldest first

    def begin(self, key: Hashable, job: Iterator[None]) -> None:
        """Begin a job in place of an earlier one with this key."""
        self.jobs.pop(key, None)
        self.jobs[key] = job

    def go_on(self) -> None:
        steps = STEPS_PER_EVENT
        while self.jobs and steps:
            key, job = next(iter(self.jobs.items()))
            for _ in job:
                steps -= 1
                if not steps:
                    return
            del self.jobs[key]
