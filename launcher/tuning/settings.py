"""Options of `crossdock calibrate`, `crossdock tune` and `crossdock tune check`."""

from typing import ClassVar

from pydantic import Field

from runtime.settings.types import Device, JsonOption, Panels


class CalibrateSettings(JsonOption):
    """Measure how long prefill, decode and KV transfer take on this installation.

    Starts a cluster of one prefill and one decode worker for a few minutes, and writes a profile for crossdock tune. Use the
    machine for nothing else meanwhile.
    """

    panels: ClassVar[Panels] = {
        "Installation": "model device ready_timeout_s",
        "Measurement": "rounds sequences_max context_tokens_max seed",
        "Output": "out as_json",
    }
    model: str = Field(
        "",
        description="Folder or ORG/NAME; empty: the embedded default.",
        json_schema_extra={"also_argument": "MODEL"},
    )
    device: Device = Field("auto", description="Where to compute.")
    rounds: int = Field(3, ge=1, le=100, description="How often everything is measured.")
    sequences_max: int = Field(16, ge=1, le=1024, description="Most streams at once that decode is measured with.")
    context_tokens_max: int = Field(
        1024, ge=64, le=1 << 20, description="Longest prompt that is measured; cut to half of the model's context."
    )
    seed: int = Field(0, ge=0, le=1 << 31, description="Seed of the prompts.")
    ready_timeout_s: float = Field(
        180.0, gt=0.0, le=86_400.0, description="Seconds that the cluster may take to be ready."
    )
    out: str = Field("profile.json", min_length=1, description="File to write the profile to.")
