"""Settings of `crossdock serve`, and those of its processes that it takes, too."""

from typing import Any, ClassVar, Final, Literal, Self

from pydantic import Field, create_model, model_validator

from runtime.settings.addresses import MetricsAddress
from runtime.settings.autopilot import PROFILE_HELP, TPOT_HELP, TTFT_HELP, AutopilotSettings
from runtime.settings.roles import CoordinatorSettings, GatewaySettings
from runtime.settings.types import (
    SLO_TPOT_MS,
    SLO_TTFT_MS,
    WEIGHTS_HELP,
    CommaList,
    Device,
    Dtype,
    KeyOptions,
    Options,
    Panels,
    Port,
    Weights,
)
from runtime.settings.workers import WorkerSettings


class ServeSettings(KeyOptions):
    """Bring up a whole cluster on this machine, answer one question to show it works, and serve until Ctrl-C. It takes the
    options of crossdock coordinator, gateway, worker and autopilot, too, and hands them to these processes.
    """

    section = "serve"
    panels: ClassVar[Panels] = {
        "Model": "model model_id device dtype weights threads kv_gib",
        "Processes": "prefill decode mixed gateways ready_timeout_s",
        "Autopilot": "autopilot profile slo_ttft_ms slo_tpot_ms",
        "Network and keys": "host port api_keys keys metrics",
        "Tenants and records": "tenants usage_db event_log batch_db",
        "First question and output": "once detach verbose",
    }
    model: str = Field(
        "",
        description="Folder, ORG/NAME or ORG/NAME@REVISION of the model; empty: the embedded SmolLM2-135M-Instruct.",
        json_schema_extra={"also_argument": "MODEL"},
    )
    model_id: str = Field("", max_length=512, description="Model name that clients use; empty: taken from the model.")
    prefill: int = Field(1, ge=0, le=64, description="Number of prefill workers; with --mixed, 0 unless it is given.")
    decode: int = Field(1, ge=0, le=64, description="Number of decode workers; with --mixed, 0 unless it is given.")
    mixed: int = Field(
        0,
        ge=0,
        le=64,
        description="Number of workers that do both phases, each with one copy of the weights: no KV crosses between processes,"
        " but long prompts slow running streams.",
    )
    gateways: int = Field(
        1,
        ge=1,
        le=64,
        description="Number of gateways, on --port and the ports after it: while one is down, clients reach another.",
    )
    autopilot: Literal["off", "advise", "on"] = Field(
        "off",
        description="Watch the traffic and log which ratio of prefill and decode workers serves it best (advise), or also"
        " change workers' roles to get there (on). See crossdock autopilot.",
    )
    profile: str = Field("", description=f"For --autopilot: {PROFILE_HELP[0].lower()}{PROFILE_HELP[1:]}")
    slo_ttft_ms: float = Field(
        SLO_TTFT_MS, gt=0.0, le=3.6e6, description=f"For --autopilot: {TTFT_HELP[0].lower()}{TTFT_HELP[1:]}"
    )
    slo_tpot_ms: float = Field(
        SLO_TPOT_MS, gt=0.0, le=3.6e6, description=f"For --autopilot: {TPOT_HELP[0].lower()}{TPOT_HELP[1:]}"
    )
    host: str = Field(
        "127.0.0.1", min_length=1, description="Address the HTTP server listens on; 0.0.0.0 is every interface."
    )
    port: Port = Field(
        8000,
        description="Port of the HTTP server; 0: any free one. If you leave the default and it is taken, the next free one.",
    )
    api_keys: CommaList = Field(
        default_factory=list,
        description="Keys of the tenant 'default', separated by commas; without any, here or in the tenants file, no key is"
        " needed.",
        json_schema_extra={"aliases": ["--api-key"]},
    )
    tenants: str = Field(
        "",
        description="TOML file with priority classes, tenants, their limits and the hashes of their keys; read again when"
        " it changes. Empty: one tenant without limits.",
    )
    usage_db: str = Field(
        "",
        description="SQLite file with one row for each request, which crossdock usage shows. Empty: with --tenants the"
        " command's default, otherwise no record.",
    )
    batch_db: str = Field(
        "",
        description="SQLite file for /v1/files and /v1/batches; off: neither is served. Empty: one for each model in"
        " crossdock's state folder.",
    )
    device: Device = Field("auto", description="Where to compute; auto: the GPU if torch sees one, else the CPU.")
    dtype: Dtype = Field("auto", description="Type of weights and KV cache; auto: float32 on CPU, as stored on a GPU.")
    weights: Weights = Field("float32", description=WEIGHTS_HELP)
    threads: int = Field(
        0, ge=0, le=1024, description="CPU threads of each worker; 0: as many as its share of the cores."
    )
    kv_gib: float = Field(2.0, gt=0.0, le=16_384.0, description="Size of each worker's KV cache in GiB.")
    once: bool = Field(False, description="Stop after that answer: status 0 if it came, 1 if not.")
    detach: bool = Field(
        False, description="Return once it serves; it runs on until crossdock stop. crossdock logs shows its output."
    )
    ready_timeout_s: float = Field(
        180.0, gt=0.0, le=86_400.0, description="Seconds the cluster may take to be ready, once the model is on disk."
    )
    event_log: str = Field(
        "", description="File to record decisions in, for crossdock explain and replay; empty: none."
    )
    metrics: MetricsAddress = Field(
        "127.0.0.1:0",
        description="Where the coordinator's metrics are; the gateway's are on the next port, and so on, in the order of"
        " crossdock status, and last those of crossdock serve itself. Port 0: free ones; off: none.",
    )
    verbose: bool = Field(False, description="Show every log line of every process, not only warnings and errors.")

    @model_validator(mode="before")
    @classmethod
    def _mixed_alone(cls, given: dict[str, Any]) -> dict[str, Any]:
        alone = {"prefill": 0, "decode": 0} if str(given.get("mixed", 0)) != "0" else {}
        return alone | given

    @model_validator(mode="after")
    def _check_roles(self) -> Self:
        for option, count, what in (("--prefill", self.prefill, "prompts"), ("--decode", self.decode, "answers")):
            if not count + self.mixed:
                raise ValueError(f"{option}: 0, and no --mixed: nothing would compute {what}")
        return self

    @model_validator(mode="after")
    def _check_autopilot(self) -> Self:
        if self.autopilot != "off" and not self.profile:
            raise ValueError("--autopilot: needs --profile, which crossdock calibrate writes")
        return self


DECIDED: Final = frozenset(
    "name role mode bind coordinator advertise insecure log_format tokens_bind kv_bind transfer_host standby"
    " cpu_cores nice".split()
)


def options_for(settings: ServeSettings, cls: type[Options]) -> dict[str, Any]:
    """Returns the given options that `crossdock serve` does not have itself, for a process with these settings."""
    given = settings.model_fields_set & cls.model_fields.keys() - ServeSettings.model_fields.keys()
    return {key: getattr(settings, key) for key in given}


EveryServeOption: Final = create_model(
    "EveryServeOption",
    __base__=ServeSettings,
    __doc__=ServeSettings.__doc__,
    **{
        key: (field.annotation, field)
        for cls in (AutopilotSettings, WorkerSettings, GatewaySettings, CoordinatorSettings)
        for key, field in cls.model_fields.items()
        if key not in DECIDED and key not in ServeSettings.model_fields
    },
)  # type: ignore[call-overload]
"""The options of the command line: those of `ServeSettings`, and those of its processes, which `--help` does not list."""
