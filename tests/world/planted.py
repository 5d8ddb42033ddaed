"""Bugs of the kind that people write, each as a patch of production code. `test_planted` shows that the simulation finds them.

A patch takes pytest's `monkeypatch`. Each says in a word what would happen to a user. They are in `planted_service` (gateway
and coordinator) and `planted_workers` (both workers, transfers and the cache).
"""

from collections.abc import Callable

import pytest

Patch = Callable[[pytest.MonkeyPatch], None]


class Planted(dict[str, Patch]):
    def add(self, patch: Patch) -> Patch:
        """As a decorator."""
        self[patch.__name__] = patch
        return patch
