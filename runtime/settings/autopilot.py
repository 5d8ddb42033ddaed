"""Settings of the autopilot."""

from typing import ClassVar, Literal

from pydantic import Field

from runtime.settings.addresses import Addresses
from runtime.settings.common import CommonSettings
from runtime.settings.roles import CoordinatorSettings
from runtime.settings.types import SLO_TPOT_MS, SLO_TTFT_MS, Panels

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
        "What it does": "mode profile slo_ttft_ms slo_tpot_ms model_id",
        "Connection": "coordinator",
    }
    mode: Literal["advise", "on"] = Field(
        "advise", description="advise: only log and export what it would do. on: change workers' roles."
    )
    profile: str = Field(min_length=1, description=PROFILE_HELP)
    slo_ttft_ms: float = Field(SLO_TTFT_MS, gt=0.0, le=3.6e6, description=TTFT_HELP)
    slo_tpot_ms: float = Field(SLO_TPOT_MS, gt=0.0, le=3.6e6, description=TPOT_HELP)
    model_id: str = Field(
        "", max_length=512, description="Model whose workers it looks after; empty: the only one of the cluster."
    )
    coordinator: Addresses = Field(COORDINATOR, description="Address of the coordinator.")
