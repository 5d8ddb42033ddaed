"""Chooses the revision of its model for each request. Pure.

Workers of one revision are a pool of their own with a queue of its own, so no pair crosses revisions. A request stays in its
pool through all attempts, so tokens of two revisions are never mixed.
"""

from collections.abc import Callable, Mapping

from coordinator.rollouts.plan import Rollouts
from proto.messages import Hello, Submit
from scheduler.workers.pool import Pool


class Revisions:
    """Pools by model and revision."""

    def __init__(self, pools: Mapping[str, Pool]) -> None:
        self._pools = pools  # by `Hello.model`
        self.of: dict[str, dict[str, str]] = {}  # keys of these pools by model id and revision, in the order they came
        self.rollouts: Rollouts = {}

    def joined(self, hello: Hello) -> None:
        self.of.setdefault(hello.model_id, {})[hello.revision] = hello.model

    def forget(self, pool: str) -> None:
        self.of = {
            model: left
            for model, known in self.of.items()
            if (left := {revision: key for revision, key in known.items() if key != pool})
        }

    def in_force(self, model: str) -> str:
        """The key of the pool that gets new requests for a model, apart from a trial. Until a rollout has named it, the first
        that can serve."""
        known, rollout = self.of.get(model, {}), self.rollouts.get(model)
        if rollout is not None:
            return _key(model, rollout.revision)
        keys = list(known.values()) or [model]
        return keys[0] if len(keys) == 1 else next((key for key in keys if self._pools[key].servable()), keys[0])

    def pools_in_force(self) -> dict[str, Pool]:
        """The pools that get new requests, by model id."""
        keys = {model: self.in_force(model) for model in self.of}
        return {model: self._pools[key] for model, key in keys.items() if key in self._pools}

    def pool_for(self, submit: Submit, blob: bytes, can_serve: Callable[[Pool], bool], now: float) -> str:
        """The pool for the first attempt at a request: that of its session while KV is kept for it, that of the trial if it is
        part of one, or else that in force."""
        model, rollout = submit.model, self.rollouts.get(submit.model)
        known = self.of.get(model, {})
        if len(known) > 1:
            for key in known.values():
                pool = self._pools[key]
                if pool.sessions.leases and pool.sessions.is_leased(submit, blob, now) and can_serve(pool):
                    return key
        if rollout is not None and rollout.tries(submit):
            key = _key(model, rollout.trial or "")
            if key in self._pools and can_serve(self._pools[key]):
                return key
        return self.in_force(model)

    def is_of(self, pool: str, model: str) -> bool:
        return pool in self.of.get(model, {}).values()


def _key(model: str, revision: str) -> str:
    return f"{model}@{revision}" if revision else model
