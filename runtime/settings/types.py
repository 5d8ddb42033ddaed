"""The base of settings classes, and the types that their options share."""

import ipaddress
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from runtime.settings.addresses import split_authority
from runtime.settings.cores import parse_cores

ENV_PREFIX = "CROSSDOCK_"


def _check_cores(value: str) -> str:
    parse_cores(value)
    return value


def split_commas(value: Any) -> Any:
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def _check_networks(values: list[str]) -> list[str]:
    for value in values:
        try:
            ipaddress.ip_network(value, strict=False)
        except ValueError:
            raise ValueError(f"has {value!r}, which is neither an address nor a network like 10.0.0.0/8") from None
    return values


def _check_hosts(values: list[str]) -> list[str]:
    for value in values:
        parts = split_authority(value)
        if value != "*" and (parts is None or parts[1]):
            raise ValueError(f"has {value!r}, which is not a host name like models.example.org, without a port")
    return values


Cores = Annotated[str, AfterValidator(_check_cores)]
CommaList = Annotated[list[str], NoDecode, BeforeValidator(split_commas)]
Networks = Annotated[CommaList, AfterValidator(_check_networks)]
HostNames = Annotated[CommaList, AfterValidator(_check_hosts)]
Port = Annotated[int, Field(ge=0, le=65535)]
Panels = Mapping[str, str]
Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Weights = Literal["float32", "bfloat16", "int8"]
SLO_TTFT_MS: Final = 2_000.0
SLO_TPOT_MS: Final = 100.0
SLO_PERCENTILE: Final = 0.9  # of requests that should keep the SLO, unless an option or a class says otherwise
WEIGHTS_HELP: Final = (
    "How the CPU kernels keep the weights. bfloat16 and int8 read less memory for each token, and change what the model says"
    " a little."
)


def model_id_of(model: str, model_id: str) -> str:
    """The id clients use: `model_id` where given, else a folder's own name, else `ORG/NAME` without a revision."""
    if model_id:
        return model_id
    path = Path(model).expanduser()
    return path.resolve().name if path.is_dir() else model.partition("@")[0]


class Options(BaseSettings):
    """Base of all settings: checked, immutable, no unknown keys."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, extra="forbid", frozen=True, protected_namespaces=())
    section: ClassVar[str] = ""  # in the TOML file; empty for commands that do not read it
    panels: ClassVar[Panels] = {}  # titles in `--help` → fields, in order; bases' follow, "Expert options" come last

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Arguments only: `runtime.settings.options.load` reads the others, so that it can say where a bad value came from."""
        return (init_settings,)


class JsonOption(Options):
    """The option of commands that print figures."""

    as_json: bool = Field(
        False,
        description="Print JSON on stdout in place of tables; what is for people goes to stderr then.",
        json_schema_extra={"option": "--json"},
    )


class EngineOptions(Options):
    """The options of workers, and of commands that start some for a measurement."""

    panels: ClassVar[Panels] = {"Engine": "engine engine_python vllm_args"}
    engine: Literal["crossdock", "vllm"] = Field(
        "crossdock",
        description="What computes the model. vllm: the models, kernels and quantization of an installed vLLM, with crossdock's"
        " blocks, steps and draws. See docs/engines.md.",
    )
    engine_python: str = Field(
        "",
        max_length=4096,
        description="Python that has vLLM, for --engine vllm. Empty: this one if it has it, else that of the vllm command.",
    )
    vllm_args: str = Field(
        "", max_length=4096, description="Options of vLLM itself, as vllm serve takes them, in quotes."
    )

    def engine_options(self) -> dict[str, Any]:
        """Returns those that were given, for the options of a cluster."""
        return {key: getattr(self, key) for key in self.model_fields_set & EngineOptions.model_fields.keys()}


class KeyOptions(Options):
    """The options of everything that connects to a cluster's ports."""

    keys: str = Field(
        "",
        description="Folder with the secret keys of the roles that run here and all public keys (crossdock keys new DIR)."
        " Links are encrypted, and only processes with a listed key are admitted, in their key's role. Empty: no keys.",
    )


class SecurityOptions(KeyOptions):
    """And what binds some of them."""

    insecure: bool = Field(
        False,
        description="Bind ports that other hosts can reach without --keys: everyone who reaches them may read and change"
        " everything.",
    )

    @model_validator(mode="after")
    def _check_keys(self) -> Self:
        if self.keys and self.insecure:
            raise ValueError("--insecure: says to go without keys, and --keys gives some; leave one out")
        return self
