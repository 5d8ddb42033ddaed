"""Options of `crossdock simulate`."""

from pydantic import Field, field_validator

from runtime.settings.types import CommaList, JsonOption
from simulation.faults.plan import FAULTS

_KINDS = "; ".join(f"{name}: {what}" for name, what in FAULTS.items())


class SimulateSettings(JsonOption):
    """Run the cluster's own code in a simulation that injects faults, and check that nothing is lost.

    Each seed is a small cluster with a few requests, in virtual time: processes are killed, stopped and cut off, then all
    heals, and every token, block, quota and row is checked. No model is needed. Without --seed, many seeds run, and the first
    that fails is told; with it, that one runs again, event by event the same.

    Status 0: all held. 1: a promise was broken.
    """

    seed: int = Field(-1, ge=-1, le=1 << 62, description="Run this seed only and print what happened; -1: run many.")
    timeline: str = Field(
        "",
        max_length=64,
        description="With --seed: print what happened to this request, like r0; all: to every request.",
    )
    seeds: int = Field(1000, ge=1, le=1_000_000_000, description="Number of seeds to run.")
    first: int = Field(0, ge=0, le=1 << 62, description="The first of them.")
    faults: CommaList = Field(
        default_factory=lambda: list(FAULTS), description=f"Comma-separated kinds of faults, or none. {_KINDS}."
    )
    processes: int = Field(0, ge=0, le=1024, description="Processes that share the work; 0: one for each core.")

    @field_validator("faults")
    @classmethod
    def _known(cls, value: list[str]) -> list[str]:
        if value == ["none"]:
            return []
        unknown = [name for name in value if name not in FAULTS]
        if unknown:
            raise ValueError(
                f"names no kind of fault with {', '.join(unknown)}; there are {', '.join(FAULTS)} and none"
            )
        return value
