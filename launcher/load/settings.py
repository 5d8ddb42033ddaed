"""Options of the load generator: `crossdock bench serve` and `bench compare`."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from launcher.load.lengths import Lengths
from launcher.load.tenants import Ratio
from runtime.settings.types import SLO_TPOT_MS, SLO_TTFT_MS, CommaList, Device, EngineOptions, JsonOption, Panels


def _check_lengths(value: str) -> str:
    if value:
        Lengths.parse(value)
    return value


def _check_ratios(value: list[str]) -> list[str]:
    for text in value:
        Ratio.parse(text)
    if len(set(value)) != len(value):
        raise ValueError("names a ratio twice")
    return value


LengthText = Annotated[str, AfterValidator(_check_lengths)]
RatioList = Annotated[CommaList, AfterValidator(_check_ratios)]
CV_HELP = "Coefficient of variation of the gaps between arrivals: 0 all the same, 1 Poisson, more (gamma) in bursts."
_LENGTHS_HELP = "like 128, uniform:64-512 or lognormal:MEDIAN,SIGMA"


START_HELP = "Start a cluster of so many prefill and decode workers, or mixed ones (M), for the run: 1P1D, 2M, 2P1D+1M."


class TargetSettings(JsonOption, EngineOptions):
    """The options of every load generator: to whom it sends, as whom, and the limits of a good answer."""

    tenant: CommaList = Field(
        default_factory=list,
        description="NAME:KEY:SHARE[:WEIGHT[:PRIORITY]], repeated: who sends, with which key ($NAME is read from the"
        " environment; a cluster started here makes its own keys: leave it empty), how much of the load, with which weight.",
    )
    slo_ttft_ms: float = Field(SLO_TTFT_MS, gt=0.0, le=1e9, description="Limit for goodput: time to first token.")
    slo_tpot_ms: float = Field(SLO_TPOT_MS, gt=0.0, le=1e9, description="Limit for goodput: mean time per later token.")
    slo_itl_ms: float = Field(
        0.0, ge=0.0, le=1e9, description="Limit for goodput: 99 of 100 gaps; 0: no limit on gaps."
    )
    model: str = Field(
        "",
        description="Model to ask for; empty: the first that the server names. For a cluster started here: folder or ORG/NAME;"
        " empty: the embedded default.",
    )
    device: Device = Field("auto", description="Where a cluster started here computes.")
    seed: int = Field(0, ge=0, le=1 << 31, description="Seed of times, lengths, words, tenants and cancellations.")


class LoadSettings(TargetSettings):
    """The requests that are sent, and the limits of a good answer."""

    panels: ClassVar[Panels] = {
        "Server": "url start api_key model device",
        "Arrivals": "rate cv duration_s warmup_s seed",
        "Trace": "trace speed scale_tokens from_s",
        "Requests": "prompt_tokens output_tokens prefix_share prefix_tokens",
        "Tenants": "tenant abuser",
        "What counts as good": "slo_ttft_ms slo_tpot_ms slo_itl_ms",
        "Output": "as_json plot",
        "Expert options": "endpoint ignore_eos cancel_share tokenizer",
    }
    endpoint: Literal["completions", "chat"] = Field("completions", description="The API to use.")
    ignore_eos: bool = Field(True, description="Ask for answers of exactly the planned length, where the server can.")
    rate: float = Field(1.0, gt=0.0, le=1e6, description="Requests per second, on average. A trace has its own times.")
    cv: float = Field(1.0, ge=0.0, le=100.0, description=CV_HELP)
    trace: str = Field(
        "",
        description="File with arrivals and lengths: CSV with arrival_s,prompt_tokens,output_tokens, an Azure LLM inference"
        " trace, or Mooncake's JSON lines (times of equal stamp are spread to the next one). Takes the place of --rate and the"
        " lengths.",
    )
    speed: float = Field(
        1.0, gt=0.0, le=1e6, description="Speed at which the trace is played: 0.1 is ten times slower."
    )
    scale_tokens: float = Field(1.0, gt=0.0, le=1e3, description="Factor on all lengths of the trace.")
    from_s: float = Field(
        0.0, ge=0.0, le=1e9, description="Where in the trace to begin, in its own seconds.",
        json_schema_extra={"option": "--from"},
    )  # fmt: skip
    duration_s: float = Field(
        60.0, gt=0.0, le=86_400.0, description="Seconds in which requests arrive, warm-up included.",
        json_schema_extra={"option": "--duration"},
    )  # fmt: skip
    warmup_s: float = Field(
        5.0, ge=0.0, le=3600.0, description="Requests that arrive in these first seconds are not counted."
    )
    prompt_tokens: LengthText = Field("lognormal:128,0.6", description=f"Prompt lengths, {_LENGTHS_HELP}.")
    output_tokens: LengthText = Field("lognormal:48,0.6", description=f"Answer lengths, {_LENGTHS_HELP}.")
    prefix_share: float = Field(0.0, ge=0.0, le=1.0, description="Share of requests that begin with a common prefix.")
    prefix_tokens: int = Field(
        64, ge=1, le=1_000_000, description="Length of each; prompts are at least one token longer."
    )
    abuser: str = Field(
        "",
        description="NAME:KEY:FACTOR of one tenant more, that sends FACTOR times the whole load on top of it, at random times.",
    )
    cancel_share: float = Field(
        0.0, ge=0.0, le=1.0, description="Share of requests whose client leaves: half of them after a random number of tokens,"
        " half at a random time.",
    )  # fmt: skip
    tokenizer: str = Field(
        "", description="tokenizer.json or its folder, for servers that take only text: prompts of a known length."
    )
    plot: str = Field("", description="File for a picture (.svg, .png or .pdf); needs matplotlib.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.warmup_s >= self.duration_s:
            raise ValueError(f"--warmup-s: {self.warmup_s:g} leaves nothing of --duration {self.duration_s:g}")
        return self


class ServerSettings(TargetSettings):
    """A server that is up, or one that is started for the run."""

    url: str = Field("", description="Server, like http://127.0.0.1:8000; empty: the cluster running on this machine.")
    start: RatioList = Field(default_factory=list, description=START_HELP)
    api_key: str = Field("", description="Key, where no tenants are given and the server wants one.")

    @model_validator(mode="after")
    def _check_target(self) -> Self:
        if self.url and self.start:
            raise ValueError("--start: starts a cluster, and --url names another server; give one of them")
        return self


class ServeBenchSettings(LoadSettings, ServerSettings):
    """Send a server a realistic load, and say how well it was served.

    Open loop: requests leave at their times, whatever the server does. Works with any server that speaks the OpenAI API;
    without --url it is the cluster that runs on this machine, and --start brings one up for the run. With several ratios, like
    --start 1P1D,2P1D,2M, each is started in turn and gets the same requests at the same times, and goodput is compared.
    """


class CompareSettings(JsonOption):
    """Two runs side by side: what differs in their settings, what in their figures, and what of that is only noise."""

    first: str = Field(
        min_length=1, description="File from bench serve --json.", json_schema_extra={"argument": "A.json"}
    )
    second: str = Field(min_length=1, description="File of the other run.", json_schema_extra={"argument": "B.json"})
    plot: str = Field("", description="File for a picture of both (.svg, .png or .pdf); needs matplotlib.")
