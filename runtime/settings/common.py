"""Settings that every role has, and those of the roles that connect to the coordinator."""

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from runtime.settings.addresses import EVERY_INTERFACE, Addresses, AdvertisedAddress, MetricsAddress, host_of
from runtime.settings.types import Panels, SecurityOptions, model_id_of


class CommonSettings(SecurityOptions):
    """The options of every role."""

    panels: ClassVar[Panels] = {
        "Process": "name log_level log_format metrics",
        "Security": "keys insecure tls_certificate tls_key tls_client_ca",
        "Expert options": "heartbeat_ms",
    }
    name: str = Field(
        "",
        max_length=64,
        pattern=r"^[A-Za-z0-9_.:-]*\z",
        description="Name of this process in logs and in status; empty: role and process id.",
    )
    heartbeat_ms: int = Field(
        500,
        ge=10,
        le=60_000,
        description="Milliseconds in which two heartbeats are sent. A peer silent for three and a half of these is taken for"
        " lost: too short makes a busy process look dead, too long delays recovery.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least severe log line shown.")
    log_format: Literal["auto", "console", "json"] = Field(
        "auto", description="Form of log lines; auto: console on a terminal, JSON elsewhere."
    )
    metrics: MetricsAddress = Field(
        "127.0.0.1:0",
        description="Address and port, or port on loopback, of this process's /metrics, /health, /live and /ready; port 0: any"
        " free one, which crossdock status shows; off: none. Everyone who reaches it can read it.",
    )
    tls_certificate: str = Field(
        "",
        max_length=4096,
        description="PEM file with the certificate, and those that lead to its authority, for the metrics port and a gateway's"
        " HTTP port; read again when it changes. Empty: no TLS.",
    )
    tls_key: str = Field(
        "", max_length=4096, description="PEM file with the certificate's key; empty: it is in that of the certificate."
    )
    tls_client_ca: str = Field(
        "",
        max_length=4096,
        description="PEM file with the authority of clients' certificates. A gateway's HTTP port then refuses clients without"
        " one, and the metrics port answers them /health, /live and /ready only.",
    )

    @model_validator(mode="after")
    def _check_tls(self) -> Self:
        if (self.tls_key or self.tls_client_ca) and not self.tls_certificate:
            raise ValueError("--tls-key, --tls-client-ca: need --tls-certificate")
        return self


class ClientSettings(CommonSettings):
    """The options of the roles that connect to the coordinator."""

    panels: ClassVar[Panels] = {"Cluster": "coordinator advertise drain_timeout_s", "Model": "model model_id"}
    coordinator: Addresses = Field(
        "tcp://127.0.0.1:7070",
        description="Address of the coordinator; of several with one --database, the addresses, separated by commas.",
    )
    model: str = Field(
        min_length=1,
        description="Folder with a model in Hugging Face format (config, tokenizer, safetensors), ORG/NAME, or"
        " ORG/NAME@REVISION.",
    )
    model_id: str = Field(
        "", max_length=512, description="Model name that clients use; empty: the folder's name or ORG/NAME."
    )
    advertise: AdvertisedAddress = Field(
        "",
        description="Address at which others reach this process, like 10.0.0.5 or tcp://10.0.0.5:7070; without a port,"
        " the bound one. Empty: the bound address. Needed if it binds all interfaces, or is reached through another address.",
    )

    drain_timeout_s: float = Field(
        20.0,
        ge=0,
        le=86_400,
        description="Seconds that running streams have to end by themselves after SIGTERM or Ctrl-C; a second one ends at once."
        " After that, a worker's streams continue on other workers (it takes up to 5 s more), and a gateway's fail.",
    )

    @property
    def served_model_id(self) -> str:
        return model_id_of(self.model, self.model_id)

    def _check_reachable(self, option: str, bound: str) -> None:
        if host_of(bound) in EVERY_INTERFACE and not self.advertise:
            raise ValueError(f"--advertise: needed, since {option} {bound} is not an address others can connect to")
