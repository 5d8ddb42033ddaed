"""Options of `crossdock calibrate`, `crossdock tune` and `crossdock tune check`."""

from typing import Annotated, ClassVar

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_settings import NoDecode

from lab.advise import Slo
from lab.commands.profiles.settings import known_card
from lab.goals import Goals
from launcher.load.settings import CV_HELP, LengthText
from runtime.settings.types import (
    SLO_TPOT_MS,
    SLO_TTFT_MS,
    CommaList,
    Device,
    EngineOptions,
    JsonOption,
    Panels,
    split_commas,
)


def _check_sizes(value: list[int]) -> list[int]:
    if any(not 1 <= size <= 65_536 for size in value):
        raise ValueError("each must be in 1 to 65536")
    return value


def parse_slos(texts: list[str], default: Slo) -> Goals:
    """Raises `ValueError`."""
    found: dict[str, Slo] = {}
    for text in texts:
        name, *limits = text.split(":")
        try:
            ttft_ms, tpot_ms = (float(limit) for limit in limits)
        except ValueError:
            ttft_ms = tpot_ms = 0.0
        if not name or not 0 < min(ttft_ms, tpot_ms) <= max(ttft_ms, tpot_ms) <= 1e9:
            raise ValueError(f"has {text!r}, which is not CLASS:TTFT_MS:TPOT_MS")
        found[name] = Slo(ttft_ms, tpot_ms, default.percentile)
    return Goals(default, found)


def _check_slos(value: list[str]) -> list[str]:
    parse_slos(value, Slo(1.0, 1.0))
    return value


Sizes = Annotated[list[int], NoDecode, BeforeValidator(split_commas), AfterValidator(_check_sizes)]
SloList = Annotated[CommaList, AfterValidator(_check_slos)]


class CalibrateSettings(JsonOption, EngineOptions):
    """Measure how long prefill, decode and KV transfer take on this installation.

    Starts a cluster of one prefill and one decode worker for a few minutes, and writes a profile for crossdock tune. Use the
    machine for nothing else meanwhile.
    """

    panels: ClassVar[Panels] = {"Installation": "model device", "Measurement": "rounds", "Output": "out as_json"}
    model: str = Field(
        "", description="Folder or ORG/NAME; empty: the embedded default.", json_schema_extra={"also_argument": "MODEL"}
    )
    device: Device = Field("auto", description="Where to compute.")
    rounds: int = Field(
        5,
        ge=1,
        le=100,
        description="How often to measure, each time with workers that are started anew: how much runs differ.",
    )
    out: str = Field("profile.json", min_length=1, description="File to write the profile to.")


class TrafficSettings(JsonOption):
    """The profile, and the traffic that is played."""

    panels: ClassVar[Panels] = {
        "Installation": "profile prefill_profile decode_profile force",
        "Traffic": "trace speed scale_tokens from_s duration_s rate cv prompt_tokens output_tokens hit_rate seed",
        "Sessions": "sessions_trace sessions",
        "What counts as good": "slo_ttft_ms slo_tpot_ms slo",
    }
    profile: str = Field(
        "profile.json", min_length=1, description="Profile of the installation, from crossdock calibrate."
    )
    prefill_profile: str = Field(
        "", description="With --decode-profile, in place of --profile: prefill workers are of this hardware ..."
    )
    decode_profile: str = Field("", description="... and decode workers of that. No worker is mixed then.")
    force: bool = Field(
        False, description="Use a profile of another model than that of an event log, or two profiles of two models."
    )
    trace: str = Field(
        "",
        description="File with traffic: CSV with arrival_s,prompt_tokens,output_tokens, an Azure LLM inference trace,"
        " JSON lines of Mooncake or AIPerf, or a coordinator's event log; or sessions of several turns, as for crossdock bench"
        " agents. Empty: a mix made of --rate and the lengths.",
    )
    sessions_trace: str = Field(
        "", description="A trace of sessions that go on beside the single requests of --trace, on the same workers."
    )
    sessions: int = Field(
        0, ge=0, le=100_000, description="Of a trace of sessions: how many go on at a time; 0: all of them."
    )
    speed: float = Field(1.0, gt=0.0, le=1e6, description="Speed at which the trace is played: 2 is twice the load.")
    scale_tokens: float = Field(1.0, gt=0.0, le=1e3, description="Factor on all lengths of the trace.")
    from_s: float = Field(
        0.0, ge=0.0, le=1e9, description="Where in the trace to begin, in its own seconds.",
        json_schema_extra={"option": "--from"},
    )  # fmt: skip
    duration_s: float = Field(
        3600.0, gt=0.0, le=86_400.0, description="Seconds of traffic.", json_schema_extra={"option": "--duration"}
    )
    rate: float = Field(1.0, gt=0.0, le=1e6, description="Requests per second of a mix.")
    cv: float = Field(1.0, ge=0.0, le=100.0, description=CV_HELP)
    prompt_tokens: LengthText = Field(
        "lognormal:512,0.8", description="Prompt lengths of a mix, like 128, uniform:64-512 or lognormal:MEDIAN,SIGMA."
    )
    output_tokens: LengthText = Field("lognormal:128,0.6", description="Answer lengths of a mix, likewise.")
    hit_rate: float = Field(
        0.0, ge=0.0, lt=1.0, description="Share of each prompt that is cached, where the trace has no block ids."
    )
    seed: int = Field(0, ge=0, le=1 << 31, description="Seed of the mix and of all draws.")
    slo_ttft_ms: float = Field(SLO_TTFT_MS, gt=0.0, le=1e9, description="Limit of the time to first token.")
    slo_tpot_ms: float = Field(SLO_TPOT_MS, gt=0.0, le=1e9, description="Limit of the mean time per later token.")
    slo: SloList = Field(
        default_factory=list, description="CLASS:TTFT_MS:TPOT_MS, repeated: other limits for a priority class."
    )


