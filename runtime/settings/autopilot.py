"""Settings of the autopilot."""

from typing import ClassVar, Literal

from pydantic import Field

from runtime.settings.addresses import Address
from runtime.settings.common import CommonSettings
from runtime.settings.roles import CoordinatorSettings
from runtime.settings.types import SLO_PERCENTILE, SLO_TPOT_MS, SLO_TTFT_MS, Panels

COORDINATOR: str = CoordinatorSettings.model_fields["bind"].default
PROFILE_HELP = "Profile of this installation, as crossdock calibrate writes it."
TTFT_HELP = "Milliseconds in which a request should have its first token."
TPOT_HELP = "Milliseconds that a later token should take, on average over an answer."


class AutopilotSettings(CommonSettings):
    """Watch the traffic of a cluster, and say which ratio of prefill and decode workers serves it best. With --mode on, change
    workers' roles to get there, up to an eighth of them at a time.

    It is a process of its own, beside a coordinator, and may end at any time: the cluster then keeps its ratio. crossdock serve
    --autopilot starts one.
    """

    section = "autopilot"
    panels: ClassVar[Panels] = {
        "What it does": "mode profile slo_ttft_ms slo_tpot_ms slo_percentile model_id",
        "When it changes a role": "every_s gain_min confirmations dwell_s calm_s drain_timeout_s",
        "Connection": "coordinator",
    }
    mode: Literal["advise", "on"] = Field(
        "advise", description="advise: only log and export what it would do. on: change workers' roles."
    )
    profile: str = Field(min_length=1, description=PROFILE_HELP)
    slo_ttft_ms: float = Field(SLO_TTFT_MS, gt=0.0, le=3.6e6, description=TTFT_HELP)
    slo_tpot_ms: float = Field(SLO_TPOT_MS, gt=0.0, le=3.6e6, description=TPOT_HELP)
    slo_percentile: float = Field(
        SLO_PERCENTILE, gt=0.0, lt=1.0, description="Share of requests that should keep both."
    )
    model_id: str = Field(
        "", max_length=512, description="Model whose workers it looks after; empty: the only one of the cluster."
    )
    every_s: float = Field(2.0, ge=0.1, le=3_600.0, description="Seconds between two looks.")
    gain_min: float = Field(
        0.05, ge=0.0, le=100.0, description="Least relative gain of goodput for which a role is changed."
    )
    confirmations: int = Field(2, ge=1, le=1_000, description="Looks in a row that must agree.")
    dwell_s: float = Field(
        60.0, ge=0.0, le=86_400.0, description="Seconds after a change in which none goes in the other direction."
    )
    calm_s: float = Field(30.0, ge=0.0, le=86_400.0, description="Seconds without a change after a worker was lost.")
    drain_timeout_s: float = Field(
        2.0,
        ge=0.0,
        le=86_400.0,
        description="Seconds that streams have to end on a decode worker that changes its role, before they move.",
    )
    coordinator: Address = Field(COORDINATOR, description="Address of the coordinator.")
