"""Many plays of traffic, each of which can run in a process of its own."""

import copyreg
from collections.abc import Callable, Iterable, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from lab.advise import Workers
from lab.play.options import RunOptions
from lab.play.outcome import PlayedOutcome
from lab.play.player import Player
from lab.play.request import Sent
from lab.profile import Profile


def _proxy(content: dict[str, Any]) -> MappingProxyType[str, Any]:
    return MappingProxyType(content)


copyreg.pickle(
    MappingProxyType, lambda proxy: (_proxy, (dict(proxy),))
)  # `Limits` has some; the class has no name to pickle


class Play(NamedTuple):
    profile: Profile
    workers: Workers
    sent: Sequence[Sent]
    options: RunOptions


def outcome_of(play: Play) -> PlayedOutcome:
    return Player(*play).run()


Each = Callable[[Callable[[Play], PlayedOutcome], Sequence[Play]], Iterable[PlayedOutcome]]
"""Runs plays as `map` does, perhaps on several cores."""