class TuneSettings(TrafficSettings):
    """Which ratio of prefill to decode workers serves this traffic best, or should they be mixed?

    Plays the traffic against ratios of up to --workers workers, in simulation, with the coordinator's own rules and the
    times of --profile. Says what is best, or with fewer workers as good, how sure that is, and what limits each ratio. To
    compare it with real runs: crossdock tune check.
    """

    panels: ClassVar[Panels] = {
        "Candidates": "workers mixed own_hardware step_tokens seqs_max quick",
        "Candidates of GPUs, without a profile": "cards gpu model layouts cost_per_hour",
        "Output": "out html as_json",
    }
    workers: int = Field(4, ge=1, le=64, description="Workers to share out: GPUs, or parts of a CPU.")
    cards: int = Field(
        0,
        ge=0,
        le=256,
        description="In place of --profile and --workers: GPUs to share out among workers of 1, 2, 4 or 8 GPUs, in each phase"
        " as many as are best. Needs --gpu and --model.",
    )
    gpu: Annotated[str, AfterValidator(known_card)] = Field(
        "", description="Their kind, as in crossdock profile estimate."
    )
    model: str = Field("", description="The model, as in crossdock profile estimate.")
    layouts: CommaList = Field(
        default_factory=list,
        description="Only these layouts, separated by commas, like 2P@TP2+1D@TP4,4M@TP2: two prefill workers of two GPUs with a"
        " decode worker of four, or four mixed ones of two.",
    )
    cost_per_hour: float = Field(
        0.0, ge=0.0, le=1e6, description="The cost of one of the GPUs in an hour, in any currency; 0: not known."
    )
    mixed: bool = Field(True, description="Look at workers that do both phases, too.")
    own_hardware: bool = Field(
        False,
        description="Take each worker to have hardware of its own, where the profile is of a host whose workers share cores.",
    )
    step_tokens: Sizes = Field(
        default_factory=list,
        description="Token budgets of a prefill step to compare, separated by commas; empty: the profile's.",
    )
    seqs_max: Sizes = Field(
        default_factory=list, description="Most sequences of a decode batch to compare; empty: the profile's."
    )
    quick: bool = Field(
        False,
        description="Answer within half a minute, from excerpts: with a wider error, and the limit of the recommendation only.",
    )
    out: str = Field("", description="File for the recommendation, for crossdock tune check.")
    html: str = Field("", description="File for the report as one HTML page.")


class TuneCheckSettings(JsonOption, EngineOptions):
    """Run the recommended ratio and the next best ones live, and print what was predicted beside what is measured.

    Starts each ratio in turn on this machine and sends it the traffic of the recommendation, for --duration seconds, so slow
    that this machine can carry it (--speed) if need be.
    """

    panels: ClassVar[Panels] = {
        "What is run": "recommendation ratios duration_s speed scale_tokens model device",
        "Output": "as_json",
    }
    recommendation: str = Field(
        min_length=1, description="File from crossdock tune --out.", json_schema_extra={"argument": "FILE"}
    )
    ratios: CommaList = Field(
        default_factory=list, description="Ratios to run, like 1P1D; empty: the recommended one and two others."
    )
    duration_s: float = Field(
        60.0,
        gt=0.0,
        le=86_400.0,
        description="Seconds of traffic for each.",
        json_schema_extra={"option": "--duration"},
    )
    speed: float = Field(1.0, gt=0.0, le=1e6, description="Factor on the recommendation's own speed.")
    scale_tokens: float = Field(1.0, gt=0.0, le=1e3, description="Factor on its lengths.")
    model: str = Field("", description="Folder or ORG/NAME; empty: the embedded default.")
    device: Device = Field("auto", description="Where to compute.")
