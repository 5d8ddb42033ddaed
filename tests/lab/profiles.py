"""Profiles for tests: round numbers, no machine."""

from coordinator.events import Limits
from lab.play.options import RunOptions
from lab.profile import Curve, DecodeCost, HostCost, PrefillCost, Profile, ProfileCapacity, TransferCost
from runtime.tenancy.priority_classes import PriorityClass

GPU = Profile(
    PrefillCost(Curve((1.0, 256.0, 1024.0), (6.0, 20.0, 75.0))),
    DecodeCost(Curve((1.0, 32.0, 128.0), (12.0, 16.0, 30.0)), 2e-5),
    ProfileCapacity(8192),
    ProfileCapacity(8192, 16, 256),
    TransferCost(1.0, 5e6, 160e3),
    HostCost(8.0),
)
"""About what a 7B model takes on one large GPU."""

PATIENT = RunOptions(limits=Limits(priority_classes={"standard": PriorityClass()}))
"""A class without targets: none is refused because it is expected to be late."""


def scaled(profile: Profile, prefill: float, decode: float) -> Profile:
    """The same machine with steps that take so many times as long."""
    return profile.replaced(prefill=profile.prefill.scaled(prefill), decode=profile.decode.scaled(decode))
